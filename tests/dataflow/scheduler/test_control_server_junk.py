"""Junk at the sockets of the control plane: dropped, told of once, and the next word is heard."""

import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq

from dataflow.scheduler.control_server import Asker, Desk, Message
from dataflow.system.security import word
from dataflow.worker.link import Link

DEADLINE_S = 30.0
BEAT = {"kind": "beat", "drained": False, "nodes": {}, "edges": {}}
HELLO = {"kind": "hello", "pid": 7, "addresses": {}}


def junk(seed: int, count: int) -> Iterator[list[bytes]]:
    """Messages that are no word: noise, cut words, words that lack something, several frames, none."""
    rng = np.random.default_rng(seed)
    words = [msgpack.packb(one) for one in (BEAT, HELLO)]
    others: tuple[Any, ...] = (
        None, 7, "beat", [], [[[]]], {}, {"kind": 3}, {"kind": ["x"]}, {"kind": "hello"}, {**HELLO, "pid": "7"},
        {**BEAT, "nodes": []}, {"kind": "failed"}, {"kind": "done"}, {**HELLO, "attempt": []},
        {**BEAT, "turned_s": "1"},
        {**BEAT, "nodes": {"trainer": 5}}, {**BEAT, "nodes": {"trainer": {"status": {}}}}, {**BEAT, "edges": {"a": 1}},
        {**HELLO, "addresses": {"a": 7}},
    )  # fmt: skip
    for number in range(count):
        whole = words[number % 2]
        match number % 5:
            case 0:
                yield [rng.bytes(int(rng.integers(300)))]
            case 1:
                yield [whole[: int(rng.integers(len(whole)))]]
            case 2:
                yield [msgpack.packb(others[int(rng.integers(len(others)))])]
            case 3:
                yield [whole, whole]
            case _:
                yield [b"", b"\xc1" * 9]


def test_whatever_is_no_word_is_refused() -> None:
    for frames in junk(seed=5, count=2000):
        assert len(frames) > 1 or word(frames[0]) is None
    for genuine in (BEAT, HELLO, {"kind": "bye"}, {"kind": "later", "than": "today"}):
        assert word(msgpack.packb(genuine)) == genuine


@pytest.fixture
def desk() -> Iterator[Desk]:
    made = Desk(lambda plain: 0, {}, lambda: None)
    yield made
    made.close()


