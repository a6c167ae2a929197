"""A worker's line to the scheduler: it sends heartbeats, passes messages on, and notices that
nobody is there.
"""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import zmq

from dataflow.system.clocks import AwakeClock
from dataflow.worker.link import SchedulerLink
from dataflow.worker.messages import (
    TO_SCHEDULER,
    TO_WORKER,
    Confirmed,
    Failed,
    FromWorker,
    Heard,
    Heartbeat,
    NodeCommand,
    Start,
    Stop,
    ToWorker,
)
from transport.life import Life

DEADLINE_S = 30.0


LONG = 63 << 20


M = TypeVar("M", bound=FromWorker)


class Server:
    """The scheduler's end."""

    def __init__(self, address: str) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.router = self.context.socket(zmq.ROUTER)
        self.router.setsockopt(zmq.LINGER, 0)
        self.router.bind(address)
        self.heard: list[str] = []

    def hear(self, kind: type[M]) -> M:
        """The next message of a kind, whatever comes before it."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            if self.router.poll(100):
                name, data = self.router.recv_multipart()
                message = TO_SCHEDULER.decode(data)
                self.heard.append(name.decode())
                if isinstance(message, kind):
                    return message
        raise AssertionError(f"no {kind} came")

    def send(self, name: str, message: ToWorker) -> None:
        self.router.send_multipart([name.encode(), TO_WORKER.encode(message)])


@pytest.fixture
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"ipc://{tmp_path_factory.mktemp('link')}/c"


@pytest.fixture
def server(address: str) -> Iterator[Server]:
    server = Server(address)
    yield server
    server.router.close(0)
    server.context.term()


@pytest.fixture
def link_to(address: str) -> Iterator[Callable[..., SchedulerLink]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    links: list[SchedulerLink] = []

    def make(name: str = "generator-0", **knobs: Any) -> SchedulerLink:
        link = SchedulerLink(
            address, name, **{"orphaned": lambda: None, "context": context, **knobs}
        )
        links.append(link)
        return link

    yield make
    for link in links:
        link.close()
    context.term()


def messages_of(link: SchedulerLink, count: int) -> list[ToWorker]:
    """Waits on the link's socket, as a worker does."""
    found: list[ToWorker] = []
    deadline = time.monotonic() + DEADLINE_S
    while len(found) < count and time.monotonic() < deadline:
        link.socket.poll(100)
        found += link.messages()
    return found


def test_what_a_worker_tells_arrives_in_order_under_its_name(
    server: Server, link_to: Callable[..., SchedulerLink]
) -> None:
    link = link_to("trainer-0")
    link.start()
    for number in range(5):
        link.send(Confirmed(life=Life(), ticket=number))
    assert [server.hear(Confirmed).ticket for _ in range(5)] == [0, 1, 2, 3, 4]
    assert set(server.heard) == {"trainer-0"}


def test_a_heartbeat_carries_the_newest_snapshot(
    server: Server, link_to: Callable[..., SchedulerLink]
) -> None:
    newest = [Heartbeat(life=Life(), nodes={}, rss_bytes=0)]
    link = link_to()
    link.start(lambda: newest[0])
    assert server.hear(Heartbeat).rss_bytes == 0
    newest[0] = Heartbeat(life=Life(), nodes={}, rss_bytes=7)
    server.hear(Heartbeat)  # may have been under way
    assert server.hear(Heartbeat).rss_bytes == 7


def test_messages_reach_the_worker_in_order_and_answers_to_heartbeats_do_not(
    server: Server, link_to: Callable[..., SchedulerLink]
) -> None:
    link = link_to()
    link.start()
    server.hear(Heartbeat)
    for number in range(3):
        server.send("generator-0", Heard())
        server.send("generator-0", NodeCommand("generator", {"dropped": number}))
    assert messages_of(link, 3) == [
        NodeCommand("generator", {"dropped": number}) for number in range(3)
    ]
    assert link.messages() == []


def test_the_socket_is_quiet_when_every_message_was_taken(
    server: Server, link_to: Callable[..., SchedulerLink]
) -> None:
    link = link_to()
    link.start()
    server.hear(Heartbeat)
    server.send("generator-0", Stop())
    assert messages_of(link, 1) == [Stop()]
    assert link.socket.poll(0) == 0


