"""Laws of MCP servers as tools: what they say is told, what they fail in is the world's, none
outlives its session.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from rigs.machine import alive, descendants, wait_until

from dataflow.errors import WorldFailed
from dataflow.system.child import fork
from operators.chat.tool_calls import TextCalls
from operators.tools import McpServer
from operators.tools.mcp_server import McpSession
from operators.tools.toolbox import RolloutTools, Toolbox, tool_faults

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


RIG = str(Path(__file__).with_name("mcp_rig.py"))


COMMAND = (sys.executable, RIG)


FOUND = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}


"""Where the server finds its packages."""


DEADLINE_S = 30.0


@pytest.fixture(autouse=True)
def library() -> None:
    pytest.importorskip("mcp", reason="the extra `mcp` is not installed")


@pytest.fixture(params=["stdio", "http"])
def server(request: pytest.FixtureRequest) -> Iterator[McpServer]:
    if request.param == "stdio":
        yield McpServer(command=COMMAND, environment=FOUND)
        return
    with served() as url:
        yield McpServer(url=url)


@contextlib.contextmanager
def served() -> Iterator[str]:
    """A server over HTTP."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    process = subprocess.Popen([*COMMAND, str(port)], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
                break
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


def in_session(server: McpServer, work: Callable[[McpSession], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        session = await server.open()
        try:
            return await work(session)
        finally:
            await session.close()

    before = descendants()
    found = asyncio.run(run())
    wait_until(lambda: not alive(descendants() - before), DEADLINE_S, "the end of the server")
    return found


async def called(session: McpSession, name: str, timeout_s: float = 20.0, **arguments: Any) -> str:
    return await session.call(name, arguments, timeout_s=timeout_s, characters=100)


def test_its_tools_are_those_of_the_server(server: McpServer) -> None:
    found = {each["function"]["name"]: each["function"] for each in server.definitions()}
    assert set(found) == {"add", "count", "fail", "hang", "much", "die", "spawn"}
    assert found["add"]["description"] == "Adds two numbers." and set(
        found["add"]["parameters"]["properties"]
    ) == {
        "a",
        "b",
    }


def test_calls_are_answered_errors_told_and_a_session_kept(server: McpServer) -> None:
    async def work(session: McpSession) -> None:
        assert await called(session, "add", a=2, b=3) == "5"
        assert (await called(session, "fail")).startswith("error: ")
        assert [await called(session, "count") for _ in range(2)] == ["1", "2"]
        assert len(await called(session, "much")) >= 1 << 20
        wrong = await called(session, "add", a="x", b=3)
        assert wrong.startswith("error: ")
        found = await asyncio.gather(*(called(session, "add", a=n, b=n) for n in range(8)))
        assert found == [str(2 * n) for n in range(8)]

    in_session(server, work)


@pytest.mark.parametrize(
    ("name", "found"), [("hang", "gave no answer for 'hang'"), ("die", "the MCP server")]
)
def test_a_server_that_hangs_or_dies_is_the_worlds_failure(
    server: McpServer, name: str, found: str
) -> None:
    async def work(session: McpSession) -> None:
        with pytest.raises(WorldFailed, match=found) as caught:
            await called(session, name, timeout_s=20.0 if name == "die" else 1.0)
        assert name == "hang" or "it took more than" not in str(caught.value)

    in_session(server, work)


def test_a_server_that_cannot_be_started_is_the_worlds_failure() -> None:
    for server in (
        McpServer(command=("/no/such/program",), start_s=20.0),
        McpServer(url="http://127.0.0.1:9/mcp"),
    ):
        with pytest.raises(WorldFailed, match="began no session"):
            asyncio.run(server.open())
    silent, before = McpServer(command=("sleep", "1000"), start_s=1.0), descendants()
    with pytest.raises(WorldFailed, match="took more than 1 s"):
        asyncio.run(silent.open())
    wait_until(lambda: not alive(descendants() - before), DEADLINE_S, "the end of the server")


def test_what_a_server_started_ends_with_its_session_and_with_the_process_that_has_it(
    tmp_path: Path,
) -> None:
    async def work(session: McpSession) -> int:
        return int(await called(session, "spawn"))

    assert not alive([in_session(McpServer(command=COMMAND, environment=FOUND), work)])
    mark = tmp_path / "pid"

    def body() -> int:
        async def run() -> None:
            session = await McpServer(command=COMMAND, environment=FOUND).open()
            pid = await called(session, "spawn")
            mark.with_suffix(".new").write_text(pid)
            mark.with_suffix(".new").rename(mark)
            await asyncio.sleep(60)

        asyncio.run(run())
        return 0

    child = fork(body)
    wait_until(mark.exists, DEADLINE_S, "the server")
    below = psutil.Process(child.pid).children(recursive=True)
    assert len(below) >= 3, "keeper, server, and what it started"
    os.kill(child.pid, signal.SIGKILL)
    child.wait(DEADLINE_S)
    wait_until(lambda: not alive(each.pid for each in below), DEADLINE_S, "the end of what it had")


def test_sessions_are_a_credit_and_may_serve_one_rollout_after_the_other() -> None:
    server = McpServer(command=COMMAND, environment=FOUND, only=("count",), at_once=1, uses=None)

    box = Toolbox(
        [server], calls=TextCalls(begin="[", end="]"), form=None, timeout_s=20.0, characters=100
    )

    async def run() -> list[str]:
        found = []
        for _ in range(3):
            tools = RolloutTools(box)
            found += await tools.results(tools.read("[count()]").message["tool_calls"])
            await tools.close()
        await box.close()
        return found

    assert asyncio.run(run()) == ["1", "2", "3"]


def test_servers_that_cannot_be_are_refused() -> None:
    for server, found in (
        (McpServer(), "is not one server"),
        (McpServer(command="npx server"), "is one text"),  # type: ignore[arg-type]
        (McpServer(command=COMMAND, environment=FOUND, at_once=0), "McpServer(at_once=0)"),
    ):
        assert found in " ".join(tool_faults([server], TextCalls(), is_chat=False))
    with pytest.raises(WorldFailed, match="has no tool \\['sub'\\]"):
        McpServer(command=COMMAND, environment=FOUND, only=("sub",)).definitions()
