"""Junk at the sockets of the control plane: dropped, told of once, and the next message is
heard.
"""

import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from opened import closed, opened

from dataflow.scheduler.control_server import Client, ControlServer
from dataflow.scheduler.requests import REPLIES, REQUESTS, Scale, Scaled, TellFacts
from dataflow.system.messages import MessageError
from dataflow.worker.link import SchedulerLink
from dataflow.worker.messages import (
    TO_SCHEDULER,
    TO_WORKER,
    Bye,
    Heard,
    Heartbeat,
    Hello,
    NodeReport,
    Stop,
    ToWorker,
)
from transport.life import Life

DEADLINE_S = 30.0
HEARTBEAT = Heartbeat(life=Life(), nodes={})
HELLO = Hello(life=Life(), pid=7, addresses={})


def junk(seed: int, count: int) -> Iterator[list[bytes]]:
    """Messages that are none: noise, cut messages, messages that lack something, several frames,
    none.
    """
    rng = np.random.default_rng(seed)
    whole = [TO_SCHEDULER.encode(one) for one in (HEARTBEAT, HELLO)]
    (protocol, _, beat), (_, _, hello) = map(opened, whole)
    others: tuple[Any, ...] = (
        None,
        7,
        "Heartbeat",
        [],
        [[[]]],
        {},
        {"kind": 3},
        [protocol],
        [protocol, "Hello"],
        [protocol, "Hello", {}],
        [protocol, "Later", {}],
        ["another/1", "Hello", hello],
        [f"{protocol}0", "Hello", hello],
        [f"{protocol[:-1]}{(int(protocol[-1]) + 1) % 10}", "Hello", hello],
        [protocol, ["Hello"], hello],
        [protocol, "Hello", {**hello, "pid": "7"}],
        [protocol, "Failed", {}],
        [protocol, "Hello", {**hello, "life": 7}],
        [protocol, "Hello", {**hello, "addresses": {"a": 7}}],
        [protocol, "Hello", {**hello, "more": 1}],
        [protocol, "Confirmed", {}],
        *(
            [protocol, "Heartbeat", {**beat, **change}]
            for change in (
                {"nodes": []},
                {"turned_s": "1"},
                {"nodes": {"trainer": 5}},
                {"edges": {"a": 1}},
                {"nodes": {"trainer": {"status": {}}}},
            )
        ),
    )
    for number in range(count):
        one = whole[number % 2]
        match number % 5:
            case 0:
                yield [rng.bytes(int(rng.integers(300)))]
            case 1:
                yield [one[: int(rng.integers(len(one)))]]
            case 2:
                yield [closed(others[int(rng.integers(len(others)))])]
            case 3:
                yield [one, one]
            case _:
                yield [b"", b"\xc1" * 9]


def test_whatever_is_no_message_is_refused() -> None:
    for frames in junk(seed=5, count=2000):
        with pytest.raises(MessageError):
            TO_SCHEDULER.decode(b"".join(frames))
    for genuine in (HEARTBEAT, HELLO, Bye(life=Life(attempt=3))):
        assert TO_SCHEDULER.decode(TO_SCHEDULER.encode(genuine)) == genuine


@pytest.mark.parametrize(
    "status", [{"step": "7"}, {"done": 1.5}, {"eval_accuracy": "high"}, {"version": "1"}]
)
def test_a_status_that_nobody_could_count_with_is_refused(status: dict[str, Any]) -> None:
    whole: dict[str, Any] = {"rows_in": 0, "rows_out": 0, "ended": False, "blocked": False}
    NodeReport(
        status={"step": 7, "why": "so"},
        seconds={"busy": 0.0, "waiting": 0.0, "blocked": 0.0, "starved": 0.0},
        **whole,
    )
    with pytest.raises(ValueError, match="status"):
        NodeReport(
            status=status,
            seconds={"busy": 0.0, "waiting": 0.0, "blocked": 0.0, "starved": 0.0},
            **whole,
        )
    with pytest.raises(ValueError, match="seconds are busy, blocked, waiting, starved"):
        NodeReport(status={}, seconds={"busy": 0.0}, **whole)


@pytest.fixture
def server() -> Iterator[ControlServer]:
    made = ControlServer(lambda plain: 0, {}, lambda: None)
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


def heard(server: ControlServer, count: int) -> list[tuple[str | Client, Any]]:
    found: list[tuple[str | Client, Any]] = []
    deadline = time.monotonic() + DEADLINE_S
    while len(found) < count:
        assert time.monotonic() < deadline, found
        messages, requests, _ = server.wait(0.05)
        found += [*((each.name, each.message) for each in messages), *requests]
    return found


