"""HTTP for the page: requests in, answers out, on loopback, with a deadline and a bound on
everything.
"""

import asyncio
import functools
import html
import io
import json
import logging
import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

from dataflow.errors import DataflowError
from dataflow.live.steering import BODY_BYTES

# Who gets an answer from the page's server, and under which rules a browser shows it; pure.

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


@dataclass(frozen=True, kw_only=True)
class PageRequest:
    """A request, as its first lines have it."""

    method: str
    target: str
    headers: Mapping[str, str]
    """Names in lower case."""


@dataclass(frozen=True, kw_only=True)
class NotAdmitted:
    """Why there is no answer."""

    status: int
    why: str


def admit(asked: PageRequest, token: str, *, steers: bool = False) -> str | NotAdmitted:
    """The address below the token, with its question: `api/now?run=0`; or why it gets nothing.
    steers: whether requests that change runs are taken.
    """
    if _is_from_elsewhere(asked.headers):
        return NotAdmitted(status=403, why=OTHER_SITE)
    path, _, question = asked.target.partition("?")
    given, slash, rest = path.removeprefix("/").partition("/")
    if not secrets.compare_digest(given.encode(), token.encode()) or not slash:
        return NotAdmitted(status=403, why=NO_TOKEN)
    if asked.method == "POST" and steers:
        if rest != STEER or not _is_of_the_page(asked.headers):
            return NotAdmitted(status=403, why=NO_POST)
    elif asked.method not in ("GET", "HEAD"):
        return NotAdmitted(status=405, why=READ_ONLY)
    return f"{rest}?{question}" if question else rest


def _is_from_elsewhere(headers: Mapping[str, str]) -> bool:
    """Whether the browser says that another site asks, or calls the server by a name that is not
    this machine's.
    """
    host = headers.get("host", "")
    if _name(f"//{host}") not in LOOPBACK:
        return True
    if "origin" in headers and headers["origin"] != f"http://{host}":
        return True
    return headers.get("sec-fetch-site", "none") not in ("none", "same-origin")


def _is_of_the_page(headers: Mapping[str, str]) -> bool:
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


HEAD_BYTES = 16 * 1024
"""Of a request; its body has a bound of its own."""
SLICE_BYTES = 256 * 1024
"""That are handed to the network at once."""
ONCE = ("host", "origin", "sec-fetch-site", "content-length", "content-type")
"""Lines of a request's head that decide who asks."""
BACKLOG = 1024
"""Connections that the system takes before the server does, which lets everything else go first."""
READERS = 4
"""Threads that read run folders."""
STEERERS = 2
"""Threads that bring requests to runs, which may take long: nobody who only looks waits for
them."""
log = logging.getLogger(__name__)


_TURNS = 5
"""Of the loop: a client that was just accepted is served by then, and one that was let go has its
socket closed."""


