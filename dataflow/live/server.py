"""The page's server: uvicorn on loopback, with a deadline and a bound on everything."""

import asyncio
import errno
import functools
import html
import json
import logging
import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from dataflow.errors import DataflowError
from dataflow.live.steering import BODY_BYTES

LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Names by which a browser on this machine, or at the other end of a tunnel to it, may call the
server. Any other name is a page of somebody else, whose name now leads here."""

HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src"
        " 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Connection": "close",
}
"""Of every answer."""

NO_TOKEN = (
    "this page is shown to whoever has its whole address; take the one that dataflow live printed"
)
OTHER_SITE = "this page is for a browser on this machine, and answers no other site"
READ_ONLY = (
    "this page is read-only: GET and HEAD are all that is answered; dataflow live --steer serves"
    " one that may"
)
NO_POST = "POST is taken at api/steer alone, as application/json, from the page itself"
STEER = "api/steer"
"""Where a page that may steer sends its requests."""
ONCE = ("host", "origin", "sec-fetch-site", "content-length", "content-type")
"""Headers that decide who asks: a request that has one twice is refused."""

HEAD_BYTES = 16 * 1024
"""Of a request; its body has a bound of its own."""
BACKLOG = 1024
"""Connections that the system takes before the server does, which lets everything else go first."""
READERS = 4
"""Threads that read run folders."""
STEERERS = 2
"""Threads that bring requests to runs, which may take long: nobody who only looks waits for
them."""
LAST_TURNS_S = 0.01
"""In which connections end when the server closes."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class NotAdmitted:
    """Why a request is refused."""

    status: int
    why: str


def admit(
    method: str, target: str, headers: Headers, token: str, *, steers: bool = False
) -> str | NotAdmitted:
    """The address below the token, with its question (`api/now?run=0`), or why it is refused.

    target: as the request has it, with nothing decoded. steers: whether requests that change runs
    are taken.
    """
    if any(len(headers.getlist(name)) > 1 for name in ONCE):
        return NotAdmitted(status=400, why="of two equal headers nobody knows which one counts")
    if _is_from_elsewhere(headers):
        return NotAdmitted(status=403, why=OTHER_SITE)
    path, _, question = target.partition("?")
    shown_token, slash, address = path.removeprefix("/").partition("/")
    if not secrets.compare_digest(shown_token.encode(), token.encode()) or not slash:
        return NotAdmitted(status=403, why=NO_TOKEN)
    if method == "POST" and steers:
        if address != STEER or not _is_of_the_page(headers):
            return NotAdmitted(status=403, why=NO_POST)
    elif method not in ("GET", "HEAD"):
        return NotAdmitted(status=405, why=READ_ONLY)
    return f"{address}?{question}" if question else address


def _is_from_elsewhere(headers: Headers) -> bool:
    """Whether the browser says that another site asks, or calls the server by a name that is not
    this machine's.
    """
    host = headers.get("host", "")
    if _name(f"//{host}") not in LOOPBACK:
        return True
    if headers.get("origin", f"http://{host}") != f"http://{host}":
        return True
    return headers.get("sec-fetch-site", "none") not in ("none", "same-origin")


def _is_of_the_page(headers: Headers) -> bool:
    """Whether a script of the page sends it: a form can name neither this type nor, elsewhere, this
    origin.
    """
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    return (
        kind == "application/json" and headers.get("origin") == f"http://{headers.get('host', '')}"
    )


