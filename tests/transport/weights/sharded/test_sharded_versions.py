"""What a trainer's rank and a generator's rank may count on, over gloo, in one process."""

import select
import socket
import threading
import time

import pytest
import torch

from transport.errors import PeerGone, WaitTimeout
from transport.weights import (
    AddressTaken,
    Layout,
    LayoutMismatch,
    Mesh,
    ShardedReader,
    ShardedWriter,
    WeightError,
)
from transport.weights.executors.device import TransferDevice
from transport.weights.protocol.messages import BROKEN, StartTransfer
from transport.weights.protocol.ranks import TransferOutcome
from transport.weights.sharded.control import EpochThread
from transport.weights.sharded.process_group import CoordinatorStore, Meeting, ProcessGroup
from transport.weights.sharded.put import Deposit, DepositedChunk
from transport.weights.sharded.steps import ChunkMessage

from ..sharded_rig import (
    DEADLINE_S,
    FAST,
    Group,
    Trainer,
    full,
    holds,
    parameters,
    plane,
    refuses_damaged,
    shards,
    until,
)

MODEL = {"a": ((12, 8), "float32"), "b": ((8, 4), "float32"), "c": ((5,), "float32")}


SOURCE, TARGET = Layout.fsdp(MODEL, 2), Layout.fsdp(MODEL, 3)


@pytest.fixture
def address(tmp_path):
    return f"ipc://{tmp_path}/w"


@pytest.fixture(params=["gloo", "shared_memory"])
def backend(request):
    return request.param


@pytest.fixture
def gate(monkeypatch):
    """Receivers wait at it before they put a message into place, and senders before they put one
    there themselves.
    """
    opened = threading.Event()
    opened.set()

    def waiting(move):
        return lambda step, sums: move(step, sums) if opened.wait(DEADLINE_S) else None

    for kind, move in ((ChunkMessage, "unpack"), (DepositedChunk, "unpack"), (Deposit, "pack")):
        monkeypatch.setattr(kind, move, waiting(getattr(kind, move)))
    yield opened
    opened.set()


def test_a_version_goes_into_parameters_by_a_pointer_flip_between_two_buffers(address, backend):
    with plane(SOURCE, TARGET, address, backend=backend) as (trainer, group):
        places = []
        for version in range(1, 6):
            trainer.publish(version)
            until(lambda version=version: group.versions == {version}, group)
            places.append(group.tensors[0]["a"].data_ptr())
        assert places[0] == places[2] == places[4] != places[1] == places[3]
        # every rank has said that it has it
        until(lambda: trainer.writers[0].sent["generator-0"].committed_s > 0)
        sent = trainer.writers[0].sent["generator-0"]
        assert 0 < sent.held_s < DEADLINE_S
        assert (
            0 < sent.seconds <= sent.committed_s < DEADLINE_S
            and 0 < sent.taken_s <= sent.committed_s
        )
        assert sent.whole_bytes == sum(map(sum, sent.pair_bytes)) > 0, (
            "without deltas nothing is spared"
        )


def test_parameters_keep_their_memory_where_they_are_asked_to(address, backend):
    trainer = Trainer(SOURCE, address, backend=backend)
    group = Group(TARGET, address, adopt="copy")
    place = group.tensors[1]["a"].data_ptr()
    for version in (1, 2):
        tensors = trainer.publish(version)
        until(lambda version=version: group.versions == {version}, group)
        assert holds(group, tensors)
    assert group.tensors[1]["a"].data_ptr() == place
    group.close()
    trainer.close()


def test_an_old_version_stays_until_the_new_one_is_adopted(address, backend):
    with plane(SOURCE, TARGET, address, backend=backend) as (trainer, group):
        first = trainer.publish(1)
        until(lambda: group.versions == {1}, group)
        second = trainer.publish(2)
        until(lambda: all(reader.poll() for reader in group.readers))
        assert group.versions == {1} and holds(group, first)
        group.adopt()
        assert group.versions == {2} and holds(group, second)


def test_a_snapshot_may_change_at_once_and_late_groups_still_get_it(address):
    trainer = Trainer(SOURCE, address)
    tensors = full(SOURCE, 3)
    for rank, writer in enumerate(trainer.writers):
        mine = shards(SOURCE, rank, tensors)
        assert writer.publish(3, mine)
        for tensor in mine.values():
            tensor.fill_(-1)
    group = Group(TARGET, address)
    until(lambda: group.versions == {3}, group)
    assert holds(group, tensors)
    group.close()
    trainer.close()


