"""What one rollout has of its episode's tools: calls are made here, with their limits, and sessions
kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from dataflow.errors import OperatorError, WorldFailed
from dataflow.system.text import sound
from operators.chat.chat_format import Message
from operators.chat.tool_calls import ReadTurn, arguments_of, result_of
from operators.tools.toolbox import GRACE_S, TookTooLong, Toolbox, ToolSession, Toolset


class RolloutTools:
    """Makes the calls of one rollout.

    Sessions are taken when the first of them is needed, all of them, in the order in which the
    tools were given: who waits for one holds none that stands behind it, so that no two rollouts
    wait for each other.
    """

    def __init__(
        self,
        box: Toolbox,
        pause: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        """pause: stops the clock of the world, while it waits for its turn."""
        self._box, self._rest = box, pause
        self._lent, self._taking = contextlib.AsyncExitStack(), asyncio.Lock()
        self._sessions: list[ToolSession | None] = []
        """By place of the toolset; None: of one that all share."""
        self.failure: WorldFailed | None = None
        """Why a tool was no tool any more; what is made of the rollout after this counts for
        nothing."""

    def read(self, text: str, first: int = 0) -> ReadTurn:
        """A turn of the policy's, with the calls that stand in it, numbered from `first` in its
        conversation.
        """
        return self._box.calls.read(text, self._box.definitions, first=first)

    def answer(self, call: Message | None, result: str) -> str | Message:
        """A result as the policy reads it. call: None where its text was no call."""
        if self._box.layout is not None:
            return self._box.layout.laid_out(result)
        return result if call is None else result_of(call, result)

    async def results(self, calls: Sequence[Message]) -> list[str]:
        """The results of a turn's calls for the model, one after the other as long as there is time
        for another. Raises WorldFailed where a tool has died.
        """
        box, results = self._box, list[str]()
        for call in calls:
            at = box.owners.get(call["function"]["name"])
            if at is not None:
                await self.session(box.toolsets[at])
        began = time.monotonic()
        for call in calls:
            left_s = box.turn_s - (time.monotonic() - began)
            late = left_s <= box.timeout_s + GRACE_S
            results.append(
                "error: there is no time left in this turn" if late else await self._result(call)
            )
        return results

    async def _result(self, call: Message) -> str:
        name = call["function"]["name"]
        try:
            arguments = arguments_of(call, self._box.definitions)
            return shown(await self._made(name, arguments), self._box.characters)
        except WorldFailed as error:
            self.failure = error
            raise
        except TookTooLong as error:
            return f"error: '{name}' {error}"
        except (Exception, SystemExit) as error:
            text = shown(str(error), self._box.characters)
            return (
                f"error: {text}"
                if type(error) is ValueError
                else f"error: {type(error).__name__}: {text}"
            )

    async def session(self, toolset: Toolset) -> ToolSession:
        """The session of this rollout with a toolset. Raises WorldFailed."""
        if toolset not in self._box.toolsets:
            raise OperatorError(
                f"{toolset!r:.60} is none of the episode's toolsets; found"
                f" {len(self._box.toolsets)} others; give it in tools=[...]"
            )
        box, at = self._box, self._box.toolsets.index(toolset)
        try:
            if toolset.is_shared:
                return await box.shared(at)
            async with self._taking:
                for place in range(len(self._sessions), len(box.toolsets)):
                    if box.toolsets[place].is_shared:
                        self._sessions.append(None)
                        continue
                    with self._rest():
                        self._sessions.append(
                            await self._lent.enter_async_context(box.pool(place).lend())
                        )
        except WorldFailed as error:
            self.failure = error
            raise
        session = self._sessions[at]
        assert session is not None, "it is not shared"
        return session

    async def close(self) -> None:
        """Give the sessions back."""
        self._sessions = []
        await self._lent.aclose()

    async def _made(self, name: str, arguments: dict[str, Any]) -> Any:
        limit_s, characters = self._box.timeout_s, self._box.characters
        function = self._box.functions.get(name)
        if function is not None:
            return await self._box.threads().call(function, arguments, limit_s)
        at = self._box.owners[name]
        session = await self.session(self._box.toolsets[at])
        limit = asyncio.timeout(limit_s + GRACE_S)
        try:
            async with limit:
                return await session.call(name, arguments, timeout_s=limit_s, characters=characters)
        except WorldFailed:
            await self._box.lose(at, session)
            raise
        except TimeoutError as error:
            if limit.expired():
                await self._box.lose(at, session)
                raise WorldFailed(f"'{name}' gave no answer for {limit_s + GRACE_S:g} s") from error
            raise


def shown(value: Any, characters: int) -> str:
    """What a tool gave, as text, cut where it is long.

    >>> shown("abcdef", 3)
    'abc\\n[cut: 6 characters in all]'
    >>> shown({"a": 1}, 80)
    '{"a": 1}'
    """
    text = value if isinstance(value, str) else _written(value)
    cut = sound(text[:characters])
    return cut if len(text) <= characters else f"{cut}\n[cut: {len(text)} characters in all]"


def _written(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return str(value)
