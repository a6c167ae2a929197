"""What only sockets can suffer: killed processes, junk, strangers, keys, and full queues."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq

from transport.data import Keys, Receiver, Sender, SocketNetwork, make_keys
from transport.errors import AddressError, PeerGone, SenderRefused
from transport.life import Life

from .rig import SCHEMA, Rig, connect, drain, firsts, make_batch, settle, take, until

RECEIVER = """
import sys
import pyarrow as pa
from transport.data import Receiver
from transport.life import Life
schema = pa.ipc.read_schema(pa.py_buffer(SCHEMA))
receiver = Receiver(edge="edge", schema=schema, address=sys.argv[1], life=Life(), capacity_rows=8)
for number in range(3):
    delivery = receiver.receive(20.0)
    if number == 1:
        delivery.ack()
print("holding", flush=True)
receiver.receive(60.0)
sys.stdin.read()
"""


@pytest.fixture
def ipc(folder: Path) -> Iterator[Rig]:
    """A rig over ipc."""
    made = Rig("ipc", folder)
    yield made
    made.close()


@pytest.fixture
def tcp(folder: Path) -> Iterator[Rig]:
    """A rig over tcp."""
    made = Rig("tcp", folder)
    yield made
    made.close()


def test_what_a_killed_process_held_goes_to_its_successor(ipc: Rig) -> None:
    address = ipc.new_address()
    script = RECEIVER.replace("SCHEMA", repr(SCHEMA.serialize().to_pybytes()))
    child = subprocess.Popen(
        [sys.executable, "-c", script, address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[3],
    )
    try:
        sender = ipc.sender(address)
        until(lambda: (sender.poll(), sender.room() > 0)[1])
        for number in range(3):
            assert sender.send(make_batch(number))
        assert child.stdout is not None
        assert child.stdout.readline() == b"holding\n"
        until(lambda: (sender.poll(), sender.unacknowledged == 2)[1])
        os.kill(child.pid, signal.SIGKILL)
    finally:
        child.kill()
        child.communicate()
    until(lambda: (sender.poll(), sender.room() == 0)[1])
    successor = ipc.receiver(address)
    assert firsts(take(successor, 2, sender)) == [0, 2]
    sender.finish()
    drain(sender, successor)


def test_more_messages_than_any_high_water_mark_all_arrive(ipc: Rig) -> None:
    receiver = ipc.receiver(capacity_rows=5000)
    sender = ipc.sender(receiver)
    connect(sender, to=receiver)
    assert all(sender.send(make_batch(number)) for number in range(4000))
    assert firsts(take(receiver, 4000, sender)) == list(range(4000))


def test_junk_is_counted_and_told_once_per_peer_and_changes_nothing(ipc: Rig) -> None:
    rig = ipc
    told: list[str] = []
    receiver = rig.receiver(
        on_refused=lambda _edge, _peer, why: told.append(why), max_message_bytes=1 << 20
    )
    sender = rig.sender(receiver)
    connect(sender, to=receiver)
    noise = np.random.default_rng(0)
    stranger = zmq.Context.instance().socket(zmq.DEALER)
    stranger.connect(receiver.address)
    shapes = [(0,), (1,), (100,), (20, 20), (20, 20, 20), (3 << 19,), (20, 3 << 19), (0, 0)]
    for shape in shapes:
        stranger.send_multipart([noise.bytes(size) for size in shape])
    until(lambda: (receiver.poll(), receiver.refused == len(shapes))[1])
    assert len(told) == 1
    assert sender.send(make_batch(7))
    assert firsts(take(receiver, 1, sender)) == [7]
    stranger.close(linger=0)


@pytest.mark.parametrize(
    "noise",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 50,
        b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0JUNK" + bytes(range(200)),
    ],
)
def test_a_peer_that_speaks_no_zeromq_is_counted_and_changes_nothing(
    tcp: Rig, noise: bytes
) -> None:
    receiver = tcp.receiver()
    sender = tcp.sender(receiver)
    connect(sender, to=receiver)
    host, port = receiver.address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(noise)
        until(lambda: (receiver.poll(), receiver.refused > 0)[1])
        assert sender.send(make_batch(7))
        assert firsts(take(receiver, 1, sender)) == [7]


def test_a_monstrous_frame_is_cut_off_before_it_takes_memory(ipc: Rig) -> None:
    rig = ipc
    receiver = rig.receiver(max_message_bytes=1 << 16)
    stranger = zmq.Context.instance().socket(zmq.DEALER)
    watch = stranger.get_monitor_socket(zmq.Event.DISCONNECTED)
    stranger.connect(receiver.address)
    stranger.send(bytes(1 << 23))
    assert watch.poll(20_000), "the connection was not cut"
    settle(receiver.poll)
    assert (receiver.depth, receiver.receive()) == ((0, 0), None)
    sender = rig.sender(receiver)
    connect(sender, to=receiver)
    stranger.disable_monitor()
    watch.close()
    stranger.close(linger=0)


def test_one_poller_wakes_for_credit_and_for_batches(ipc: Rig) -> None:
    receiver = ipc.receiver(capacity_rows=1)
    sender = ipc.sender(receiver)
    poller = zmq.Poller()
    for one in [*sender.sockets, *receiver.sockets]:
        poller.register(one, zmq.POLLIN)
    got: list[int] = []
    sent = 0

    def step() -> bool:
        nonlocal sent
        sender.poll()
        sent += sender.send(make_batch(sent))
        delivery = receiver.receive()
        if delivery is not None:
            got.extend(firsts([delivery]))
            delivery.ack()
        return len(got) == 50 or not poller.poll(20_000)

    until(step)
    assert got == list(range(50))


class Locked:
    """Receivers and senders with keys, over tcp."""

    def __init__(self) -> None:
        self.receiver_keys, self.sender_keys = make_keys()
        self.told: list[str] = []
        self.receiver = Receiver(
            edge="edge",
            schema=SCHEMA,
            address="tcp://127.0.0.1:*",
            life=Life(),
            capacity_rows=8,
            network=SocketNetwork(keys=self.receiver_keys),
            on_refused=lambda edge, peer, reason: self.told.append(reason),
        )

    def sender(self, keys: Keys | None, clock: object = None) -> Sender:
        """A sender with some keys, or none."""
        knobs = {} if clock is None else {"clock": clock}
        return Sender(
            edge="edge",
            sender_id="sender",
            life=Life(attempt=1),
            schema=SCHEMA,
            receivers=[self.receiver.address],
            network=SocketNetwork(keys=keys),
            **knobs,  # type: ignore[arg-type]
        )


@pytest.fixture
def locked() -> Iterator[Locked]:
    """A receiver with keys."""
    made = Locked()
    yield made
    made.receiver.close()


def test_the_keys_of_the_run_open_the_channel(locked: Locked) -> None:
    sender = locked.sender(locked.sender_keys)
    connect(sender, to=locked.receiver)
    assert sender.send(make_batch(7))
    assert firsts(take(locked.receiver, 1, sender)) == [7]
    sender.close(linger_s=5.0)


def test_a_sender_with_a_key_of_its_own_is_refused(locked: Locked) -> None:
    _, other = make_keys()
    stranger = Keys(
        receiver_public=locked.receiver_keys.receiver_public,
        sender_public=other.sender_public,
        secret=other.secret,
    )
    sender = locked.sender(stranger)
    with pytest.raises(SenderRefused, match="does not accept its key"):
        until(lambda: bool(locked.receiver.poll() or sender.poll()))
    until(lambda: (locked.receiver.poll(), locked.receiver.refused > 0)[1])
    assert len(locked.told) == 1
    sender.close()


@pytest.mark.parametrize("keyed", [False, True])
def test_a_peer_without_keys_or_with_those_of_another_run_never_gets_in(
    locked: Locked, keyed: bool
) -> None:
    now = [0.0]
    sender = locked.sender(make_keys()[1] if keyed else None, clock=lambda: now[0])
    until(lambda: (locked.receiver.poll(), sender.poll(), locked.receiver.refused > 0)[2])
    assert sender.room() == 0
    now[0] = 100.0
    with pytest.raises(PeerGone, match="'sender' waited"):
        until(lambda: bool(sender.poll()))
    assert len(locked.told) == 1
    sender.close()


@pytest.mark.parametrize(
    "address", ["tcp://0.0.0.0:5555", "tcp://*:5555", "tcp://192.0.2.1:1", "tcp://host:1"]
)
def test_an_address_open_to_other_machines_needs_keys(address: str) -> None:
    with pytest.raises(
        AddressError, match=r"open to other machines.*no keys; got host.*pass the CURVE keys"
    ):
        Receiver(edge="edge", schema=SCHEMA, address=address, life=Life(), capacity_rows=1)
    with pytest.raises(AddressError, match="no keys"):
        Sender(edge="edge", sender_id="s", life=Life(attempt=1), schema=SCHEMA, receivers=[address])


@pytest.mark.parametrize(
    "address", ["inproc://x", "ipc://a/b", "ipc://@name", "ipc://*", "tcp://1", "x", ""]
)
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(AddressError):
        Receiver(edge="edge", schema=SCHEMA, address=address, life=Life(), capacity_rows=1)


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_an_ipc_folder_open_to_others_is_refused(folder: Path, mode: int) -> None:
    folder.chmod(mode)
    with pytest.raises(AddressError, match=rf"mode 0{mode:o}.*mode 0700"):
        Receiver(
            edge="edge", schema=SCHEMA, address=f"ipc://{folder}/a", life=Life(), capacity_rows=1
        )
    folder.chmod(0o700)


def test_an_ipc_path_too_long_or_without_folder_is_refused(folder: Path) -> None:
    with pytest.raises(AddressError, match="too long"):
        Receiver(
            edge="edge",
            schema=SCHEMA,
            address=f"ipc://{folder}/{'a' * 200}",
            life=Life(),
            capacity_rows=1,
        )
    with pytest.raises(AddressError, match="No such file"):
        Receiver(
            edge="edge",
            schema=SCHEMA,
            address=f"ipc://{folder}/none/a",
            life=Life(),
            capacity_rows=1,
        )


def test_a_taken_address_is_refused(tcp: Rig) -> None:
    receiver = tcp.receiver()
    with pytest.raises(AddressError, match="cannot listen"):
        tcp.receiver(receiver.address)


def test_keys_do_not_show_their_secret() -> None:
    keys, _ = make_keys()
    assert keys.secret.decode() not in repr(keys)