def test_tensors_that_are_sent_in_place_may_change_once_settled(address, gate, backend):
    with plane(SOURCE, TARGET, address, backend=backend, hold="until_settle", bucket_bytes=64) as (
        trainer,
        group,
    ):
        until(lambda: all(reader.epoch for reader in group.readers))
        gate.clear()
        mine = [shards(SOURCE, rank, full(SOURCE, 1)) for rank in range(2)]
        for writer, tensors in zip(trainer.writers, mine, strict=True):
            writer.publish(1, tensors)
        until(lambda: all(writer._member.kept for writer in trainer.writers))
        with pytest.raises(WeightError, match="call settle"):
            trainer.writers[0].publish(2, mine[0])
        gate.set()
        assert all(writer.settle(DEADLINE_S) for writer in trainer.writers)
        for tensors in mine:
            for tensor in tensors.values():
                tensor.fill_(-1)
        until(lambda: group.versions == {1}, group)
        assert holds(group, full(SOURCE, 1))


def test_a_trainer_that_will_not_wait_gives_the_transfer_up_and_the_group_takes_the_next(
    address, gate, backend
):
    with plane(SOURCE, TARGET, address, backend=backend, hold="until_settle", bucket_bytes=64) as (
        trainer,
        group,
    ):
        until(lambda: all(reader.epoch for reader in group.readers))
        gate.clear()
        trainer.publish(1)
        until(lambda: all(writer._member.kept for writer in trainer.writers))
        settled = [writer.settle(0.01) for writer in trainer.writers]
        assert settled != [True, True]
        tensors = trainer.publish(2)
        gate.set()
        until(lambda: group.versions == {2}, group)
        assert holds(group, tensors)
        assert "generator-0" in trainer.writers[0].faults


def test_a_publish_never_waits_and_the_newest_version_goes_out_when_a_buffer_is_free(
    address, gate, backend
):
    with plane(SOURCE, TARGET, address, backend=backend, bucket_bytes=64) as (trainer, group):
        until(lambda: all(reader.epoch for reader in group.readers))
        gate.clear()
        trainer.publish(1)
        until(lambda: trainer.status().state == "taking")
        tensors = [trainer.publish(version) for version in range(2, 9)][-1]
        gate.set()
        until(lambda: group.versions == {8}, group, trainer)
        assert holds(group, tensors)


def test_over_messages_one_version_is_sent_at_a_time_and_who_comes_meanwhile_takes_the_next(
    address, gate
):
    trainer = Trainer(SOURCE, address, bucket_bytes=64)
    gate.clear()
    trainer.publish(1)
    first = Group(TARGET, address, "first")
    until(lambda: all(writer._member.kept == {1} for writer in trainer.writers))
    second = Group(Layout.whole(MODEL), address, "second")
    for version in (2, 3, 4):
        tensors = trainer.publish(version)
        assert all(writer.pending is None for writer in trainer.writers)
    until(lambda: trainer.status("second") is not None)
    assert all(writer._member.kept == {1} for writer in trainer.writers)
    gate.set()
    until(lambda: first.versions == second.versions == {4}, first, second, trainer)
    assert len({status.epoch for status in trainer.writers[0].readers}) == 1
    for group in (first, second):
        assert holds(group, tensors)
        group.close()
    trainer.close()


@pytest.mark.parametrize("settle", [(), (1,), (0, 1)], ids=str)
def test_when_both_buffers_are_being_sent_a_version_waits_for_poll(address, gate, settle):
    trainer = Trainer(SOURCE, address, backend="shared_memory", bucket_bytes=64)
    gate.clear()
    trainer.publish(1)
    slow = Group(TARGET, address, "slow")
    until(lambda: all(writer._member.kept == {1} for writer in trainer.writers))
    trainer.publish(2)
    other = Group(TARGET, address, "other")
    until(lambda: all(writer._member.kept == {1, 2} for writer in trainer.writers))
    mine = [shards(SOURCE, rank, full(SOURCE, 3)) for rank in range(2)]
    assert [
        writer.publish(3, tensors) for writer, tensors in zip(trainer.writers, mine, strict=True)
    ] == [False] * 2
    assert trainer.writers[0].pending == 3
    for rank in settle:
        trainer.writers[rank].settle(0.0)
        assert trainer.writers[rank].pending is None
        for tensor in mine[rank].values():
            tensor.zero_()
    gate.set()
    if settle:
        until(lambda: slow.versions == {1} and other.versions == {2}, slow, other, trainer)
        trainer.publish(4)
    newest = 4 if settle else 3
    until(lambda: slow.versions == other.versions == {newest}, slow, other, trainer)
    for group in (slow, other):
        assert holds(group, full(SOURCE, newest))
        group.close()
    trainer.close()