def test_closing_sends_what_was_told_just_before(
    server: Server, link_to: Callable[..., SchedulerLink]
) -> None:
    link = link_to()
    link.start()
    link.send(Failed(life=Life(), message="boom"))
    link.close()
    assert server.hear(Failed).message == "boom"


@pytest.mark.slow
def test_what_a_worker_says_last_arrives_though_its_process_ends_at_once(
    server: Server, address: str
) -> None:
    """The message is too large to have left by chance."""
    program = (
        "import os, sys; from dataflow.worker.link import SchedulerLink; from"
        " dataflow.worker.messages import Failed; from transport.life import Life;"
        " link = SchedulerLink(sys.argv[1], 'w', orphaned=lambda: None); link.start();"
        f" link.send(Failed(life=Life(), message='x' * {LONG}));"
        " link.close(); os._exit(1)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, address], cwd=Path(__file__).parents[3]
    ) as worker:
        assert len(server.hear(Failed).message) == LONG
    assert worker.returncode == 1


def test_a_worker_whose_scheduler_is_gone_learns_it(link_to: Callable[..., SchedulerLink]) -> None:
    orphaned = threading.Event()
    link_to(orphaned=orphaned.set, patience_s=0.05).start()
    assert orphaned.wait(DEADLINE_S)


def test_a_worker_that_has_more_to_say_than_waits_for_a_scheduler_learns_that_it_is_gone(
    link_to: Callable[..., SchedulerLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dataflow.worker.link._UNSENT", 3)
    orphaned = threading.Event()
    link = link_to(orphaned=orphaned.set, patience_s=0.5)
    for _ in range(10):
        link.send(Confirmed(life=Life(), ticket=1))
    link.start()
    assert orphaned.wait(DEADLINE_S)


def test_time_in_which_a_worker_was_stopped_itself_is_no_silence_of_the_scheduler(
    server: Server, link_to: Callable[..., SchedulerLink]
) -> None:
    """The scheduler may have been stopped with it, and answers the next heartbeat."""
    slept = [0.0]
    orphaned = threading.Event()
    link = link_to(orphaned=orphaned.set, clock=AwakeClock(lambda: time.monotonic() + slept[0]))
    link.start()
    server.hear(Heartbeat)
    slept[0] = 1_000.0
    for _ in range(3):
        server.hear(Heartbeat)
    server.send("generator-0", Start())
    assert messages_of(link, 1) == [Start()] and not orphaned.is_set()


def test_a_worker_learns_it_also_when_the_scheduler_falls_silent_later(
    server: Server, link_to: Callable[..., SchedulerLink]
) -> None:
    orphaned = threading.Event()
    link_to(orphaned=orphaned.set, patience_s=0.5).start()
    server.hear(Heartbeat)
    server.send("generator-0", Heard())
    assert orphaned.wait(DEADLINE_S)


def test_it_learns_it_once(link_to: Callable[..., SchedulerLink]) -> None:
    calls: list[float] = []
    beats: list[float] = []

    def heartbeat() -> Heartbeat:
        beats.append(time.monotonic())
        return Heartbeat(life=Life(), nodes={})

    link_to(orphaned=lambda: calls.append(time.monotonic()), patience_s=0.01).start(heartbeat)
    deadline = time.monotonic() + DEADLINE_S
    while len(beats) < 3 and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    assert len(beats) >= 3 and len(calls) == 1


def test_an_answered_worker_is_no_orphan(
    server: Server, link_to: Callable[..., SchedulerLink]
) -> None:
    orphaned = threading.Event()
    link_to(orphaned=orphaned.set, patience_s=20.0).start()
    for _ in range(5):
        server.hear(Heartbeat)
        server.send("generator-0", Heard())
    assert not orphaned.is_set()


def test_a_worker_that_computes_for_long_still_sends_heartbeats(
    server: Server, link_to: Callable[..., SchedulerLink]
) -> None:
    """Nobody calls `messages` here: the thread alone keeps the line open."""
    link_to().start()
    assert [server.hear(Heartbeat).state for _ in range(3)] == ["running"] * 3
