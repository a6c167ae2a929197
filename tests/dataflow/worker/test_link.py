"""A worker's line to the scheduler: it beats, passes words on, and notices that nobody is there."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

from dataflow.system.clocks import AwakeClock
from dataflow.worker.link import Link

DEADLINE_S = 30.0


class Desk:
    """The scheduler's end."""

    def __init__(self, address: str) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.router = self.context.socket(zmq.ROUTER)
        self.router.setsockopt(zmq.LINGER, 0)
        self.router.bind(address)
        self.heard: list[dict[str, Any]] = []

    def hear(self, kind: str) -> dict[str, Any]:
        """The next message of a kind, whatever comes before it."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            if self.router.poll(100):
                name, data = self.router.recv_multipart()
                message = {"from": name.decode(), **msgpack.unpackb(data)}
                self.heard.append(message)
                if message["kind"] == kind:
                    return message
        raise AssertionError(f"no {kind} came")

    def say(self, name: str, **message: Any) -> None:
        self.router.send_multipart([name.encode(), msgpack.packb(message)])


@pytest.fixture
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"ipc://{tmp_path_factory.mktemp('link')}/c"


@pytest.fixture
def desk(address: str) -> Iterator[Desk]:
    desk = Desk(address)
    yield desk
    desk.router.close(0)
    desk.context.term()


@pytest.fixture
def link_to(address: str) -> Iterator[Callable[..., Link]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    links: list[Link] = []

    def make(name: str = "generator-0", **knobs: Any) -> Link:
        link = Link(address, name, **{"orphaned": lambda: None, "context": context, **knobs})
        links.append(link)
        return link

    yield make
    for link in links:
        link.close()
    context.term()


def words_of(link: Link, count: int) -> list[dict[str, Any]]:
    """Waits on the link's socket, as a worker does."""
    found: list[dict[str, Any]] = []
    deadline = time.monotonic() + DEADLINE_S
    while len(found) < count and time.monotonic() < deadline:
        link.socket.poll(100)
        found += link.words()
    return found


def test_what_a_worker_tells_arrives_in_order_under_its_name(desk: Desk, link_to: Callable[..., Link]) -> None:
    link = link_to("trainer-0")
    link.start(dict)
    for number in range(5):
        link.send("hello", number=number)
    assert [desk.hear("hello")["number"] for _ in range(5)] == [0, 1, 2, 3, 4]
    assert {message["from"] for message in desk.heard} == {"trainer-0"}


def test_a_beat_carries_the_newest_snapshot(desk: Desk, link_to: Callable[..., Link]) -> None:
    snapshot = {"step": 0}
    link = link_to()
    link.start(lambda: dict(snapshot))
    assert desk.hear("beat")["step"] == 0
    snapshot["step"] = 7
    desk.hear("beat")  # may have been under way
    assert desk.hear("beat")["step"] == 7


def test_words_reach_the_worker_in_order_and_answers_to_beats_do_not(desk: Desk, link_to: Callable[..., Link]) -> None:
    link = link_to()
    link.start(dict)
    desk.hear("beat")
    for number in range(3):
        desk.say("generator-0", kind="heard")
        desk.say("generator-0", kind="tell", node="generator", message={"dropped": number})
    words = words_of(link, 3)
    assert [word["message"]["dropped"] for word in words] == [0, 1, 2]
    assert {word["kind"] for word in words} == {"tell"}
    assert link.words() == []


def test_the_socket_is_quiet_when_every_word_was_taken(desk: Desk, link_to: Callable[..., Link]) -> None:
    link = link_to()
    link.start(dict)
    desk.hear("beat")
    desk.say("generator-0", kind="stop")
    assert words_of(link, 1) == [{"kind": "stop"}]
    assert link.socket.poll(0) == 0


def test_closing_sends_what_was_told_just_before(desk: Desk, link_to: Callable[..., Link]) -> None:
    link = link_to()
    link.start(dict)
    link.send("failed", message="boom")
    link.close()
    assert desk.hear("failed")["message"] == "boom"


def test_what_a_worker_says_last_arrives_though_its_process_ends_at_once(desk: Desk, address: str) -> None:
    """The message is too large to have left by chance."""
    program = (
        "import os, sys; from dataflow.worker.link import Link; link = Link(sys.argv[1], 'w', orphaned=lambda: None);"
        "link.start(dict); link.send('failed', message='x' * (64 << 20)); link.close(); os._exit(1)"
    )
    with subprocess.Popen([sys.executable, "-c", program, address], cwd=Path(__file__).parents[3]) as worker:
        assert len(desk.hear("failed")["message"]) == 64 << 20
    assert worker.returncode == 1


def test_a_worker_whose_scheduler_is_gone_learns_it(link_to: Callable[..., Link]) -> None:
    orphaned = threading.Event()
    link_to(orphaned=orphaned.set, patience_s=0.05).start(dict)
    assert orphaned.wait(DEADLINE_S)


def test_a_worker_that_has_more_to_say_than_waits_for_a_scheduler_learns_that_it_is_gone(
    link_to: Callable[..., Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dataflow.worker.link._UNSENT", 3)
    orphaned = threading.Event()
    link = link_to(orphaned=orphaned.set, patience_s=0.5)
    for _ in range(10):
        link.send("done", ticket=1)
    link.start(dict)
    assert orphaned.wait(DEADLINE_S)


def test_time_in_which_a_worker_was_stopped_itself_is_no_silence_of_the_scheduler(
    desk: Desk, link_to: Callable[..., Link]
) -> None:
    """The scheduler may have been stopped with it, and answers the next beat."""
    slept = [0.0]
    orphaned = threading.Event()
    link = link_to(orphaned=orphaned.set, clock=AwakeClock(lambda: time.monotonic() + slept[0]))
    link.start(dict)
    desk.hear("beat")
    slept[0] = 1_000.0
    for _ in range(3):
        desk.hear("beat")
    desk.say("generator-0", kind="tell")
    assert words_of(link, 1) == [{"kind": "tell"}] and not orphaned.is_set()


def test_a_worker_learns_it_also_when_the_scheduler_falls_silent_later(
    desk: Desk, link_to: Callable[..., Link]
) -> None:
    orphaned = threading.Event()
    link_to(orphaned=orphaned.set, patience_s=0.5).start(dict)
    desk.hear("beat")
    desk.say("generator-0", kind="heard")
    assert orphaned.wait(DEADLINE_S)


def test_it_learns_it_once(link_to: Callable[..., Link]) -> None:
    calls: list[float] = []
    beats: list[float] = []

    def beat() -> dict[str, Any]:
        beats.append(time.monotonic())
        return {}

    link_to(orphaned=lambda: calls.append(time.monotonic()), patience_s=0.01).start(beat)
    deadline = time.monotonic() + DEADLINE_S
    while len(beats) < 3 and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    assert len(beats) >= 3 and len(calls) == 1


def test_an_answered_worker_is_no_orphan(desk: Desk, link_to: Callable[..., Link]) -> None:
    orphaned = threading.Event()
    link_to(orphaned=orphaned.set, patience_s=20.0).start(dict)
    for _ in range(5):
        desk.hear("beat")
        desk.say("generator-0", kind="heard")
    assert not orphaned.is_set()


def test_a_worker_that_computes_for_long_still_beats(desk: Desk, link_to: Callable[..., Link]) -> None:
    """Nobody calls `words` here: the thread alone keeps the line open."""
    link_to().start(lambda: {"state": "running"})
    assert [desk.hear("beat")["state"] for _ in range(3)] == ["running"] * 3
