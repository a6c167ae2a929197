"""Peers that mean harm, or are badly broken: what they may cost is bounded, and nobody else
notices.
"""

import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from transport import security
from transport.data import Keys, Receiver, Sender, SocketNetwork, make_keys, messages
from transport.data.messages import Ack, Hello, Welcome, encode_message
from transport.life import Life

from .mutations import Mutator, fields_of, header
from .rig import SCHEMA, Rig, connect, firsts, make_batch, take, until

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\0NULL" + bytes(16) + b"\0" + bytes(31)


@pytest.fixture
def ipc(folder: Path) -> Iterator[Rig]:
    made = Rig("ipc", folder)
    yield made
    made.close()


def listening(keys: Keys | None) -> Receiver:
    return Receiver(
        edge="edge",
        schema=SCHEMA,
        address="tcp://127.0.0.1:*",
        life=Life(),
        capacity_rows=8,
        senders=2,
        network=SocketNetwork(keys=keys),
        on_refused=lambda *_: None,
    )


def _host_and_port(receiver: Receiver) -> tuple[str, int]:
    host, _, port = receiver.address.removeprefix("tcp://").rpartition(":")
    return host, int(port)


def raw(receiver: Receiver) -> socket.socket:
    return socket.create_connection(_host_and_port(receiver), timeout=20)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").exists() else 0


def check_that_silent_peers_are_cut_off(count: int, keyed: bool) -> None:
    receivers, senders = make_keys() if keyed else (None, None)
    receiver = listening(receivers)
    files = open_files()
    silent = [raw(receiver) for _ in range(count)]
    for one in silent[::3]:
        one.sendall(GREETING[:20])  # half of a greeting
    for one in silent[1::3]:
        one.sendall(GREETING)
    sender = _sender_to(receiver, keys=senders)
    connect(sender, to=receiver)
    assert sender.send(make_batch(7))
    assert firsts(take(receiver, 1, sender)) == [7]
    for one in silent:
        while one.recv(1 << 12):  # the receiver's own half of the greeting, and then the end
            pass
        one.close()
    sender.close()
    until(lambda: open_files() <= files + 8)
    receiver.close()


@pytest.mark.parametrize("keyed", [False, True])
def test_connections_that_say_nothing_are_cut_off_and_hold_nobody_up(
    monkeypatch: pytest.MonkeyPatch, keyed: bool
) -> None:
    monkeypatch.setattr(security, "HANDSHAKE_MS", 300)
    check_that_silent_peers_are_cut_off(60, keyed)


@pytest.mark.slow
@pytest.mark.parametrize("keyed", [False, True])
def test_a_thousand_connections_that_say_nothing_are_cut_off(keyed: bool) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4000:
        pytest.skip(
            f"this process may have {hard} files open; both ends of 1,000 connections need 2,000"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4000), hard))
    check_that_silent_peers_are_cut_off(1000, keyed)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files in /proc")
