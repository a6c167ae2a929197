"""Servers that speak as those of OpenEnv and NeMo-Gym do, in a thread; they count the sessions that
they have.
"""

import asyncio
import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rigs.worlds import LETTERS


@dataclass
class Served:
    """What a server has seen."""

    url: str = ""
    open: int = 0
    most: int = 0
    """Sessions at once."""
    started: int = 0
    refused: int = 0
    """Who came when it was full."""
    busy: int = 0
    """Calls of /verify that it has yet to refuse."""
    steps: int = 0
    pongs: int = 0
    """Pings of the server's that were answered."""
    resets: list[dict[str, Any]] = field(default_factory=list)
    bodies: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """Routes and what was posted there."""
    log: Path | None = None
    """A file that gets a line for each session that begins or ends."""

    def begin(self) -> None:
        self.open, self.started = self.open + 1, self.started + 1
        self.most = max(self.most, self.open)
        self._note("begin")

    def end(self) -> None:
        self.open -= 1
        self._note("end")

    def _note(self, what: str) -> None:
        if self.log is not None:
            with self.log.open("a") as file:
                file.write(f"{what} {os.getpid()}\n")


@contextlib.contextmanager
def in_thread(
    serve: Callable[[asyncio.Event, Callable[[str], None]], Coroutine[Any, Any, None]],
) -> Iterator[str]:
    """Run `serve(until, ready)` in an event loop of its own; its address."""
    loop, there, address = asyncio.new_event_loop(), threading.Event(), []
    until = asyncio.Event()

    def ready(url: str) -> None:
        address.append(url)
        there.set()

    def work() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(serve(until, ready))
        loop.close()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert there.wait(20), "the server has not started"
    try:
        yield address[0]
    finally:
        loop.call_soon_threadsafe(until.set)
        thread.join(20)
        assert not thread.is_alive(), "the server has not ended"