def test_a_byte_flipped_on_the_way_is_found_and_the_next_version_taken(address, monkeypatch):
    def flip(step):
        step.data[5] ^= 4

    with plane(SOURCE, TARGET, address, bucket_bytes=64) as (trainer, group):
        refuses_damaged(trainer, group, monkeypatch, ChunkMessage, flip)


def test_a_byte_flipped_in_the_trainers_buffer_is_found(address, backend):
    with plane(SOURCE, SOURCE, address, backend=backend) as (trainer, group):
        first = trainer.publish(1)
        until(lambda: group.versions == {1}, group)
        staging, fill = trainer.writers[1]._staging, trainer.writers[1]._staging.fill

        def damaged(version, tensors):
            fill(version, tensors)
            staging.of(version)[1]["b"].view(torch.int32)[2, 1] ^= 1 << 20

        staging.fill = damaged
        trainer.publish(2)
        until(lambda: trainer.status().state == "refused", group)
        assert group.versions == {1} and holds(group, first)
        del staging.fill
        tensors = trainer.publish(3)
        until(lambda: group.versions == {3}, group)
        assert holds(group, tensors)


def test_notes_reach_the_readers_and_the_newest_wins(address):
    with plane(SOURCE, TARGET, address) as (trainer, group):
        for step in (1, 2, 3):
            trainer.writers[0].tell({"step": step})
        until(lambda: all(reader.note == {"step": 3} for reader in group.readers))


def test_a_loop_can_sleep_until_a_version_is_there(address):
    with plane(SOURCE, Layout.whole(MODEL), address) as (trainer, group):
        (reader,) = group.readers
        assert reader.poll() is None
        trainer.publish(1)
        assert select.select([reader.socket], [], [], DEADLINE_S)[0]
        assert reader.poll().version == 1
        assert select.select([reader.socket], [], [], 0)[0] == []


def test_a_second_trainer_at_one_address_is_turned_away(address):
    trainer = Trainer(SOURCE, address)
    with pytest.raises(AddressTaken, match="another writer has the address"):
        ShardedWriter(SOURCE, 0, address)
    trainer.close()
    Trainer(SOURCE, address).close()


def test_a_second_process_for_one_rank_fences_the_first_for_good(address):
    with plane(Layout.whole(MODEL), Layout.whole(MODEL), address) as (trainer, group):
        trainer.publish(1)
        until(lambda: group.versions == {1}, group)
        twin = Group(Layout.whole(MODEL), address)
        trainer.publish(2)
        until(lambda: twin.versions == {2}, twin)
        with pytest.raises(AddressTaken, match="another process has taken the place of rank 0"):
            group.readers[0].wait(2, DEADLINE_S)
        twin.close()


def test_a_group_with_another_model_is_told_so_and_the_others_go_on(address):
    with plane(SOURCE, TARGET, address) as (trainer, group):
        stranger = Group(Layout.whole({"a": ((12, 9), "float32")}), address, "stranger")
        with pytest.raises(LayoutMismatch, match="'a' has two shapes"):
            stranger.readers[0].wait(1, DEADLINE_S)
        trainer.publish(1)
        until(lambda: group.versions == {1}, group)
        stranger.close()


def test_trainer_ranks_that_differ_are_told_so(address):
    trainer = Trainer(Layout.whole(MODEL), address)
    other = ShardedWriter(SOURCE, 1, address, deadlines=FAST)

    def told() -> bool:
        try:
            other.poll()
        except PeerGone as error:
            return "differ" in str(error)
        return False

    until(told)
    other.close()
    trainer.close()


