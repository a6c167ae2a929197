"""Weights between hosts: two addresses of loopback act as two hosts, which meet over a line with
the run's keys.
"""

import contextlib
import socket
import threading
import time

import psutil
import pytest

from transport.security import RunKeys
from transport.weights import AddressTaken, Deadlines, Layout, WeightError, reshard
from transport.weights.executors.address import interface_of
from transport.weights.protocol.messages import GetValue, Put, StoredValue
from transport.weights.sharded.control import CoordinatorSocket, NetworkEnd
from transport.weights.sharded.process_group import AGAIN_S, CoordinatorStore, Meeting, ProcessGroup

from ..sharded_rig import FAST, Group, Trainer, holds, until

MODEL = {f"t{n}": ((24, 16), "float32") for n in range(4)}


HALVES, THIRDS = Layout.fsdp(MODEL, 2), Layout.fsdp(MODEL, 3)


HERE, THERE = "127.0.0.1", "127.0.0.2"


@pytest.fixture(scope="module")
def keys() -> RunKeys:
    return RunKeys.make()


@contextlib.contextmanager
def offered(keys, layout=HALVES, **knobs):
    """A trainer on the first host, at a free port."""
    listener = CoordinatorSocket(f"tcp://{HERE}:*", keys)
    trainer = Trainer(
        layout, listener.address, host=NetworkEnd(HERE, keys), listener=listener, **knobs
    )
    try:
        yield trainer, listener.address
    finally:
        trainer.close()


@contextlib.contextmanager
def reading(keys, address, layout=THIRDS, **knobs):
    """A reader on the second host."""
    group = Group(layout, address, host=NetworkEnd(THERE, keys), **knobs)
    try:
        yield group
    finally:
        group.close()


def listening() -> set[tuple[str, int]]:
    return {
        tuple(each.laddr)
        for each in psutil.Process().net_connections("tcp")
        if each.status == psutil.CONN_LISTEN
    }


def test_versions_cross_hosts_byte_for_byte_and_each_rank_sends_what_the_plan_says(keys):
    before = listening()
    with offered(keys) as (trainer, address), reading(keys, address) as group:
        for version in (1, 2):
            tensors = trainer.publish(version)
            until(lambda version=version: group.versions == {version}, group)
            assert holds(group, tensors)
        assert trainer.writers[0].sent["generator-0"].pair_bytes == tuple(
            tuple(int(number) for number in row) for row in reshard(HALVES, THIRDS).pair_bytes
        )
        opened = [host for host, _ in listening() - before]
        assert sorted(opened) == [HERE] * 3 + [THERE] * 3, (
            "the line, and gloo at each rank, at the host's own address"
        )


def test_a_reader_beside_its_trainer_and_one_on_another_host_take_the_same_version(keys):
    with offered(keys) as (trainer, address), reading(keys, address) as far:
        near = Group(THIRDS, address, name="beside", host=NetworkEnd(HERE, keys))
        with contextlib.closing(near):
            tensors = trainer.publish(1)
            until(lambda: far.versions == near.versions == {1}, far, near)
            assert holds(far, tensors) and holds(near, tensors)


def test_whoever_has_other_keys_is_not_heard_and_holds_nobody_up(keys):
    with (
        offered(keys) as (trainer, address),
        reading(RunKeys.make(), address, name="stranger") as stranger,
        reading(keys, address) as group,
    ):
        tensors = trainer.publish(1)
        until(lambda: group.versions == {1}, group, stranger)
        assert holds(group, tensors) and stranger.versions == {-1}
        assert [status.name for status in trainer.writers[0].readers] == ["generator-0"]
        assert all(reader._member.heard == float("-inf") for reader in stranger.readers)


def test_a_trainer_that_others_reach_without_keys_is_refused():
    with pytest.raises(ValueError, match="weights in shared memory stay on one machine"):
        Trainer(HALVES, f"tcp://{THERE}:7000")


def test_readers_find_a_trainer_that_was_started_again_elsewhere(keys):
    place = {"now": ""}
    with (
        offered(keys) as (trainer, address),
        reading(keys, address, seek=lambda: place["now"]) as group,
    ):
        trainer.publish(4)
        until(lambda: group.versions == {4}, group)
        trainer.close()
        with offered(keys) as (successor, place["now"]):
            assert place["now"] != address
            tensors = successor.publish(3)
            until(lambda: group.versions == {3}, group)
            assert holds(group, tensors), (
                "the line of the trainer that lives counts, whatever its number"
            )