@contextlib.contextmanager
def openenv(
    *,
    capacity: int = 1,
    turns: int = 2,
    ping_s: float | None = None,
    port: int = 0,
    log: Path | None = None,
    schema: str | None = None,
) -> Iterator[Served]:
    """An OpenEnv server: each connection one environment, worth 1 for each turn that begins with
    one of LETTERS.

    port: 0: any that is free. log: as of `Served`. ping_s: it pings so often, and closes who does
    not answer in ten seconds. "die" ends a connection, "think" is answered when nobody was for half
    a second, no ping either, "shout" with 10 MB, "mute" not at all, "broken" with an error of the
    environment; a number is no action. schema: what it answers at /schema; None: it has no such
    route.
    """
    from websockets.asyncio.server import serve
    from websockets.exceptions import ConnectionClosed

    served = Served(log=log)

    async def pinging(socket: Any) -> None:
        with contextlib.suppress(ConnectionClosed):
            while ping_s is not None:
                try:
                    await asyncio.wait_for(await socket.ping(), 10.0)
                except TimeoutError:
                    await socket.close(1011)
                served.pongs += 1
                await asyncio.sleep(ping_s)

    async def session(socket: Any) -> None:
        if served.open >= capacity:
            served.refused += 1
            full = {
                "type": "error",
                "data": {"message": "all are taken", "code": "CAPACITY_REACHED"},
            }
            await socket.send(json.dumps(full))
            return
        served.begin()
        pings = asyncio.create_task(pinging(socket))
        try:
            left = 0
            async for text in socket:
                request = json.loads(text)
                data = request.get("data", {})
                match request["type"]:
                    case "reset":
                        left = int(data.get("turns", turns))
                        served.resets.append(data)
                        answer = {
                            "observation": {"response": f"{data.get('seed')}="},
                            "reward": None,
                            "done": False,
                        }
                    case "step" if not isinstance(data.get("message"), str):
                        await socket.send(
                            json.dumps(
                                {
                                    "type": "error",
                                    "data": {
                                        "message": "Invalid message",
                                        "code": "VALIDATION_ERROR",
                                    },
                                }
                            )
                        )
                        continue
                    case "step":
                        served.steps += 1
                        said, left = data["message"], left - 1
                        if said == "die":
                            return
                        if said == "mute":
                            continue
                        if said == "think":
                            time.sleep(0.5)
                        if said == "broken":
                            await socket.send(
                                json.dumps(
                                    {
                                        "type": "error",
                                        "data": {"message": "no disk", "code": "EXECUTION_ERROR"},
                                    }
                                )
                            )
                            continue
                        shown = "a" * (10 << 20) if said == "shout" else f"{said[:1]}="
                        answer = {
                            "observation": {"response": shown},
                            "reward": float(said[:1] in LETTERS),
                            "done": left <= 0,
                        }
                    case "state":
                        await socket.send(json.dumps({"type": "state", "data": {"step_count": 0}}))
                        continue
                    case _:
                        return
                await socket.send(json.dumps({"type": "observation", "data": answer}))
        finally:
            pings.cancel()
            served.end()

    def routed(connection: Any, request: Any) -> Any:
        if request.path != "/schema":
            return None
        return (
            connection.respond(404, "no route")
            if schema is None
            else connection.respond(200, schema)
        )

    async def work(until: asyncio.Event, ready: Callable[[str], None]) -> None:
        async with serve(
            session, "127.0.0.1", port, close_timeout=1, ping_interval=None, process_request=routed
        ) as server:
            ready(f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            await until.wait()

    with in_thread(work) as url:
        served.url = url
        yield served


@contextlib.contextmanager
def nemo_gym(*, capacity: int = 64, port: int = 0) -> Iterator[Served]:
    """A resources server of NeMo-Gym in both protocols, by its documentation: /seed_session,
    /increment (a tool), /verify, which compares the count with `expected_count`; /reset, /step,
    /close, worth 1 for each turn of LETTERS.
    """
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, PlainTextResponse, Response
    from starlette.routing import Route

    served, counts = Served(), {}  # type: ignore[var-annotated]

    async def answer(request: Request) -> Response:
        body, route = await request.json(), request.url.path
        served.bodies.append((route, body))
        key = request.cookies.get("session", "")
        if route in ("/seed_session", "/reset"):
            if served.open >= capacity:
                served.refused += 1
                return PlainTextResponse("full", status_code=503)
            assert not key, "a session is new"
            served.begin()
            key = f"s{served.started}"
            counts[key] = body.get("initial_count", 0)
            made: Response = JSONResponse(
                {}
                if route == "/seed_session"
                else {"observation": "deal", "info": {"supports_explicit_close": True}}
            )
            made.set_cookie("session", key)
            return made
        if key not in counts:
            return PlainTextResponse("no session", status_code=400)
        match route:
            case "/increment":
                counts[key] += body["count"]
                return JSONResponse({"success": True})
            case "/break":
                return PlainTextResponse("no disk", status_code=500)
            case "/verify" if served.busy:
                served.busy -= 1
                return PlainTextResponse("later", status_code=503)
            case "/verify":
                for needed in (
                    "id",
                    "created_at",
                    "model",
                    "object",
                    "output",
                    "parallel_tool_calls",
                    "tool_choice",
                    "tools",
                ):
                    assert needed in body["response"], needed
                served.end()
                return JSONResponse(
                    {**body, "reward": float(counts.pop(key) == body["expected_count"])}
                )
            case "/step":
                (item,) = body["response"]["output"]
                said = item["content"][0]["text"]
                counts[key] += 1
                over = counts[key] == 2
                return JSONResponse(
                    {
                        "observation": f"{said[:1]}=",
                        "reward": float(said[:1] in LETTERS),
                        "terminated": over,
                        "truncated": False,
                        "info": {},
                    }
                )
            case "/close":
                del counts[key]
                served.end()
                return JSONResponse({})
        return PlainTextResponse("Not Found", status_code=404)

    app = Starlette(routes=[Route("/{route:path}", answer, methods=["POST"])])

    async def work(until: asyncio.Event, ready: Callable[[str], None]) -> None:
        server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error", lifespan="off"))
        running = asyncio.ensure_future(server.serve())
        began = time.monotonic()
        while not server.started and time.monotonic() - began < 10:
            await asyncio.sleep(0.01)
        ready(f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}")
        await until.wait()
        server.should_exit = True
        await running

    with in_thread(work) as url:
        served.url = url
        yield served
