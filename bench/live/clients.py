"""Pages without a browser: a process that asks a live page's server for what a page asks for, at
its pace.

It takes as little of a processor as it can, and goes last (SCHED_IDLE): what a browser makes of an
answer is none of the server's. It is told on its standard input how many pages there are from now
on, a line each time: a number, or `never` for one that takes no answers; after each it prints what
was done since the line before, as JSON.
"""

import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from urllib.parse import urlencode, urlsplit

EVERY_S, SERIES_S = 1.0, 2.0
"""As page.js has them."""
FILES = (
    "",
    "picture.css",
    "page.css",
    "page.js",
    "text.js",
    "graph.js",
    "charts.js",
    "rollouts.js",
    "steer.js",
)
NEVER = "never"
DOZEN = 12
"""Series that a page shows at first."""
UNREAD = 20
"""Answers that a client which never reads leaves lying at a time."""
PAGES = 10
"""That there may be."""
_CHANGES = re.compile(rb'"changes": ?(\d+)')


@dataclass
class Done:
    """What clients did."""

    answers: int = 0
    failed: int = 0
    received: int = 0
    """Bytes."""


class PageClient:
    """One page that is open and seen.

    consumes: answers
    produces: requests, as the page's scripts make them
    waits for: the server, 40 s at most, as they do
    unblocked by: its answer, or that deadline
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._port, self._path = parts.port or 80, parts.path
        self.done = Done()
        self._changes, self._drawn = b"", 0.0
        self._keys: list[str] = []

    def load(self) -> None:
        """What a page asks for when it is opened."""
        for name in FILES:
            self.get(name)
        for name in ("runs", "graph?run=0", "rollouts?run=0&kind=step&page=0&sort=step&order=down"):
            self.get(f"api/{name}")

    def look(self, now: float) -> None:
        """What it asks for once a second; now: seconds of time.monotonic."""
        match = _CHANGES.search(self.get("api/now?run=0"))
        if match is None or match[1] == self._changes or now - self._drawn < SERIES_S:
            return
        self._changes, self._drawn = match[1], now
        names = self.get("api/names?run=0")
        self.get("api/marks?run=0")
        if len(self._keys) < DOZEN and names:
            self._keys = [
                series["key"] for series in json.loads(names)["series"] if series["first"]
            ]
        self.get(
            f"api/series?{urlencode({'run': 0, 'key': self._keys, 'points': 600}, doseq=True)}"
        )

    def get(self, address: str) -> bytes:
        """What stands there; empty where that is nothing."""
        try:
            with socket.create_connection(("127.0.0.1", self._port), timeout=40) as client:
                start = f"GET {self._path}{address} HTTP/1.1"
                client.sendall(f"{start}\r\nHost: 127.0.0.1:{self._port}\r\n\r\n".encode())
                parts = list(iter(lambda: client.recv(1 << 18), b""))
        except OSError:
            self.done.failed += 1
            return b""
        head, _, body = b"".join(parts).partition(b"\r\n\r\n")
        self.done.answers += 1
        self.done.failed += head[9:12] != b"200"
        self.done.received += len(body)
        return body if head[9:12] == b"200" else b""


class Unreading:
    """A page that asks once a second, and never takes an answer."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._port = parts.port or 80
        address = f"{parts.path}api/rollouts?run=0&kind=step&page=0&sort=step&order=down"
        self._asks = f"GET {address} HTTP/1.1\r\nHost: 127.0.0.1:{self._port}\r\n\r\n".encode()
        self._held: list[socket.socket] = []
        self.done = Done()

    def look(self, now: float) -> None:
        """Ask once more."""
        try:
            client = socket.create_connection(("127.0.0.1", self._port), timeout=10)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            client.sendall(self._asks)
        except OSError:
            self.done.failed += 1
            return
        self._held.append(client)
        self.done.answers += 1
        if len(self._held) > UNREAD:
            self._held.pop(0).close()

    def rest(self) -> None:
        """Let all go."""
        while self._held:
            self._held.pop().close()


class Clients:
    """All pages of a bench.

    consumes: how many there are
    produces: their requests
    waits for: the next word, and their pace
    unblocked by: `show`
    """

    def __init__(self, url: str) -> None:
        self._pages, self._unreading = [PageClient(url) for _ in range(PAGES)], Unreading(url)
        self._shown: frozenset[int] = frozenset()
        self._changed = threading.Condition()
        for number in range(-1, PAGES):
            threading.Thread(target=self._be, args=(number,), daemon=True).start()

    def load(self) -> None:
        """Open all pages."""
        for page in self._pages:
            page.load()
            page.look(time.monotonic())

    def show(self, word: str) -> Done:
        """Let there be so many from now on; what was done since the word before."""
        with self._changed:
            self._shown = frozenset({-1} if word == NEVER else range(int(word)))
            self._changed.notify_all()
        clients: list[PageClient | Unreading] = [self._unreading, *self._pages]
        total = Done(
            *(
                sum(getattr(client.done, name) for client in clients)
                for name in ("answers", "failed", "received")
            )
        )
        for client in clients:
            client.done = Done()
        return total

    def _be(self, number: int) -> None:
        """One page; -1 for the one that never reads."""
        client: PageClient | Unreading = self._unreading if number < 0 else self._pages[number]
        phase = max(0, number) / PAGES
        while True:
            with self._changed:
                if number not in self._shown and isinstance(client, Unreading):
                    client.rest()
                self._changed.wait_for(lambda: number in self._shown)
            now = time.monotonic()
            client.look(now)
            time.sleep(max(0.0, EVERY_S - (time.monotonic() - phase) % EVERY_S))


def main(arguments: Sequence[str]) -> None:
    """URL; words from standard input, until it ends."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    clients = Clients(arguments[0])
    clients.load()
    print("ready", flush=True)
    for word in sys.stdin:
        print(json.dumps(asdict(clients.show(word.strip()))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