def test_the_scheduler_hears_workers_and_requests_through_junk_and_tells_of_it_once(
    server: ControlServer,
    dealer: Callable[..., "zmq.Socket[bytes]"],
    caplog: pytest.LogCaptureFixture,
) -> None:
    strangers = [
        dealer(server.address),
        dealer(server.address, b"\xff\xfe"),
        dealer(server.requests),
    ]
    worker, client = dealer(server.address, b"trainer-0"), dealer(server.requests, b"trainer-0")
    with caplog.at_level(logging.WARNING, logger="dataflow.scheduler.control_server"):
        for stranger in strangers:
            for frames in junk(seed=1, count=200):
                stranger.send_multipart(frames)
        for frames in junk(seed=2, count=50):
            worker.send_multipart(frames)
        worker.send(TO_SCHEDULER.encode(HEARTBEAT))
        client.send(REQUESTS.encode(Scale({})))
        said = dict(heard(server, 2))
    assert said.pop("trainer-0") == HEARTBEAT
    ((name, asked),) = said.items()
    assert asked == Scale({})
    assert len(caplog.records) <= len(strangers) + 1
    assert isinstance(name, Client)
    server.reply(name, Scaled({}))
    server.wait(0.0)
    assert client.poll(int(DEADLINE_S * 1000))
    assert REPLIES.decode(client.recv()) == Scaled({})
    assert not worker.poll(0), "the reply to a request went to the worker whose name it bears"


IDENTITIES = [
    b"?",
    b"?zz",
    b"?6162",
    b"?" + b"f" * 200,
    b"trainer-0?",
    b"\xff?",
    b"\\x3f61",
    b"?\x00",
    b"'",
    b"%s%n{}",
]


def test_no_identity_is_taken_for_another_or_ends_the_scheduler(
    server: ControlServer, dealer: Callable[..., "zmq.Socket[bytes]"]
) -> None:
    """Whoever is at the workers' socket is answered there, if at all, under the very name that he
    has.
    """
    rng = np.random.default_rng(4)
    names = IDENTITIES + [b"?" + rng.bytes(int(rng.integers(1, 40))) for _ in range(40)]
    client = dealer(server.requests, b"ab")
    client.send(REQUESTS.encode(TellFacts()))
    strangers = [dealer(server.address, name) for name in names]
    for stranger in strangers:
        stranger.send(TO_SCHEDULER.encode(Bye(life=Life())))
    said = heard(server, 1 + len(names))
    asked = [who for who, _ in said if isinstance(who, Client)]
    assert asked == [Client(b"ab")] and len(said) == 1 + len(names)
    for who, _ in said:
        if not isinstance(who, Client):
            server.send(who, Stop())
    server.wait(0.0)
    assert not client.poll(100), "a message to a stranger went to who makes requests"


def test_a_monstrous_message_is_cut_off_at_the_control_sockets(
    server: ControlServer,
    dealer: Callable[..., "zmq.Socket[bytes]"],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for address in (server.address, server.requests):
        stranger = dealer(address)
        watch = stranger.get_monitor_socket(zmq.Event.DISCONNECTED)
        stranger.send(bytes(65 << 20))
        assert watch.poll(int(DEADLINE_S * 1000)), "the connection was not cut"
        stranger.disable_monitor()
        watch.close()
    assert server.wait(0.0)[0] == []


def test_a_worker_hears_messages_through_junk(dealer: Callable[..., "zmq.Socket[bytes]"]) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    with tempfile.TemporaryDirectory() as folder:
        address = f"ipc://{Path(folder) / 'c'}"
        router.bind(address)
        link = SchedulerLink(address, "trainer-0", orphaned=lambda: None)
        link.start()
        assert router.poll(int(DEADLINE_S * 1000))
        peer = router.recv_multipart()[0]
        for frames in junk(seed=3, count=200):
            if len(frames) == 1:
                router.send_multipart([peer, *frames])
        router.send_multipart([peer, TO_WORKER.encode(Stop())])
        found: list[ToWorker] = []
        deadline = time.monotonic() + DEADLINE_S
        while not found and time.monotonic() < deadline:
            link.socket.poll(100)
            found += link.messages()
        assert found == [Stop()]
        link.close()
    router.close(0)
    context.term()


def test_nothing_that_was_decided_leaves_before_it_is_written_down(
    server: ControlServer, dealer: Callable[..., "zmq.Socket[bytes]"]
) -> None:
    worker = dealer(server.address, b"trainer-0")
    worker.send(TO_SCHEDULER.encode(HEARTBEAT))
    heard(server, 1)
    written: list[bool] = []
    server.ahead = lambda: written.append(bool(worker.poll(100)))
    server.send("trainer-0", Heard())
    assert worker.poll(int(DEADLINE_S * 1000)) and TO_WORKER.decode(worker.recv()) == Heard()
    server.wait(0.0)
    assert written == [], "what decides nothing leaves at once, and nothing is written for it"
    server.send("trainer-0", Stop())
    server.wait(0.0)
    assert written == [False]
    assert worker.poll(int(DEADLINE_S * 1000)) and TO_WORKER.decode(worker.recv()) == Stop()
