"""A desk that is taken over says nothing into the void: real sockets, a played forkserver."""

import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

from dataflow.folder import socket_folder
from dataflow.scheduler import control_server as desks
from dataflow.scheduler.control_server import TakenDesk

DEADLINE_S = 20.0


class PlayedNursery:
    """A forkserver that has one living worker to give."""

    def __init__(self, door: str) -> None:
        self.handed = [{"name": "a-0", "alive": True, "settings": {}}]
        self.alone_s, self.number, self.lives = 0.1, 1, False
        self._socket, self._other = socket.socketpair()

    def fileno(self) -> int:
        return self._socket.fileno()

    def events(self) -> list[Any]:
        return []

    def live(self) -> None:
        """Nobody listens."""

    def close(self) -> None:
        self._socket.close()
        self._other.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    made = socket_folder.make()
    yield made


def test_a_word_of_a_new_scheduler_reaches_a_worker_that_finds_it_later(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desks, "TakenOver", PlayedNursery)
    taken = TakenDesk(folder)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    worker = context.socket(zmq.DEALER)
    try:
        taken.send("a-0", {"kind": "stop"})
        taken.wait(0.0)
        worker.setsockopt(zmq.IDENTITY, b"a-0")
        worker.setsockopt(zmq.LINGER, 0)
        worker.connect(taken.address)
        worker.send(msgpack.packb({"kind": "beat", "drained": False, "nodes": {}, "edges": {}}))
        deadline = time.monotonic() + DEADLINE_S
        while not taken.wait(0.01)[0]:
            assert time.monotonic() < deadline
        assert worker.poll(int(1000 * DEADLINE_S)), "the word was lost"
        assert msgpack.unpackb(worker.recv()) == {"kind": "stop"}
    finally:
        worker.close(0)
        context.term()
        taken.close()
