"""One-sided transfers within a machine: exactly the plan's bytes, none of a late sender, nothing
left behind.
"""

import contextlib
import errno
import os
import re
import signal
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch

from transport.weights import (
    Deadlines,
    Layout,
    Mesh,
    SegmentError,
    ShardedWriter,
    WeightError,
    reshard,
)
from transport.weights.sharded.process_group import ProcessGroup
from transport.weights.sharded.put import Deposit, DepositedChunk, Deposits
from transport.weights.sharded.transfer import GroupExchange

from ..sharded_programs import (
    BUCKET_BYTES,
    DEADLINE_S,
    HALVES,
    QUICK,
    put_and_stop_in_a_chunk,
    serve,
    values,
)
from ..sharded_programs import WHOLE as ONE
from ..sharded_rig import Group, Trainer, backed, holds, plane, refuses_damaged, until

pytestmark = pytest.mark.usefixtures("clean_shm")


SHORT = Deadlines(heartbeat_s=0.05, gone_s=20.0, form_s=20.0, ready_s=10.0, transfer_s=0.5)


MODEL = {
    "a": ((64, 64), "float32"),
    "b": ((96, 40), "float32"),
    "c": ((5,), "float32"),
    "d": ((48, 3), "bfloat16"),
}


SOURCE = Layout.fsdp(MODEL, 2)


COLUMNS = Layout.cut(MODEL, Mesh.of(2), {"a": (1,), "b": (1,), "c": (None,), "d": (0,)}.__getitem__)


VERSION_BYTES = [COLUMNS.flat(rank).nbytes for rank in range(2)]


@pytest.fixture
def address(tmp_path):
    return f"ipc://{tmp_path}/w"


@pytest.fixture(params=["shared_memory", "cuda_ipc"])
def backend(request, tmp_path):
    return backed(request.param, tmp_path)


def unnamed(*processes: int) -> Counter:
    """Bytes by inode of the files without a name in shared memory that these processes map or hold
    open.
    """
    found: Counter[int] = Counter()
    for process in processes or (os.getpid(),):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found |= unnamed_of(process)
    return found


def unnamed_of(process: int) -> Counter:
    """Of one process."""
    found: Counter[int] = Counter()
    for line in Path(f"/proc/{process}/maps").read_text().splitlines():
        if mapped := re.match(r"\S+ \S+ \S+ \S+ (\d+)\s+/dev/shm/.*\(deleted\)$", line):
            begin, end = (int(mark, 16) for mark in line.split()[0].split("-"))
            found[int(mapped[1])] = end - begin
    for link in Path(f"/proc/{process}/fd").iterdir():
        if link.is_symlink() and str(link.readlink()).startswith("/dev/shm/"):
            found[link.stat().st_ino] = link.stat().st_size
    return found


