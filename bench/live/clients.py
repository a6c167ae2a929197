"""Pages without a browser: processes that ask a live page's server for what a page asks for, at its pace."""

import http.client
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from urllib.parse import urlencode, urlsplit

EVERY_S, SERIES_S = 1.0, 2.0
"""As page.js has them."""
FILES = ("", "picture.css", "page.css", "page.js", "text.js", "graph.js", "charts.js", "rollouts.js", "steer.js")
UNREAD = 20
"""Answers that a client which never reads leaves lying at a time."""


class PageClient:
    """One page that is open and seen.

    consumes: answers
    produces: requests, as the page's scripts make them
    waits for: the server, 40 s at most, as they do
    unblocked by: its answer, or that deadline
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._port, self._path = parts.port, parts.path
        self.answers = self.failed = self.received = 0

    def load(self) -> None:
        """What a page asks for when it is opened."""
        for name in FILES:
            self.get(name)
        for name in ("runs", "graph?run=0", "rollouts?run=0&kind=step&page=0&sort=step&order=down"):
            self.get(f"api/{name}")

    def run(self, until: float) -> None:
        """Be open until then, in seconds of time.monotonic."""
        self.load()
        changes, drawn = -1, 0.0
        while (now := time.monotonic()) < until:
            found = json.loads(self.get("api/now?run=0") or b"{}")
            if found.get("changes", changes) != changes and now - drawn >= SERIES_S:
                changes, drawn = found["changes"], now
                names = json.loads(self.get("api/names?run=0") or b'{"series": []}')
                self.get("api/marks?run=0")
                keys = [each["key"] for each in names["series"] if each["first"]]
                self.get(f"api/series?{urlencode({'run': 0, 'key': keys, 'points': 600}, doseq=True)}")
            time.sleep(max(0.0, min(now + EVERY_S, until) - time.monotonic()))

    def get(self, address: str) -> bytes:
        """What stands there; empty where that is nothing."""
        client = http.client.HTTPConnection("127.0.0.1", self._port, timeout=40)
        try:
            client.request("GET", self._path + address)
            answer = client.getresponse()
            body = answer.read()
        except OSError:
            self.failed += 1
            return b""
        finally:
            client.close()
        self.answers += 1
        self.failed += answer.status != 200
        self.received += len(body)
        return body if answer.status == 200 else b""


def never_read(url: str, until: float) -> int:
    """Ask once a second for all series, and never take an answer; how often it was asked."""
    parts, held, count = urlsplit(url), [], 0
    while time.monotonic() < until:
        client = socket.create_connection(("127.0.0.1", parts.port or 80), timeout=10)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        address = f"{parts.path}api/rollouts?run=0&kind=step&page=0&sort=step&order=down"
        client.sendall(f"GET {address} HTTP/1.1\r\nHost: 127.0.0.1:{parts.port}\r\n\r\n".encode())
        held.append(client)
        count += 1
        if len(held) > UNREAD:
            held.pop(0).close()
        time.sleep(EVERY_S)
    for client in held:
        client.close()
    return count


def main(arguments: Sequence[str]) -> None:
    """URL, pages, seconds; 0 pages: one that never reads. Prints what they did, and the processor time."""
    url, pages, seconds = arguments[0], int(arguments[1]), float(arguments[2])
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # a browser's work is none of the server's
    until = time.monotonic() + seconds
    if pages == 0:
        print(json.dumps({"answers": never_read(url, until), "failed": 0, "received": 0, "cpu_s": time.process_time()}))
        return
    clients = [PageClient(url) for _ in range(pages)]
    threads = [threading.Thread(target=client.run, args=(until,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    told = {name: sum(getattr(each, name) for each in clients) for name in ("answers", "failed", "received")}
    print(json.dumps(told | {"cpu_s": time.process_time()}))


if __name__ == "__main__":
    main(sys.argv[1:])
