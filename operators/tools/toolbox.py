"""The tools of an episode: what they are to it, their definitions for the policy, which tool
answers a call, and what one rollout has of them."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar, runtime_checkable

from dataflow.errors import OperatorError, WorldFailed
from dataflow.system.text import sound
from operators.chat.chat_format import ChatError, ChatFormat, Message
from operators.chat.tool_calls import (
    CallFormat,
    ReadTurn,
    TextCalls,
    arguments_of,
    definitions_of,
    distinct,
    format_of,
    result_of,
)
from operators.session_pool import SessionPool, until_loop_ends


class TookTooLong(Exception):
    """A call passed its time limit and was ended; the model is told."""


class ToolSession(Protocol):
    """What one rollout has of a toolset."""

    async def call(
        self, name: str, arguments: Mapping[str, Any], *, timeout_s: float, characters: int
    ) -> str:
        """A call's result for the model; text beyond `characters` may be cut. Raises WorldFailed
        where the session itself is broken, so that the result is unknown; TookTooLong and other
        exceptions are told to the model.
        """

    async def close(self) -> None:
        """Give back all that it has."""


@runtime_checkable
class Toolset(Protocol):
    """Tools that share a session."""

    @property
    def is_shared(self) -> bool:
        """Whether one session serves all rollouts of a process at once; the other numbers count for
        nothing then.
        """

    @property
    def at_once(self) -> int:
        """Most sessions that are alive at a time in a process."""

    @property
    def ahead(self) -> int:
        """Sessions that are kept ready before anybody asks."""

    @property
    def uses(self) -> int | None:
        """For how many rollouts a session serves, one after the other; None: as many as come."""

    def faults(self) -> Sequence[str]:
        """What cannot be right, in three parts each; quick, and asked on every machine."""

    def definitions(self) -> Sequence[Message]:
        """Its tools as OpenAI has them; asked once, in the worker. Raises GraphError."""

    async def open(self) -> ToolSession:
        """A session of its own. Raises WorldFailed."""


T = TypeVar("T")
THREADS = 64
"""Most calls at a time in a process."""


async def within(awaited: Awaitable[T], timeout_s: float) -> T:
    """What it gives; TookTooLong where that takes more than so many seconds, which no error of its
    own is.
    """
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            return await awaited
    except TimeoutError as error:
        if limit.expired():
            raise TookTooLong(f"took more than {timeout_s:g} s") from error
        raise


class ToolThreads:
    """Threads of one process; those of calls that passed their limit are given up, and counted."""

    def __init__(self, most: int = THREADS) -> None:
        self._most = most
        self._room = asyncio.Semaphore(most)
        self._lost = 0

    async def call(
        self, function: Callable[..., Any], arguments: Mapping[str, Any], timeout_s: float
    ) -> Any:
        """What a function gives; a coroutine function is awaited where it is. Raises what it
        raises, or TookTooLong.
        """
        if inspect.iscoroutinefunction(function):
            return await within(function(**arguments), timeout_s)
        async with self._room:
            if self._lost >= self._most:
                raise WorldFailed(
                    f"{self._lost} calls of tools never came back, the last of {function.__name__};"
                    " give what it waits for a limit of its own"
                )
            return await self._made(function, arguments, timeout_s)

    async def _made(
        self, function: Callable[..., Any], arguments: Mapping[str, Any], timeout_s: float
    ) -> Any:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
        is_lost = False

        def settle(value: Any, error: BaseException | None) -> None:
            if is_lost:
                self._lost -= 1
            elif not future.done():
                future.set_result((value, error))

        def run() -> None:
            value, raised = None, None
            try:
                value = function(**arguments)
            except BaseException as error:
                raised = error
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(settle, value, raised)

        threading.Thread(target=run, name=f"tool {function.__name__}", daemon=True).start()
        try:
            value, raised = await within(future, timeout_s)
        except BaseException:
            is_lost = True
            self._lost += 1
            raise
        if raised is not None:
            raise raised
        return value


GRACE_S = 5.0
"""For a session to end a call by itself, behind the limit of the call."""
PATIENCE_S = 900.0
"""For a session that is free: rollouts give theirs back when they end, and may wait for the policy
until then."""


class Toolbox:
    """Definitions, the format of calls, and by name who makes a call; in each process its threads
    and sessions.
    """

    def __init__(
        self,
        tools: Sequence[Any],
        *,
        calls: TextCalls | None,
        form: ChatFormat | None,
        timeout_s: float,
        characters: int,
        turn_s: float = 30.0,
    ) -> None:
        """Ask toolsets for what they have, and find how the policy writes calls. Raises GraphError.

        calls: how calls are written as text; None: as the chat template has them. timeout_s: of one
        call. turn_s: for all calls of a turn.
        """
        self.timeout_s, self.characters, self.turn_s = timeout_s, characters, turn_s
        self.toolsets: list[Toolset] = [tool for tool in tools if isinstance(tool, Toolset)]
        functions = [tool for tool in tools if not isinstance(tool, Toolset)]
        own = definitions_of(functions)
        theirs = [sound(toolset.definitions()) for toolset in self.toolsets]
        self.definitions = distinct([*own, *(tool for some in theirs for tool in some)])
        self.functions: dict[str, Callable[..., Any]] = {
            definition["function"]["name"]: function
            for definition, function in zip(own, functions, strict=True)
        }
        self.owners: dict[str, int] = {
            definition["function"]["name"]: at
            for at, some in enumerate(theirs)
            for definition in some
        }
        self.layout = calls
        self.calls = _format(calls, form)
        self._threads: ToolThreads | None = None
        self._pools: list[SessionPool[ToolSession]] = []
        self._shared: dict[int, asyncio.Task[ToolSession]] = {}
        self._keeping: asyncio.Task[None] | None = None

    @property
    def in_template(self) -> Sequence[Message]:
        """The definitions, where the chat template is to lay them out."""
        return self.definitions if self.layout is None else ()

    def threads(self) -> ToolThreads:
        """Those of this process."""
        if self._threads is None:
            self._threads = ToolThreads()
        return self._threads

    def pool(self, at: int) -> SessionPool[ToolSession]:
        """That of this process, of a toolset by its place; its event loop closes it at its end."""
        self._keep()
        if not self._pools:
            self._pools = [
                SessionPool(
                    toolset.open,
                    name=type(toolset).__name__,
                    most=toolset.at_once,
                    ahead=toolset.ahead,
                    uses=toolset.uses,
                    start_s=PATIENCE_S,
                    patience_s=PATIENCE_S,
                )
                for toolset in self.toolsets
            ]
        return self._pools[at]

    async def shared(self, at: int) -> ToolSession:
        """The session that all rollouts of this process have. Raises WorldFailed where none can be
        had; the next who asks tries again.
        """
        self._keep()
        task = self._shared.get(at)
        if task is None:
            task = self._shared[at] = asyncio.create_task(_opened(self.toolsets[at]))
        try:
            return await asyncio.shield(task)
        except Exception:
            if self._shared.get(at) is task:  # and not one that somebody has begun since
                del self._shared[at]
            raise

    async def lose(self, at: int, session: ToolSession) -> None:
        """A session that all had has failed: who asks next gets another."""
        task = self._shared.get(at)
        if task is not None and task.done() and task.result() is session:
            del self._shared[at]
            await session.close()

    async def close(self) -> None:
        """Close all sessions of this process."""
        shared, self._shared, self._keeping = self._shared, {}, None
        for task in shared.values():
            # one that was still being opened
            with contextlib.suppress(Exception, asyncio.CancelledError):
                await (await task).close()
        pools, self._pools = self._pools, []
        for pool in pools:
            await pool.close()

    def _keep(self) -> None:
        if self._keeping is None:
            self._keeping = asyncio.get_running_loop().create_task(until_loop_ends(self.close))


def tool_faults(tools: Sequence[Any], calls: TextCalls | None, *, is_chat: bool) -> list[str]:
    """What is wrong with an episode's tools, as far as that can be seen without a tokenizer."""
    faults = list(calls.faults()) if calls is not None else []
    for tool in tools:
        if isinstance(tool, Toolset):
            faults += tool.faults()
        elif not callable(tool) or inspect.isclass(tool):
            faults.append(
                f"{tool!r:.60} is no tool; give a function with type hints and a docstring, or a"
                " toolset"
            )
        else:
            faults += _unhinted(tool)
    if tools and calls is None and not is_chat:
        faults.append(
            "there are tools, but the generator has no chat template that says how they are called;"
            " give the episode calls=TextCalls(...), or Generator(chat=True)"
        )
    if calls is not None and not tools:
        faults.append(f"there is {calls!r:.60}, but no tool that could be called; give tools=[...]")
    return faults


def _unhinted(function: Callable[..., Any]) -> list[str]:
    name = getattr(function, "__name__", repr(function))
    parameters = inspect.signature(function).parameters.values()
    bare = [parameter.name for parameter in parameters if parameter.annotation is parameter.empty]
    odd = [
        str(parameter)
        for parameter in parameters
        if parameter.kind
        in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY)
    ]
    if bare or odd:
        return [
            f"tool '{name}' has {[*bare, *odd]}, which no schema describes; give each parameter a"
            " name and a hint"
        ]
    if not inspect.getdoc(function):
        return [
            f"tool '{name}' has no docstring; say what it does, and what each parameter is under"
            ' "Args:"'
        ]
    return []


async def _opened(toolset: Toolset) -> ToolSession:
    return await toolset.open()


def _format(calls: TextCalls | None, form: ChatFormat | None) -> CallFormat:
    if calls is not None:
        return calls.format()
    assert form is not None, "the graph was checked"
    call_format = format_of(form)
    if call_format is None or not form.takes_tools:
        raise ChatError(
            f"the chat template of '{form.name}' writes calls of tools in no known format; found"
            f" {form.calls!r:.80}; give the episode calls=TextCalls(...), and tell of the tools in"
            " a message"
        )
    return call_format


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