def test_a_receiver_that_silent_peers_leave_no_files_goes_on_and_recovers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(security, "HANDSHAKE_MS", 500)
    receiver = listening(None)
    present = _sender_to(receiver)
    connect(present, to=receiver)
    silent = [socket.socket() for _ in range(60)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    full = max(int(path.name) for path in Path("/proc/self/fd").iterdir()) + 20
    resource.setrlimit(resource.RLIMIT_NOFILE, (full, hard))
    taken: list[int] = []
    while _has_room_for_files():
        taken.append(os.dup(0))
    for number in taken[-20:]:
        os.close(number)
    try:
        for one in silent:
            one.settimeout(20)
            one.connect(_host_and_port(receiver))
        until(lambda: (receiver.poll(), not _has_room_for_files())[1])
        assert present.send(make_batch(7))
        assert firsts(take(receiver, 1, present)) == [7]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for number in taken[:-20]:
            os.close(number)
    newcomer = _sender_to(receiver, "newcomer")
    connect(newcomer, to=receiver)
    for one in silent:
        one.close()
    for sender in (present, newcomer):
        sender.close()
    receiver.close()


def _sender_to(receiver: Receiver, name: str = "s", keys: Keys | None = None) -> Sender:
    return Sender(
        edge="edge",
        sender_id=name,
        life=Life(attempt=1),
        schema=SCHEMA,
        receivers=[receiver.address],
        network=SocketNetwork(keys=keys),
    )


def _has_room_for_files() -> bool:
    try:
        os.close(os.dup(0))
    except OSError:
        return False
    return True


def test_answers_to_a_peer_that_never_reads_do_not_pile_up(ipc: Rig) -> None:
    told: list[str] = []
    receiver = ipc.receiver(on_refused=lambda edge, peer, why: told.append(why), capacity_rows=100)
    sender = ipc.sender(receiver)
    connect(sender, to=receiver)
    deaf = zmq.Context.instance().socket(zmq.DEALER)
    deaf.set(zmq.RCVHWM, 1)
    deaf.connect(receiver.address)
    hello = encode_message(
        Hello(
            edge="edge",
            sender="sender",
            life=Life(),
            schema=messages.encode_schema(SCHEMA),
            base=0,
            next=0,
            gone=(),
            window_rows=0,
            window_bytes=0,
            window_number=0,
            ended=False,
        )
    )
    for _ in range(50):
        for _ in range(100):
            deaf.send(hello)  # of an earlier life: each is answered by a Refused
        receiver.poll()
    until(lambda: (receiver.poll(), receiver.refused > 1000)[1])
    assert len(told) == 1
    assert "does not read" in told[0]
    assert sender.send(make_batch(7))
    assert firsts(take(receiver, 1, sender)) == [7]
    deaf.close(linger=0)


class FalseReceiver:
    """Says to a sender whatever the test makes it say."""

    def __init__(self, rig: Rig) -> None:
        self.socket = zmq.Context.instance().socket(zmq.ROUTER)
        address = rig.new_address()
        self.socket.bind(address)
        self.sender = rig.sender(address)
        until(lambda: (self.sender.poll(), bool(self.socket.poll(0)))[1])
        self.peer, hello = self.socket.recv_multipart()[:2]
        self.greeting = fields_of(hello)["number"]

    def say(self, *parts: bytes) -> None:
        self.socket.send_multipart([self.peer, *parts])

    def welcome(self, rows: int = 10) -> bytes:
        return encode_message(
            Welcome(
                edge="edge",
                life=Life(attempt=5),
                window_rows=rows,
                window_bytes=1 << 20,
                window_number=6,
                capacity_rows=rows,
                capacity_bytes=1 << 20,
                max_message_bytes=1 << 20,
                expected=0,
                held=(),
                ended=False,
                answers=self.greeting,
            )
        )


def test_damaged_answers_change_nothing_at_a_sender(ipc: Rig) -> None:
    false, mutator = FalseReceiver(ipc), Mutator(3)
    false.say(false.welcome())
    until(lambda: (false.sender.poll(), false.sender.room() == 10)[1])
    assert all(false.sender.send(make_batch(number)) for number in range(4))
    ack = encode_message(
        Ack(
            edge="edge",
            life=Life(attempt=5),
            sequences=(0, 1, 2, 3),
            window_rows=9,
            window_bytes=1 << 20,
            window_number=7,
        )
    )
    known = [[ack], [false.welcome(3)]]
    junk = 0
    for _ in range(600):
        genuine = mutator.pick(known)
        if mutator.chance(0.5):
            false.say(*mutator.damaged(genuine, known))
        else:
            fields = fields_of(genuine[0])
            fields[mutator.pick(list(fields))] = mutator.pick(
                (None, -1, 0.5, b"x", [-1], [None], {})
            )
            false.say(header(**fields))
        junk += 1
    until(lambda: (false.sender.poll(), false.sender.refused >= junk)[1])
    assert (false.sender.unacknowledged, false.sender.room()) == (4, 6)
    false.say(ack)
    until(lambda: (false.sender.poll(), false.sender.unacknowledged == 0)[1])
    assert false.sender.room() == 9
    false.socket.close(linger=0)


def test_a_monstrous_answer_is_cut_off_before_it_takes_memory(ipc: Rig) -> None:
    false = FalseReceiver(ipc)
    false.say(false.welcome())
    until(lambda: (false.sender.poll(), false.sender.room() == 10)[1])
    false.say(bytes(8 << 20))
    until(lambda: (false.sender.poll(), false.sender.room() == 0)[1])
    assert false.sender.refused == 0
    false.socket.close(linger=0)