@dataclass(frozen=True, kw_only=True)
class Response:
    """What goes back."""

    body: bytes | Path
    """A path: the file, slice by slice."""
    kind: str = "application/json"
    status: int = 200
    file_name: str = ""
    """Under which a browser is to keep it; empty: it shows it."""


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
    """Answers at http://127.0.0.1:PORT/TOKEN/.

    consumes: requests
    produces: answers
    waits for: clients and the disk, each for so long and no longer
    unblocked by: deadlines
    """

    def __init__(
        self,
        answer: Callable[[str], Response],
        token: str,
        bounds: ClientLimits | None = None,
        steer: Callable[[str, bytes], Response] | None = None,
    ) -> None:
        """answer: what stands at an address below the token; called in threads. It raises
        LookupError where nothing does, DataflowError where that cannot be read. steer: does what
        the body of a request asks for, and raises likewise; None: nothing that changes a run is
        taken.
        """
        self._answer, self._token, self._bounds = answer, token, bounds or ClientLimits()
        self._steer = steer
        self._pool = ThreadPoolExecutor(READERS, thread_name_prefix="reader")
        self._steerers = ThreadPoolExecutor(STEERERS, thread_name_prefix="steerer")
        self._tasks: set[asyncio.Task[None]] = set()
        """One for each client."""
        self._strangers: dict[asyncio.StreamWriter, None] = {}
        """Clients that have not shown the token, in the order in which they came."""
        self._guests: set[asyncio.StreamWriter] = set()
        """Those that have."""
        self._server: asyncio.Server | None = None
        self.port = 0

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://127.0.0.1:{self.port}/{self._token}/"

    async def start(self, port: int = 0) -> None:
        """Listen. port: 0 for any that is free. Errors: OSError."""
        self._server = await asyncio.start_server(
            self._serve, "127.0.0.1", port, limit=HEAD_BYTES, backlog=BACKLOG
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def run(self) -> None:
        """Serve until it is cancelled."""
        assert self._server is not None
        async with self._server:
            await self._server.serve_forever()

    async def close(self) -> None:
        """Listen no more, and let go who is being answered."""
        # one that is being accepted, or cancelled before it is served, would leave its socket open
        await _pass_turns()
        if self._server is not None:
            self._server.close()
        await _pass_turns()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._bounds.ask_s)
        await _pass_turns()
        self._pool.shutdown(wait=False)
        self._steerers.shutdown(wait=False)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._strangers[writer] = None
        if len(self._strangers) > self._bounds.connections:
            first = next(iter(self._strangers))
            del self._strangers[first]
            first.transport.abort()
        try:
            await self._exchange(reader, writer)
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass  # a client that went, or was too slow: nobody else notices
        except Exception:
            log.exception("a request failed")
        finally:
            self._tasks.discard(task)
            self._strangers.pop(writer, None)
            self._guests.discard(writer)
            if writer.transport.get_write_buffer_size():
                writer.transport.abort()
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(self._bounds.ask_s):
                head = await reader.readuntil(b"\r\n\r\n")
            asked = parse(head)
        except asyncio.LimitOverrunError:
            asked = None
        if asked is None:
            await self._write(
                writer, sentence(400, "this is no request that a browser makes"), head_only=False
            )
            return
        admitted = admit(asked, self._token, steers=self._steer is not None)
        if not isinstance(admitted, NotAdmitted):
            self._strangers.pop(writer, None)
            self._guests.add(writer)
        if isinstance(admitted, NotAdmitted):
            answer = sentence(
                admitted.status,
                admitted.why,
                as_page="text/html" in asked.headers.get("accept", ""),
            )
        elif len(self._guests) > self._bounds.connections:
            answer = sentence(503, "too many pages are open; close some")
        elif asked.method == "POST":
            answer = await self._steered(admitted, asked.headers, reader)
        else:
            answer = await self._found(admitted)
        await self._write(writer, answer, head_only=asked.method == "HEAD")

    async def _steered(
        self, address: str, headers: Mapping[str, str], reader: asyncio.StreamReader
    ) -> Response:
        """Take a request's body, and do what it asks for."""
        assert self._steer is not None
        length = headers.get("content-length", "")
        if (
            not (length.isascii() and length.isdecimal() and len(length) < 10)
            or int(length) > BODY_BYTES
        ):
            return sentence(
                413, f"a request has {BODY_BYTES} bytes at most, and says how many (Content-Length)"
            )
        async with asyncio.timeout(self._bounds.ask_s):
            body = await reader.readexactly(int(length))
        late = (
            f"the run has not answered within {self._bounds.steer_s:.0f} s and may still do it; see"
            " its requests"
        )
        steer = functools.partial(self._steer, address, body)
        return await self._in_time(self._steerers, steer, self._bounds.steer_s, late)

    async def _found(self, address: str) -> Response:
        late = "the run's folder could not be read in time; the page asks again"
        return await self._in_time(
            self._pool, functools.partial(self._answer, address), self._bounds.answer_s, late
        )

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

    async def _write(
        self, writer: asyncio.StreamWriter, answer: Response, *, head_only: bool
    ) -> None:
        writer.transport.set_write_buffer_limits(high=SLICE_BYTES)
        async with asyncio.timeout(self._bounds.take_s):
            if isinstance(answer.body, bytes):
                writer.write(
                    heading(answer, len(answer.body)) + (b"" if head_only else answer.body)
                )
            else:
                with answer.body.open("rb") as body:
                    await self._put(writer, answer, body, head_only=head_only)
            writer.transport.set_write_buffer_limits(high=0)
            await writer.drain()

    async def _put(
        self, writer: asyncio.StreamWriter, answer: Response, body: BinaryIO, *, head_only: bool
    ) -> None:
        """A file, slice by slice."""
        size = body.seek(0, io.SEEK_END)
        body.seek(size if head_only else 0)
        loop, part = asyncio.get_running_loop(), heading(answer, size)
        while part:
            writer.write(part)
            await writer.drain()
            part = await loop.run_in_executor(self._pool, body.read, SLICE_BYTES)


async def _pass_turns() -> None:
    for _ in range(_TURNS):
        await asyncio.sleep(0)


def parse(head: bytes) -> PageRequest | None:
    """A request's first lines; None where they are none."""
    lines = head.decode("latin-1").split("\r\n")
    words = lines[0].split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1.") or not words[1].startswith("/"):
        return None
    headers: dict[str, str] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if colon:
            if name.lower() in headers and name.lower() in ONCE:
                return None  # of two nobody knows which counts
            headers[name.lower()] = value.strip()
    return PageRequest(method=words[0], target=words[1], headers=headers)


def heading(answer: Response, size: int) -> bytes:
    """The first lines of an answer."""
    lines = [f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in HEADERS.items()]
    lines += [
        f"Content-Type: {answer.kind}; charset=utf-8",
        f"Content-Length: {size}",
        "Connection: close",
    ]
    if answer.file_name:
        lines.append(f'Content-Disposition: attachment; filename="{answer.file_name}"')
    return "\r\n".join([*lines, "", ""]).encode("latin-1", "replace")


def sentence(status: int, why: str, *, as_page: bool = False) -> Response:
    """A sentence in place of what was asked for. as_page: for a person who opened the address, and
    not for a script.
    """
    if as_page:
        page = (
            '<!doctype html><html lang="en"><title>dataflow'
            f" live</title><p>{html.escape(why)}.</p></html>"
        )
        return Response(body=page.encode(), status=status, kind="text/html")
    return Response(body=json.dumps({"error": why}).encode(), status=status)