def test_readers_that_know_nothing_newer_wait_where_the_trainer_was(keys):
    with offered(keys) as (trainer, address), reading(keys, address, seek=lambda: "") as group:
        trainer.publish(1)
        until(lambda: group.versions == {1}, group)
        trainer.close()
        again = Trainer(HALVES, address, host=NetworkEnd(HERE, keys))
        with contextlib.closing(again):
            tensors = again.publish(2)
            until(lambda: group.versions == {2}, group)
            assert holds(group, tensors)


class Link:
    """What lies between two hosts: it carries bytes, and none while it is cut; nobody hears that it
    is.
    """

    def __init__(self, to: str) -> None:
        host, _, port = to.removeprefix("tcp://").rpartition(":")
        self._to, self._server, self.is_cut = (
            (host, int(port)),
            socket.create_server((THERE, 0)),
            False,
        )
        self.address = f"tcp://{THERE}:{self._server.getsockname()[1]}"
        self._ends: list[socket.socket] = [self._server]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                one, other = self._server.accept()[0], socket.create_connection(self._to)
                self._ends += [one, other]
                for ends in ((one, other), (other, one)):
                    threading.Thread(target=self._carry, args=ends, daemon=True).start()

    def _carry(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                while self.is_cut:
                    time.sleep(0.005)
                other.sendall(data)

    def close(self) -> None:
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


@pytest.mark.parametrize("cut_s", [0.3, 1.5])
@pytest.mark.slow
def test_a_link_that_was_cut_for_a_while_costs_versions_and_nothing_else(keys, cut_s):
    """For less than members wait for each other, and for longer: then the epoch ends, and begins
    again.
    """
    pace = Deadlines(heartbeat_s=0.05, gone_s=0.8, form_s=5.0, ready_s=0.8, transfer_s=2.0)
    with (
        offered(keys, deadlines=pace) as (trainer, address),
        contextlib.closing(Link(address)) as link,
        reading(keys, link.address, deadlines=pace) as group,
    ):
        first = trainer.publish(1)
        until(lambda: group.versions == {1}, group)
        link.is_cut = True
        trainer.publish(2)
        until_at = time.monotonic() + cut_s
        until(lambda: time.monotonic() > until_at, group)
        assert group.versions == {1} and holds(group, first)
        link.is_cut = False
        tensors = trainer.publish(3)
        until(lambda: group.versions == {3}, group)
        assert holds(group, tensors)


def test_a_port_that_somebody_has_is_an_error_that_names_it(keys):
    with socket.create_server((THERE, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AddressTaken, match=f"cannot listen at tcp://{THERE}:{port}"):
            CoordinatorSocket(f"tcp://{THERE}:{port}", keys)


def test_an_address_that_this_host_has_not_is_an_error_that_names_it(keys):
    with pytest.raises(
        WeightError, match=r"no network interface of .* has the address 192\.0\.2\.7"
    ):
        ProcessGroup(
            "gloo",
            Meeting(host="192.0.2.7", line=CoordinatorStore(1, lambda _: None)),
            0,
            2,
            connect_s=1.0,
        )
    with offered(keys, deadlines=FAST) as (trainer, address):
        stray = Group(THIRDS, address, host=NetworkEnd("192.0.2.7", keys))
        with contextlib.closing(stray):
            trainer.publish(1)
            until(lambda: "192.0.2.7" in trainer.writers[0].faults.get("generator-0", ""), stray)


def test_an_interface_is_known_by_any_of_its_addresses():
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    assert {interface_of(host) for host in ("", HERE, THERE, "localhost")} == {loopback}


def test_a_value_is_asked_for_once_and_again_only_when_no_answer_has_come():
    said: list[Put | GetValue] = []
    store = CoordinatorStore(7, said.append)
    store.set("0", b"here")
    assert store.check(["0"]) and not store.check(["0", "1"]) and not store.check(["1"])
    assert said == [Put(epoch=7, key="0", value=b"here"), GetValue(epoch=7, key="1")]
    store._asked["1"] -= AGAIN_S
    assert not store.check(["1"]) and said[2:] == [GetValue(epoch=7, key="1")]
    store.told(StoredValue(epoch=7, key="1", value=b"there"))
    assert store.check(["1"]) and store.get("1") == b"there"


def test_keys_stand_in_no_repr(keys):
    host = NetworkEnd(HERE, keys)
    secrets = (keys.receivers.secret, keys.senders.secret)
    assert not any(secret.decode() in repr(each) for secret in secrets for each in (host, keys))
