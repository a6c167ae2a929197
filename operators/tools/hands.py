"""What one rollout has of its episode's tools: calls are made here, with their limits, and sessions kept."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from dataflow.errors import OperatorError, WorldFailed
from operators.chat.chat_format import Message
from operators.chat.function_tools import arguments_of
from operators.tools.toolbox import Toolbox
from operators.tools.toolset import TookTooLong, ToolSession, Toolset

_GRACE_S = 5.0
"""For a session to end a call by itself, behind the limit of the call."""


class ToolHands:
    """Makes the calls of one rollout.

    Sessions are taken when the first of them is needed, all of them, in the order in which the tools were given: who
    waits for one holds none that stands behind it, so that no two rollouts wait for each other.
    """

    def __init__(self, box: Toolbox, rest: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext) -> None:
        """rest: stops the clock of the world, while it waits for its turn."""
        self._box, self._rest = box, rest
        self._lent = contextlib.AsyncExitStack()
        self._sessions: list[ToolSession] = []
        self.called = 0
        """Calls that were read so far."""
        self.failure: WorldFailed | None = None
        """Why a tool was no tool any more; what is made of the rollout after this counts for nothing."""

    async def result(self, call: Message) -> str:
        """What a call came to, as the model hears it. Raises WorldFailed where the tool has died."""
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
            return f"error: {text}" if type(error) is ValueError else f"error: {type(error).__name__}: {text}"

    async def session(self, toolset: Toolset) -> ToolSession:
        """The session of this rollout with a toolset. Raises WorldFailed."""
        if toolset not in self._box.toolsets:
            raise OperatorError(
                f"{toolset!r:.60} is none of the episode's toolsets; found {len(self._box.toolsets)} others; "
                f"give it in tools=[...]"
            )
        at = self._box.toolsets.index(toolset)
        try:
            while len(self._sessions) < len(self._box.toolsets):
                pool = self._box.pool(len(self._sessions))
                with self._rest():
                    self._sessions.append(await self._lent.enter_async_context(pool.lend()))
        except WorldFailed as error:
            self.failure = error
            raise
        return self._sessions[at]

    async def close(self) -> None:
        """Give the sessions back."""
        self._sessions = []
        await self._lent.aclose()

    async def _made(self, name: str, arguments: dict[str, Any]) -> Any:
        limit_s, characters = self._box.timeout_s, self._box.characters
        function = self._box.functions.get(name)
        if function is not None:
            return await self._box.threads().call(function, arguments, limit_s)
        session = await self.session(self._box.toolsets[self._box.owners[name]])
        limit = asyncio.timeout(limit_s + _GRACE_S)
        try:
            async with limit:
                return await session.call(name, arguments, timeout_s=limit_s, characters=characters)
        except TimeoutError as error:
            if limit.expired():
                raise WorldFailed(f"'{name}' gave no answer for {limit_s + _GRACE_S:g} s") from error
            raise


def shown(value: Any, characters: int) -> str:
    """What a tool gave, as text, cut where it is long.

    >>> shown("abcdef", 3)
    'abc\\n[cut: 6 characters in all]'
    >>> shown({"a": 1}, 80)
    '{"a": 1}'
    """
    text = value if isinstance(value, str) else _written(value)
    text = text.encode("utf-8", "replace").decode() if len(text) <= characters else text
    return text if len(text) <= characters else f"{text[:characters]}\n[cut: {len(text)} characters in all]"


def _written(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return str(value)
