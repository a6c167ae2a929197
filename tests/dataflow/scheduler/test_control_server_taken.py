"""What a scheduler says that has taken over reaches its workers, whenever they find it: real
sockets, a played forkserver.
"""

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from small_table import small_table

from dataflow.folder import socket_folder
from dataflow.scheduler import control_server
from dataflow.scheduler.control import Scheduler
from dataflow.scheduler.control_server import TakenOverControlServer
from dataflow.scheduler.table import ProcessState
from dataflow.system.files import to_json
from dataflow.worker.host import Settings
from dataflow.worker.messages import TO_SCHEDULER, TO_WORKER, Heard, Heartbeat, Start
from transport.life import Life

DEADLINE_S = 10.0


class PlayedForkserver:
    """A forkserver that has one living worker to give."""

    def __init__(self, takeover: str) -> None:
        self.handed: list[dict[str, Any]] = [
            {
                "name": "prompts-0",
                "alive": True,
                "pid": 1,
                "status": None,
                "settings": {"life": [0, 0], "keys": {}},
            }
        ]
        self.alone_s, self.number, self.lives = 0.1, 1, False
        self._socket, self._other = socket.socketpair()

    @property
    def pollable(self) -> int:
        return self._socket.fileno()

    def events(self) -> list[Any]:
        return []

    def stay(self, wait_s: float, end_s: float, silent_s: float) -> None:
        """Nobody listens."""

    def live(self) -> None:
        """Nobody listens."""

    def close(self) -> None:
        self._socket.close()
        self._other.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    made = socket_folder.make()
    yield made


def test_what_a_new_scheduler_sends_reaches_a_worker_that_finds_it_later(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_server, "TakenOverForkserver", PlayedForkserver)
    before = small_table()
    for record in before:
        record.process, record.senders = (
            ProcessState.READY if record.name == "prompts-0" else ProcessState.GONE,
            set(),
        )
    left = {"table": json.loads(to_json(before.to_plain()))}
    server = TakenOverControlServer(folder)
    scheduler = Scheduler(
        before.graph, before.plan, Settings(folder=""), server=server, snapshot=left
    )
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    worker = context.socket(zmq.DEALER)
    try:
        scheduler.start()
        scheduler.turn(0.0)
        worker.setsockopt(zmq.IDENTITY, b"prompts-0")
        worker.setsockopt(zmq.LINGER, 0)
        worker.connect(server.address)
        worker.send(TO_SCHEDULER.encode(Heartbeat(life=Life(), nodes={})))
        received = [Heard()]
        deadline = time.monotonic() + DEADLINE_S
        while received == [Heard()] and time.monotonic() < deadline:
            scheduler.turn(0.01)
            if worker.poll(10):
                received = [TO_WORKER.decode(worker.recv())]
        assert received == [Start()], "the message was lost"
    finally:
        worker.close(0)
        context.term()
        server.close()