@pytest.fixture
def dealer() -> Iterator[Callable[..., "zmq.Socket[bytes]"]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made: list[zmq.Socket[bytes]] = []

    def connect(address: str, name: bytes = b"") -> "zmq.Socket[bytes]":
        socket = context.socket(zmq.DEALER)
        socket.set(zmq.LINGER, 0)
        if name:
            socket.set(zmq.IDENTITY, name)
        socket.connect(address)
        made.append(socket)
        return socket

    yield connect
    for socket in made:
        socket.close()
    context.term()


def heard(desk: Desk, count: int) -> list[Message]:
    said: list[Message] = []
    deadline = time.monotonic() + DEADLINE_S
    while len(said) < count:
        assert time.monotonic() < deadline, said
        said += desk.wait(0.05)[0]
    return said


def test_the_scheduler_hears_workers_and_commands_through_junk_and_tells_of_it_once(
    desk: Desk, dealer: Callable[..., "zmq.Socket[bytes]"], caplog: pytest.LogCaptureFixture
) -> None:
    strangers = [dealer(desk.address), dealer(desk.address, b"\xff\xfe"), dealer(desk.commands)]
    worker, command = dealer(desk.address, b"trainer-0"), dealer(desk.commands, b"trainer-0")
    with caplog.at_level(logging.WARNING, logger="dataflow.scheduler.control_server"):
        for stranger in strangers:
            for frames in junk(seed=1, count=200):
                stranger.send_multipart(frames)
        for frames in junk(seed=2, count=50):
            worker.send_multipart(frames)
        worker.send(msgpack.packb(BEAT))
        command.send(msgpack.packb({"kind": "scale", "wishes": {}}))
        said = dict(heard(desk, 2))
    assert said.pop("trainer-0") == BEAT
    ((name, asked),) = said.items()
    assert asked == {"kind": "scale", "wishes": {}}
    assert len(caplog.records) <= len(strangers) + 1
    desk.send(name, {"replicas": {}})
    desk.wait(0.0)
    assert command.poll(int(DEADLINE_S * 1000))
    assert msgpack.unpackb(command.recv()) == {"replicas": {}}
    assert not worker.poll(0), "an answer to a command went to the worker whose name it bears"


IDENTITIES = [b"?", b"?zz", b"?6162", b"?" + b"f" * 200, b"trainer-0?", b"\xff?", b"\\x3f61", b"?\x00", b"'", b"%s%n{}"]


def test_no_identity_is_taken_for_another_or_ends_the_scheduler(
    desk: Desk, dealer: Callable[..., "zmq.Socket[bytes]"]
) -> None:
    """Whoever is at the workers' socket is answered there, if at all, under the very name that he has."""
    rng = np.random.default_rng(4)
    names = IDENTITIES + [b"?" + rng.bytes(int(rng.integers(1, 40))) for _ in range(40)]
    command = dealer(desk.commands, b"ab")
    command.send(msgpack.packb({"kind": "facts"}))
    strangers = [dealer(desk.address, name) for name in names]
    for stranger in strangers:
        stranger.send(msgpack.packb({"kind": "stop"}))
    said = heard(desk, 1 + len(names))
    asked = [who for who, _ in said if isinstance(who, Asker)]
    assert asked == [Asker(b"ab")] and len(said) == 1 + len(names)
    for who, _ in said:
        if not isinstance(who, Asker):
            desk.send(who, {"kind": "never"})
    desk.wait(0.0)
    assert not command.poll(100), "an answer to a stranger went to who gives commands"


def test_a_monstrous_message_is_cut_off_at_the_control_sockets(
    desk: Desk, dealer: Callable[..., "zmq.Socket[bytes]"], monkeypatch: pytest.MonkeyPatch
) -> None:
    for address in (desk.address, desk.commands):
        stranger = dealer(address)
        watch = stranger.get_monitor_socket(zmq.Event.DISCONNECTED)
        stranger.send(bytes(65 << 20))
        assert watch.poll(int(DEADLINE_S * 1000)), "the connection was not cut"
        stranger.disable_monitor()
        watch.close()
    assert desk.wait(0.0)[0] == []


def test_a_worker_hears_words_through_junk(dealer: Callable[..., "zmq.Socket[bytes]"]) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    with tempfile.TemporaryDirectory() as folder:
        address = f"ipc://{Path(folder) / 'c'}"
        router.bind(address)
        link = Link(address, "trainer-0", orphaned=lambda: None)
        link.start(dict)
        assert router.poll(int(DEADLINE_S * 1000))
        peer = router.recv_multipart()[0]
        for frames in junk(seed=3, count=200):
            if len(frames) == 1:
                router.send_multipart([peer, *frames])
        router.send_multipart([peer, msgpack.packb({"kind": "stop"})])
        found: list[dict[str, Any]] = []
        deadline = time.monotonic() + DEADLINE_S
        while not found and time.monotonic() < deadline:
            link.socket.poll(100)
            found += link.words()
        assert found == [{"kind": "stop"}]
        link.close()
    router.close(0)
    context.term()


def test_nothing_that_was_decided_leaves_before_it_is_written_down(
    desk: Desk, dealer: Callable[..., "zmq.Socket[bytes]"]
) -> None:
    worker = dealer(desk.address, b"trainer-0")
    worker.send(msgpack.packb(BEAT))
    heard(desk, 1)
    written: list[bool] = []
    desk.ahead = lambda: written.append(bool(worker.poll(100)))
    desk.send("trainer-0", {"kind": "heard"})
    assert worker.poll(int(DEADLINE_S * 1000)) and msgpack.unpackb(worker.recv()) == {"kind": "heard"}
    desk.wait(0.0)
    assert written == [], "what decides nothing leaves at once, and nothing is written for it"
    desk.send("trainer-0", {"kind": "stop"})
    desk.wait(0.0)
    assert written == [False]
    assert worker.poll(int(DEADLINE_S * 1000)) and msgpack.unpackb(worker.recv()) == {"kind": "stop"}
