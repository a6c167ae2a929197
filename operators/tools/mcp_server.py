"""Servers that speak MCP as tools: programs of this machine over their streams, or others over HTTP
(extra `mcp`).
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dataflow.errors import WorldFailed, is_whole
from dataflow.system.child import below_keeper
from operators.chat.chat_format import Message

_CLOSE_S = 5.0
_INVALID = range(-32602, -32600)
"""Codes of JSON-RPC for a call that cannot be made as it is: whoever made it is told."""


@dataclass(frozen=True, kw_only=True)
class McpServer:
    """The tools of a server: `McpServer(command=("npx", "some-server"))`, or
    `McpServer(url="https://.../mcp")`.
    """

    command: tuple[str, ...] = ()
    """What starts it; it speaks over its streams, and ends with the episode's process."""
    url: str = ""
    """Where it serves (Streamable HTTP)."""
    environment: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Variables for the command, beside those that every program needs."""
    only: tuple[str, ...] = ()
    """Which of its tools the policy has; empty: all."""
    at_once: int = 16
    """Most sessions that are alive in a process of the episode; who finds none free waits for
    one."""
    ahead: int = 0
    """Sessions that are begun before anybody asks."""
    uses: int | None = 1
    """For how many rollouts a session serves, one after the other, for servers that keep nothing of
    one call for the next; None: as many as come."""
    is_shared: bool = False
    """Whether one session serves all rollouts of a process at once, for servers that keep nothing
    at all."""
    start_s: float = 30.0
    """For a session to begin."""

    def faults(self) -> Sequence[str]:
        """What cannot be right."""
        faults = []
        if bool(self.command) == bool(self.url):
            faults.append(
                f"McpServer(command={self.command!r}, url={self.url!r}) is not one server; give a"
                " command or a url"
            )
        if isinstance(self.command, str):
            faults.append(
                f"McpServer(command={self.command!r}) is one text; give a tuple of a program and"
                " its arguments"
            )
        for knob, value, least in (
            ("at_once", self.at_once, 1),
            ("ahead", self.ahead, 0),
            ("uses", self.uses, 1),
        ):
            if value is not None and not is_whole(value, least):
                faults.append(
                    f"McpServer({knob}={value!r}) cannot be; give a whole number of {least} or more"
                )
        if importlib.util.find_spec("mcp") is None:
            faults.append(
                "McpServer needs the package `mcp`, which is not installed; pip install"
                " 'dataflow-rl[mcp]'"
            )
        return faults

    def definitions(self) -> Sequence[Message]:
        """Ask it for its tools. Raises WorldFailed."""
        return asyncio.run(self._asked())

    async def open(self) -> McpSession:
        """Begin a session. Raises WorldFailed."""
        session = McpSession(self)
        await session.begin()
        return session

    @property
    def named(self) -> str:
        """What messages call it."""
        return self.url or " ".join(self.command)

    async def _asked(self) -> Sequence[Message]:
        session = await self.open()
        try:
            return await session.definitions(self.only)
        finally:
            await session.close()


class McpSession:
    """One session with a server, in a task of its own, as the library wants its beginning and its
    end in one place.

    consumes: calls, several at a time
    produces: what each came to
    waits for: the server's answers, until the limit of the call
    unblocked by: an answer, the end of the connection, or the clock
    """

    def __init__(self, server: McpServer) -> None:
        self._server = server
        self._client: Any = None
        self._begun = asyncio.Event()
        self._over = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Connect. Raises WorldFailed."""
        self._task = asyncio.create_task(self._held())
        begun = asyncio.create_task(self._begun.wait())
        try:
            await asyncio.wait(
                {self._task, begun},
                timeout=self._server.start_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not self._begun.is_set():
                raise WorldFailed(
                    f"the MCP server '{self._server.named}' began no session; {self._why()}"
                )
        except BaseException:
            await self.close()
            raise
        finally:
            begun.cancel()

    async def definitions(self, only: Sequence[str]) -> Sequence[Message]:
        """Its tools as OpenAI has them. Raises WorldFailed."""
        definitions: list[Message] = []
        cursor: str | None = None
        while True:
            page = await self._awaited(
                self._client.list_tools(cursor=cursor), self._server.start_s, "its tools"
            )
            for tool in page.tools:
                if not only or tool.name in only:
                    function = {
                        "name": tool.name,
                        "description": tool.description or "",
                        "parameters": tool.input_schema,
                    }
                    definitions.append({"type": "function", "function": function})
            cursor = page.next_cursor
            if not cursor:
                break
        lost = sorted({*only} - {definition["function"]["name"] for definition in definitions})
        if lost:
            raise WorldFailed(
                f"the MCP server '{self._server.named}' has no tool {lost}; leave it out of only="
            )
        return definitions

    async def call(
        self, name: str, arguments: Mapping[str, Any], *, timeout_s: float, characters: int
    ) -> str:
        """As `ToolSession.call`. A server that gives no answer in time has failed, and so has one
        that is gone.
        """
        from mcp import MCPError

        try:
            result = await self._awaited(
                self._client.call_tool(name, dict(arguments)), timeout_s, f"'{name}'"
            )
        except MCPError as error:
            if error.code in _INVALID:
                raise ValueError(str(error)) from error
            raise WorldFailed(
                f"the MCP server '{self._server.named}' failed in '{name}': {error}"
            ) from error
        texts = [_text(block) for block in result.content]
        text = "\n".join(texts) or json.dumps(result.structured_content or {}, ensure_ascii=False)
        return f"error: {text}" if result.is_error else text

    async def close(self) -> None:
        """End the session, and the server where it is a program of ours."""
        self._over.set()
        task, self._task = self._task, None
        if task is None:
            return
        try:
            if self._begun.is_set():
                await asyncio.wait({task}, timeout=_CLOSE_S)
        finally:
            task.cancel()  # also where who waits for this gives up
        await asyncio.wait({task}, timeout=_CLOSE_S)

    async def _held(self) -> None:
        from mcp import Client

        async with Client(self._transport()) as self._client:
            self._begun.set()
            await self._over.wait()

    def _transport(self) -> Any:
        if self._server.url:
            return self._server.url
        from mcp import StdioServerParameters
        from mcp.client.stdio import stdio_client

        command, *arguments = below_keeper(self._server.command)
        parameters = StdioServerParameters(
            command=command, args=arguments, env=dict(self._server.environment)
        )
        return stdio_client(parameters)

    async def _awaited(self, call: Any, timeout_s: float, request: str) -> Any:
        """What the server answers. Raises WorldFailed where the session ends meanwhile, or the time
        does.
        """
        assert self._task is not None
        answer = asyncio.ensure_future(call)
        try:
            await asyncio.wait(
                {answer, self._task}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if answer.done():
                return answer.result()
            raise WorldFailed(
                f"the MCP server '{self._server.named}' gave no answer for {request}; "
                + (self._why() if self._task.done() else f"it took more than {timeout_s:g} s")
            )
        finally:
            if not answer.done():
                answer.cancel()
                await asyncio.wait({answer}, timeout=_CLOSE_S)

    def _why(self) -> str:
        task = self._task
        if task is None or not task.done():
            return f"it took more than {self._server.start_s:g} s"
        error = None if task.cancelled() else task.exception()
        while isinstance(error, BaseExceptionGroup) and error.exceptions:
            error = error.exceptions[0]
        return f"{type(error).__name__}: {error}" if error else "it ended the session"


def _text(block: Any) -> str:
    """A part of an answer as text; what is none is named."""
    text = getattr(block, "text", None)
    return text if isinstance(text, str) else f"[{getattr(block, 'type', type(block).__name__)}]"