def _name(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


@dataclass(frozen=True, kw_only=True)
class ClientLimits:
    """How long a client may take, and how many there may be."""

    ask_s: float = 10.0
    """To send its request."""
    answer_s: float = 30.0
    """For the answer to be found."""
    take_s: float = 30.0
    """To take it in."""
    steer_s: float = 60.0
    """For a run to do what it was asked for."""
    connections: int = 96
    """At a time, of clients with the token; more are turned away. Of all that have not shown it yet
    as many: the one that came first makes room for the next."""


class PageServer:
    """An ASGI application that answers at http://127.0.0.1:PORT/TOKEN/, and its server.

    consumes: requests
    produces: answers
    waits for: clients and the disk, each for so long and no longer
    unblocked by: deadlines
    """

    def __init__(
        self,
        answer: Callable[[str], Response],
        token: str,
        limits: ClientLimits | None = None,
        steer: Callable[[str, bytes], Response] | None = None,
    ) -> None:
        """answer: what stands at an address below the token; called in threads. It raises
        LookupError where nothing does, DataflowError where that cannot be read. steer: does what
        the body of a request asks for, and raises likewise; None: nothing that changes a run is
        taken.
        """
        self._answer, self._token, self._steer = answer, token, steer
        self.limits = limits or ClientLimits()
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="reader")
        self._steerers = ThreadPoolExecutor(STEERERS, thread_name_prefix="steerer")
        self.strangers: dict[PageConnection, None] = {}
        """Clients that have not shown the token, in the order in which they came."""
        self.guests: set[PageConnection] = set()
        """Those that have."""
        self._config = uvicorn.Config(
            self,
            interface="asgi3",
            ws="none",
            lifespan="off",
            proxy_headers=False,
            server_header=False,
            date_header=False,
            access_log=False,
            log_config=None,
            log_level=logging.CRITICAL,
            h11_max_incomplete_event_size=HEAD_BYTES,
        )
        self._state = ServerState()
        self._server: asyncio.Server | None = None
        self.port = 0

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://127.0.0.1:{self.port}/{self._token}/"

    async def start(self, port: int = 0) -> None:
        """Listen. port: 0 for any that is free. Errors: OSError."""
        if not 0 <= port < 1 << 16:
            raise OSError(errno.EINVAL, "ports go from 0 to 65535")
        connect = functools.partial(
            PageConnection, config=self._config, server_state=self._state, app_state={}
        )
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(connect, "127.0.0.1", port, backlog=BACKLOG)
        self.port = self._server.sockets[0].getsockname()[1]

    async def run(self) -> None:
        """Serve until it is cancelled."""
        assert self._server is not None
        await self._server.serve_forever()

    async def close(self) -> None:
        """Listen no more, and let go who is being answered."""
        # a connection that was just accepted gets its protocol first, and each its end
        await asyncio.sleep(LAST_TURNS_S)
        if self._server is not None:
            self._server.close()
        for connection in [*self.strangers, *self.guests]:
            connection.transport.abort()
        for task in list(self._state.tasks):
            task.cancel()
        await asyncio.sleep(LAST_TURNS_S)
        self._readers.shutdown(wait=False)
        self._steerers.shutdown(wait=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        connection: PageConnection = scope["state"]["connection"]
        try:
            response = await self._response(connection, Request(scope, receive))
            response.headers.update(HEADERS)
            async with asyncio.timeout(self.limits.take_s):
                await response(scope, receive, send)
                await connection.lost.wait()
        except (OSError, TimeoutError, ClientDisconnect):
            connection.transport.abort()  # a client that went, or was too slow
        except Exception:
            log.exception("a request failed")
            connection.transport.abort()

    async def _response(self, connection: "PageConnection", request: Request) -> Response:
        connection.has_asked()
        target = request.scope["raw_path"].decode("latin-1")
        if request.scope["query_string"]:
            target += "?" + request.scope["query_string"].decode("latin-1")
        address = admit(
            request.method,
            target,
            request.headers,
            self._token,
            steers=self._steer is not None,
        )
        if isinstance(address, NotAdmitted):
            as_page = "text/html" in request.headers.get("accept", "")
            return sentence(address.status, address.why, as_page=as_page)
        self.strangers.pop(connection, None)
        self.guests.add(connection)
        if len(self.guests) > self.limits.connections:
            return sentence(503, "too many pages are open; close some")
        if request.method == "POST":
            return await self._steered(address, request)
        late = "the run's folder could not be read in time; the page asks again"
        call = functools.partial(self._answer, address)
        return await self._in_time(self._readers, call, self.limits.answer_s, late)

    async def _steered(self, address: str, request: Request) -> Response:
        """Take a request's body, and do what it asks for."""
        assert self._steer is not None
        length = request.headers.get("content-length", "")
        is_length = length.isascii() and length.isdecimal() and len(length) < 10
        if not is_length or int(length) > BODY_BYTES or "transfer-encoding" in request.headers:
            return sentence(
                413, f"a request has {BODY_BYTES} bytes at most, and says how many (Content-Length)"
            )
        async with asyncio.timeout(self.limits.ask_s):
            body = await request.body()
        late = (
            f"the run has not answered within {self.limits.steer_s:.0f} s and may still do it; see"
            " its requests"
        )
        call = functools.partial(self._steer, address, body)
        return await self._in_time(self._steerers, call, self.limits.steer_s, late)

    async def _in_time(
        self, pool: ThreadPoolExecutor, call: Callable[[], Response], within_s: float, late: str
    ) -> Response:
        """What a call in a thread gives, or the sentence that tells why nothing. late: that of one
        that takes long.
        """
        try:
            async with asyncio.timeout(within_s):
                return await asyncio.get_running_loop().run_in_executor(pool, call)
        except TimeoutError:
            return sentence(503, late)
        except LookupError as error:
            return sentence(404, str(error.args[0]) if error.args else "nothing stands here")
        except (ValueError, DataflowError) as error:
            return sentence(400 if isinstance(error, ValueError) else 409, str(error))


class PageConnection(H11Protocol):
    """A client, of one request: let go where the request takes too long to come, or where too many
    others have come since.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """It may ask."""
        super().connection_made(transport)
        self._page: PageServer = self.app
        self.lost = asyncio.Event()
        self.app_state: dict[str, Any] = {"connection": self}
        self._deadline = self.loop.call_later(self._page.limits.ask_s, transport.abort)
        self._page.strangers[self] = None
        if len(self._page.strangers) > self._page.limits.connections:
            first = next(iter(self._page.strangers))
            del self._page.strangers[first]
            first.transport.abort()

    def has_asked(self) -> None:
        """Its request is there; what it takes from now on has deadlines of its own."""
        self._deadline.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has gone, with all that it was sent."""
        super().connection_lost(exc)
        self._deadline.cancel()
        self._page.strangers.pop(self, None)
        self._page.guests.discard(self)
        self.lost.set()


def sentence(status: int, why: str, *, as_page: bool = False) -> Response:
    """A sentence in place of what was asked for. as_page: for a person who opened the address, and
    not for a script.
    """
    if as_page:
        page = (
            '<!doctype html><html lang="en"><title>dataflow'
            f" live</title><p>{html.escape(why)}.</p></html>"
        )
        return Response(page, status, media_type="text/html")
    return Response(json.dumps({"error": why}), status, media_type="application/json")