def test_tensors_that_are_not_the_ranks_own_are_refused(address):
    trainer = Trainer(SOURCE, address)
    mine = shards(SOURCE, 0, full(SOURCE, 1))
    with pytest.raises(LayoutMismatch, match="no tensor 'b'"):
        trainer.writers[0].publish(1, {"a": mine["a"]})
    with pytest.raises(LayoutMismatch, match="pass the local shard"):
        trainer.writers[0].publish(1, full(SOURCE, 1))
    reader = ShardedReader(TARGET, 0, address, "generator-0")
    with pytest.raises(LayoutMismatch, match="another shape"):
        reader.attach(parameters(full(TARGET, 1)))
    reader.close()
    trainer.close()


def test_versions_rise_and_closed_ends_say_so(address):
    trainer = Trainer(Layout.whole(MODEL), address)
    tensors = full(trainer.layout, 1)
    (writer,) = trainer.writers
    assert writer.publish(1, tensors)
    with pytest.raises(WeightError, match="versions must rise"):
        writer.publish(1, tensors)
    trainer.close()
    with pytest.raises(WeightError, match="closed"):
        writer.poll()
    reader = ShardedReader(TARGET, 0, address, "generator-0")
    with pytest.raises(WeightError, match="nothing attached"):
        reader.wait(1, 1.0)
    reader.close()
    with pytest.raises(WeightError, match="closed"):
        reader.poll()


def test_a_wait_ends_at_its_deadline_and_tells_whether_the_trainer_lives(address):
    reader = ShardedReader(Layout.whole(MODEL), 0, address, "generator-0", deadlines=FAST)
    reader.attach(parameters(full(Layout.whole(MODEL), 0)))
    with pytest.raises(PeerGone, match="no word from the writer"):
        reader.wait(1, 0.2)
    trainer = Trainer(Layout.whole(MODEL), address)
    until(lambda: reader.epoch > 0)
    with pytest.raises(WaitTimeout, match="found version -1"):
        reader.wait(1, 0.5)
    reader.close()
    trainer.close()


def test_a_reader_that_leaves_is_no_fault_even_if_its_connection_is_found_closed_first(address):
    trainer, group = Trainer(SOURCE, address), Group(Layout.whole(MODEL), address)
    trainer.publish(1)
    until(lambda: group.versions == {1}, group)
    coordinator = trainer.writers[0]._coordinator
    tick, left = coordinator.tick, []

    def leaves_before(now):
        if not left:
            left.append(group.close())
            time.sleep(0.3)
            coordinator.tell({})
        return tick(now)

    coordinator.tick = leaves_before
    until(lambda: left and not trainer.writers[0].readers)
    assert not trainer.writers[0].faults
    trainer.close()


def test_ranks_may_meet_at_a_loopback_port_too():
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    with plane(SOURCE, TARGET, address) as (trainer, group):
        tensors = trainer.publish(1)
        until(lambda: group.versions == {1}, group)
        assert holds(group, tensors)


def test_nothing_is_left_at_the_address(address, tmp_path):
    with plane(SOURCE, TARGET, address) as (trainer, group):
        trainer.publish(1)
        until(lambda: group.versions == {1}, group)
    assert list(tmp_path.iterdir()) == []


def test_no_thread_of_a_transfer_outlives_the_ends_that_began_it(address, monkeypatch):
    abort = ProcessGroup.abort

    def slow(group):
        time.sleep(0.3)
        abort(group)

    monkeypatch.setattr(ProcessGroup, "abort", slow)
    before = set(threading.enumerate())
    with plane(SOURCE, TARGET, address) as (trainer, group):
        trainer.publish(1)
        until(lambda: group.versions == {1}, group)
    assert not [
        thread.name
        for thread in set(threading.enumerate()) - before
        if thread.name.startswith("weights")
    ]


@pytest.mark.parametrize("over", ["one host", "hosts"])
def test_a_process_group_whose_peers_never_come_is_given_up_at_once(tmp_path, over):
    line = CoordinatorStore(1, lambda _: None)
    meeting = (
        Meeting(str(tmp_path / "store"))
        if over == "one host"
        else Meeting(host="127.0.0.2", line=line)
    )
    ended = []

    def meet():
        try:
            ProcessGroup("gloo", meeting, 0, 2, connect_s=60.0)
        except RuntimeError as error:
            ended.append(str(error))

    thread = threading.Thread(target=meet)
    thread.start()
    time.sleep(0.2)
    assert thread.is_alive()
    meeting.over.set()
    thread.join(20)
    assert not thread.is_alive() and "have not come" in ended[0]