@pytest.fixture
def late(monkeypatch):
    """A sender that stops in the middle of its transfer of version 2, and then writes what nobody
    asked for.
    """
    begun, go, ended = threading.Event(), threading.Event(), threading.Event()
    steps, pack, transfers = Deposits.steps, Deposit.pack, Counter()
    stuck = []

    def counted(deposits, key, tensors, deadline):
        transfers[deposits] += 1
        found = steps(deposits, key, tensors, deadline)
        if transfers[deposits] == 2 and not begun.is_set() and not stuck:
            stuck.append(found[len(found) // 2])
        return found

    def stopping(step, sums):
        if stuck and step is stuck[0] and not begun.is_set():
            begun.set()
            assert go.wait(DEADLINE_S)
            for there in step._copier._destinations:
                there.fill_(77)
            ended.set()
        return pack(step, sums)

    monkeypatch.setattr(Deposits, "steps", counted)
    monkeypatch.setattr(Deposit, "pack", stopping)
    yield begun, go, ended
    go.set()


def test_a_sender_that_is_late_changes_no_byte_of_what_its_reader_computes_with(
    address, backend, late
):
    begun, go, ended = late
    trainer = Trainer(SOURCE, address, bucket_bytes=2048, deadlines=SHORT, **backend)
    group = Group(COLUMNS, address, deadlines=SHORT, memory=backend["memory"])
    first = trainer.publish(1)
    until(lambda: group.versions == {1}, group)
    epoch = group.readers[0].epoch
    trainer.publish(2)
    assert begun.wait(DEADLINE_S) and holds(group, first)
    until(lambda: group.readers[0].epoch not in (0, epoch), group)
    tensors = trainer.publish(3)
    until(lambda: group.versions == {3}, group, trainer)
    assert not ended.is_set()
    go.set()
    assert ended.wait(DEADLINE_S)
    assert holds(group, tensors)
    for version in (4, 5, 6):
        tensors = trainer.publish(version)
        until(lambda version=version: group.versions == {version}, group, trainer)
        assert holds(group, tensors)
    group.close()
    trainer.close()


@pytest.mark.slow
def test_a_trainer_rank_stopped_in_a_chunk_wakes_and_leaves_its_successors_version_alone(
    start, address, tmp_path
):
    before = unnamed()
    first = ShardedWriter(
        HALVES, 0, address, deadlines=QUICK, bucket_bytes=BUCKET_BYTES, backend="shared_memory"
    )
    stopped = start(put_and_stop_in_a_chunk, address, 1, tmp_path / "woken")
    group = Group(ONE, address, deadlines=QUICK)
    first.publish(1, values(HALVES, 0, 1))
    until(lambda: group.versions == {1}, group)
    first.publish(2, values(HALVES, 0, 2))
    until(lambda: Path(f"/proc/{stopped.pid}/stat").read_text().split()[2] == "T", group)
    until(lambda: first._member.failure, group)
    first.close()
    again = [
        ShardedWriter(HALVES, rank, address, deadlines=QUICK, attempt=1, backend="shared_memory")
        for rank in range(2)
    ]
    for rank, writer in enumerate(again):
        writer.publish(3, values(HALVES, rank, 3))
    until(lambda: group.versions == {3}, group)
    os.kill(stopped.pid, signal.SIGCONT)
    until(lambda: (tmp_path / "woken").exists(), group)
    assert all(bool((tensor == 3).all()) for tensor in group.tensors[0].values())
    both = 2 * ONE.flat(0).nbytes
    until(lambda: sum((unnamed(os.getpid(), stopped.pid) - before).values()) <= both, group)
    group.close()
    for writer in reversed(again):
        writer.close()


def test_a_source_rank_writes_exactly_the_plans_bytes_and_sends_none(address, backend, monkeypatch):
    written, sent = Counter(), Counter()
    send, message = GroupExchange.send, ProcessGroup.send

    def counted(exchange, steps, *rest):
        for step in steps:
            written[exchange._group.rank, step.peer] += sum(
                there.nbytes for there in step._copier._destinations
            )
        return send(exchange, steps, *rest)

    def weighed(group, tensor, peer, tag):
        sent[tensor.nbytes] += 1
        return message(group, tensor, peer, tag)

    monkeypatch.setattr(GroupExchange, "send", counted)
    monkeypatch.setattr(ProcessGroup, "send", weighed)
    with plane(SOURCE, COLUMNS, address, bucket_bytes=2048, **backend) as (trainer, group):
        tensors = trainer.publish(1)
        until(lambda: group.versions == {1}, group)
        assert holds(group, tensors)
        wanted = reshard(SOURCE, COLUMNS).pair_bytes
        assert {pair: written[pair] for pair in written} == {
            (source, 2 + to): wanted[source, to] for source in range(2) for to in range(2)
        }
        assert [writer.sent_bytes["generator-0"] for writer in trainer.writers] == wanted.sum(
            1
        ).tolist()
        assert max(sent) <= 1024


def test_a_sender_is_done_and_its_tensors_free_though_no_receiver_has_looked_yet(
    address, backend, monkeypatch
):
    looks, unpack = threading.Event(), DepositedChunk.unpack
    monkeypatch.setattr(
        DepositedChunk,
        "unpack",
        lambda step, sums: unpack(step, sums) if looks.wait(DEADLINE_S) else None,
    )
    with plane(SOURCE, COLUMNS, address, bucket_bytes=2048, hold="until_settle", **backend) as (
        trainer,
        group,
    ):
        for version in (1, 2):
            looks.clear()
            tensors = trainer.publish(version)
            wanted = [version * row for row in reshard(SOURCE, COLUMNS).pair_bytes.sum(1).tolist()]
            until(
                lambda wanted=wanted: (
                    [each.sent_bytes.get("generator-0") for each in trainer.writers] == wanted
                )
            )
            assert all(writer.settle(0.0) for writer in trainer.writers)
            looks.set()
            until(lambda version=version: group.versions == {version}, group)
            assert holds(group, tensors)


def test_a_byte_that_is_flipped_in_a_readers_buffer_is_found_and_the_next_version_taken(
    address, backend, monkeypatch
):
    def flip(step):
        step._summer._tensors[0].view(torch.uint8).select(0, -1).select(0, -1).bitwise_xor_(4)

    with plane(SOURCE, COLUMNS, address, bucket_bytes=2048, **backend) as (trainer, group):
        refuses_damaged(trainer, group, monkeypatch, DepositedChunk, flip)


@pytest.mark.slow
def test_shared_memory_holds_two_versions_whatever_has_failed(address, monkeypatch):
    before, most = unnamed(), 2 * sum(map(_pages, VERSION_BYTES))
    pack, failing = Deposit.pack, threading.Event()

    def broken(step, sums):
        if failing.is_set():
            raise RuntimeError("the sender fails")
        return pack(step, sums)

    monkeypatch.setattr(Deposit, "pack", broken)
    with plane(SOURCE, COLUMNS, address, bucket_bytes=2048, backend="shared_memory") as (
        trainer,
        group,
    ):
        version = 0
        for _ in range(4):
            for _ in range(3):
                version += 1
                tensors = trainer.publish(version)
                until(lambda version=version: group.versions == {version}, group, trainer)
                assert holds(group, tensors)
                until(lambda: 0 < sum((unnamed() - before).values()) <= most)
            failing.set()
            epoch = group.readers[0].epoch
            version += 1
            trainer.publish(version)
            until(lambda epoch=epoch: group.readers[0].epoch not in (0, epoch), group)
            failing.clear()
        kept = {name: tensor.data.clone() for name, tensor in group.tensors[0].items()}
    assert all(torch.equal(kept[name], tensor) for name, tensor in group.tensors[0].items())
    del group.tensors[:]
    assert not unnamed() - before


def test_a_full_dev_shm_is_an_error_that_says_so_and_the_old_version_is_kept(address, monkeypatch):
    with plane(SOURCE, COLUMNS, address, backend="shared_memory") as (trainer, group):
        first = trainer.publish(1)
        until(lambda: all(reader.poll() for reader in group.readers))

        def full(*_):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", full)
            until(lambda: group.versions == {1}, group)
            trainer.publish(2)
            with pytest.raises(
                SegmentError,
                match=r"found No space left on device, .*each rank of a reader needs two",
            ):
                until(lambda: False, group)
            until(lambda: trainer.status().state == "refused")
            assert group.versions == {1} and holds(group, first)
        with pytest.raises(SegmentError):
            until(lambda: group.readers[1].poll() and False, group)
        tensors = trainer.publish(3)
        until(lambda: group.versions == {3}, group)
        assert holds(group, tensors) and not trainer.writers[0].faults


@pytest.mark.parametrize("who", ["sender", "receiver"])
def test_who_is_killed_leaves_nothing_in_shared_memory_and_its_group_recovers(
    start, address, tmp_path, who
):
    before = unnamed()
    if who == "sender":
        killed = start(put_and_stop_in_a_chunk, address, None, tmp_path / "woken")
        group = Group(ONE, address, deadlines=QUICK)
        until(lambda: group.versions == {1}, group)
        until(lambda: Path(f"/proc/{killed.pid}/stat").read_text().split()[2] == "T", group)
        os.kill(killed.pid, signal.SIGKILL)
        killed.join(DEADLINE_S)
        group.adopt()
        assert all(bool((tensor == 1).all()) for tensor in group.tensors[0].values())
        writer = ShardedWriter(ONE, 0, address, deadlines=QUICK, attempt=1, backend="shared_memory")
        writer.publish(3, values(ONE, 0, 3))
        until(lambda: group.versions == {3}, group)
        group.close()
        del group
    else:
        writer = ShardedWriter(ONE, 0, address, deadlines=QUICK, backend="shared_memory")
        writer.publish(1, values(ONE, 0, 1))
        killed = start(serve, address, "generator-0", ONE, 0, 9)
        until(lambda: any(status.version == 1 for status in writer.readers))
        os.kill(killed.pid, signal.SIGKILL)
        killed.join(DEADLINE_S)
        successor = start(serve, address, "generator-0", ONE, 0, 2)
        until(lambda: any(status.version == 1 for status in writer.readers))
        writer.publish(2, values(ONE, 0, 2))
        successor.join(DEADLINE_S)
        assert successor.exitcode == 0
    writer.close()
    assert not unnamed() - before


def test_a_delta_within_a_machine_is_refused(address):
    with pytest.raises(WeightError, match="pays on a slow link; found backend='shared_memory'"):
        ShardedWriter(SOURCE, 0, address, backend="shared_memory", link_bytes_per_s=1e7)


def _pages(nbytes: int) -> int:
    return -(-nbytes // 4096) * 4096


def serve_on_gpu(address: str, layout: Layout, rank: int, last: int, attempt: int = 0) -> None:
    """A reader's rank whose parameters are on the GPU."""
    torch.set_default_device("cuda")
    serve(address, "generator-0", layout, rank, last, device="cuda", attempt=attempt)


def on_gpu(rank: int, layout: Layout, version: int) -> dict[str, torch.Tensor]:
    return {name: tensor.cuda() for name, tensor in values(layout, rank, version).items()}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_ranks_write_into_the_memory_of_readers_on_one_gpu_without_a_mixture(start, address):
    last = 12
    knobs = {
        "deadlines": QUICK,
        "bucket_bytes": BUCKET_BYTES,
        "backend": "cuda_ipc",
        "device": "cuda",
    }
    writers = [ShardedWriter(HALVES, rank, address, **knobs) for rank in range(2)]
    children = [start(serve_on_gpu, address, HALVES, rank, last) for rank in range(2)]
    for version in range(1, last + 1):
        for rank, writer in enumerate(writers):
            writer.publish(version, on_gpu(rank, HALVES, version))
        until(
            lambda version=version: [each.version for each in writers[0].readers] in ([version], [])
        )
    for child in children:
        child.join(DEADLINE_S)
        assert child.exitcode == 0
    for writer in reversed(writers):
        writer.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_reader_that_is_killed_on_a_gpu_is_followed_by_one_that_gets_the_newest_version(
    start, address
):
    writer = ShardedWriter(ONE, 0, address, deadlines=QUICK, backend="cuda_ipc", device="cuda")
    for attempt, version in enumerate((1, 2)):
        writer.publish(version, on_gpu(0, ONE, version))
        reader = start(serve_on_gpu, address, ONE, 0, 9, attempt)
        until(lambda version=version: [each.version for each in writer.readers] == [version])
        os.kill(reader.pid, signal.SIGKILL)
        reader.join(DEADLINE_S)
    writer.close()
