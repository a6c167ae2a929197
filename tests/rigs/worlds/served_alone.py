"""The tests' OpenEnv server as a process of its own, which is started again on its port whenever it
has died.

python served_alone.py PORT LOG CAPACITY: serve until killed; LOG gets a line for each session that
begins or ends.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

from rigs.machine import wait_until

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))


from rigs.worlds.servers import openenv

START_S = 30.0


def free_port() -> int:
    """One of loopback that nobody has."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ServedAlone(threading.Thread):
    """Watches over the server; use it in `with`, at whose end the server is gone."""

    def __init__(self, folder: Path, *, capacity: int) -> None:
        super().__init__(daemon=True)
        self._log, self._port, self._capacity = folder / "server.log", free_port(), capacity
        self._lives: list[subprocess.Popen[bytes]] = []
        self._is_over = threading.Event()

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        """Of the process that serves now."""
        return self._lives[-1].pid

    @property
    def lives(self) -> int:
        return len(self._lives)

    def __enter__(self) -> "ServedAlone":
        self._begin()
        wait_until(lambda: self._notes("ready", self.pid), START_S, "the server")
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self.join(START_S)
        for life in self._lives:
            life.kill()
            life.wait()

    def run(self) -> None:
        while not self._is_over.wait(0.1):
            if self._lives[-1].poll() is not None:
                self._begin()

    def sessions(self) -> tuple[int, int]:
        """How many have begun in the life that serves now, and how many of these have ended."""
        return self._notes("begin", self.pid), self._notes("end", self.pid)

    def begun(self) -> int:
        """Sessions in all its lives."""
        return sum(self._notes("begin", life.pid) for life in self._lives)

    def most(self) -> int:
        """The most at once in one life."""
        found: Counter[str] = Counter()
        most = 0
        for line in self._lines():
            what, pid = line.split()
            found[pid] += {"begin": 1, "end": -1}.get(what, 0)
            most = max(most, found[pid])
        return most

    def _notes(self, what: str, pid: int) -> int:
        return self._lines().count(f"{what} {pid}")

    def _lines(self) -> list[str]:
        return self._log.read_text().splitlines() if self._log.exists() else []

    def _begin(self) -> None:
        command = [sys.executable, __file__, str(self._port), str(self._log), str(self._capacity)]
        self._lives.append(subprocess.Popen(command))


def main() -> None:
    port, log, capacity = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    with openenv(capacity=capacity, port=port, log=log), log.open("a") as file:
        file.write(f"ready {os.getpid()}\n")
        file.flush()
        while True:
            signal.pause()


if __name__ == "__main__":
    main()