def test_a_collective_never_holds_the_thread_that_keeps_the_deadline():
    stuck, over, ended = threading.Event(), threading.Event(), threading.Event()
    loop, outcomes = threading.current_thread(), []

    class Stuck:
        def prepare(self) -> None:
            pass

        def transfer(self, transfer: StartTransfer, deadline: float) -> TransferOutcome:
            assert threading.current_thread() is not loop, "the loop itself is in the collective"
            stuck.set()
            over.wait(DEADLINE_S)
            return TransferOutcome(BROKEN, "aborted")

        def abort(self) -> None:
            over.set()

        def close(self) -> None:
            pass

    def transferred(transfer: StartTransfer, outcome: TransferOutcome) -> None:
        outcomes.append((transfer.version, outcome.fault))
        ended.set()

    thread = EpochThread(lambda stop: Stuck(), lambda fault, misfit: None, transferred)
    thread.transfer(
        StartTransfer(epoch=1, round=1, version=7, readers=[]), time.monotonic() + DEADLINE_S
    )
    assert stuck.wait(DEADLINE_S) and outcomes == []
    thread.abort()
    assert ended.wait(DEADLINE_S) and thread.ended(DEADLINE_S)
    assert outcomes == [(7, "aborted")]


def test_the_thread_that_keeps_the_deadline_breaks_a_transfer_off_that_passes_it():
    stuck, over, ended, outcomes = threading.Event(), threading.Event(), threading.Event(), []

    class Stuck:
        def prepare(self) -> None:
            pass

        def transfer(self, transfer: StartTransfer, deadline: float) -> TransferOutcome:
            stuck.set()
            assert over.wait(DEADLINE_S)
            return TransferOutcome(BROKEN, "pair closed")

        def abort(self) -> None:
            over.set()

        def close(self) -> None:
            pass

    def transferred(transfer: StartTransfer, outcome: TransferOutcome) -> None:
        outcomes.append(outcome.fault)
        ended.set()

    thread = EpochThread(lambda stop: Stuck(), lambda fault, misfit: None, transferred)
    thread.look(1e9)
    thread.transfer(StartTransfer(epoch=1, round=1, version=7, readers=[]), 100.0)
    assert stuck.wait(DEADLINE_S)
    thread.look(99.0)
    assert not over.is_set()
    thread.look(100.0)
    assert ended.wait(DEADLINE_S) and outcomes == ["it was not over at its deadline: pair closed"]
    thread.abort()
    assert thread.ended(DEADLINE_S)


class _CountedHost(TransferDevice):
    """Tells how much main memory was asked for, and whether messages lie in it."""

    def __init__(self):
        super().__init__()
        self.made, self.copied = [], 0

    def host_memory(self, nbytes):
        self.made.append(super().host_memory(nbytes))
        return self.made[-1]

    def copier(self, destinations, sources=None):
        (memory,) = self.made
        places = {tensor.untyped_storage().data_ptr() for tensor in destinations}
        assert places == {memory.untyped_storage().data_ptr()}
        self.copied += 1
        return super().copier(destinations, sources)


def test_versions_arrive_in_main_memory_one_at_a_time_where_two_do_not_fit_a_device(tmp_path):
    tensors = {"up": ((64, 16), "float32"), "down": ((16, 64), "float32")}
    source = Layout.fsdp(tensors, 3)
    cut = Layout.cut(tensors, Mesh.of(1), lambda name: (0,))
    device, address = _CountedHost(), f"ipc://{tmp_path}/w"
    trainer = Trainer(source, address, bucket_bytes=512)
    group = Group(cut, address, adopt="copy", in_host=True, device=device)
    own = group.tensors[0]["up"].data_ptr()
    for version in range(4):
        whole = trainer.publish(version)
        until(lambda version=version: group.versions == {version}, group)
        for name, tensor in group.tensors[0].items():
            assert torch.equal(tensor.detach(), whole[name])
    assert group.tensors[0]["up"].data_ptr() == own
    assert len(device.made) == 1 and device.copied
    group.close()
    trainer.close()
