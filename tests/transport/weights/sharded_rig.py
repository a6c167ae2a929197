"""Trainers' ranks and reader groups of the sharded weight plane, in one process, with the bytes
they should hold.
"""

import itertools
import math
import time
from contextlib import contextmanager

import torch

from transport.weights import Deadlines, Layout, ShardedReader, ShardedWriter
from transport.weights.executors.peer_memory import HostMemory

FAST = Deadlines(heartbeat_s=0.05, gone_s=20.0, form_s=20.0, ready_s=10.0, transfer_s=10.0)
DEADLINE_S = 30.0
_attempts = itertools.count()


def full(layout: Layout, version: int) -> dict[str, torch.Tensor]:
    """The model's tensors at this version, in the layout's dtypes; tied ones once."""
    found = {}
    for number, (name, held) in enumerate(layout.tensors.items()):
        count = math.prod(held.shape)
        values = (
            torch.arange(count, dtype=torch.float64) * 7 + number * 31 + version * 101
        ) % 251 - 125
        found[name] = values.view(held.shape).to(getattr(torch, held.dtype))
    return found


def shards(
    layout: Layout, rank: int, tensors: dict[str, torch.Tensor], blank: float = 0
) -> dict[str, torch.Tensor]:
    """A rank's local tensors: its boxes of the full ones, cut out one by one; the oracle."""
    local = {
        name: torch.full(shape, blank, dtype=torch.float64).to(getattr(torch, dtype))
        for name, (shape, dtype) in layout.local(rank).items()
    }
    for name, held in layout.tensors.items():
        rows = held.shards
        for row in (rows.ranks == rank).nonzero()[0].tolist():
            box = tuple(
                slice(a, b)
                for a, b in zip(rows.start[row].tolist(), rows.stop[row].tolist(), strict=True)
            )
            size = [b.stop - b.start for b in box]
            size = [1] * (rows.local_start.shape[1] - len(size)) + size
            place = tuple(
                slice(a, a + n) for a, n in zip(rows.local_start[row].tolist(), size, strict=True)
            )
            local[held.into][place] = tensors[name][box].to(local[held.into].dtype).view(size)
    return local


def parameters(tensors: dict[str, torch.Tensor]) -> dict[str, torch.nn.Parameter]:
    return {
        name: torch.nn.Parameter(tensor.clone(), requires_grad=tensor.is_floating_point())
        for name, tensor in tensors.items()
    }


class Group:
    """A reader group: one rank for each of its layout, all in this thread."""

    def __init__(
        self, layout: Layout, address: str, name: str = "generator-0", kind=ShardedReader, **knobs
    ) -> None:
        self.layout = layout
        knobs.setdefault("deadlines", FAST)
        self.readers = [kind(layout, rank, address, name, **knobs) for rank in range(layout.ranks)]
        blank = {
            n: torch.zeros(h.shape, dtype=getattr(torch, h.dtype))
            for n, h in layout.tensors.items()
        }
        self.tensors = [parameters(shards(layout, rank, blank)) for rank in range(layout.ranks)]
        for reader, mine in zip(self.readers, self.tensors, strict=True):
            reader.attach(mine)

    def adopt(self) -> None:
        """A safe point of the whole group."""
        if all(reader.poll() for reader in self.readers):
            for reader in self.readers:
                reader.adopt()

    @property
    def versions(self) -> set[int]:
        return {reader.version for reader in self.readers}

    def close(self) -> None:
        for reader in self.readers:
            reader.close()


class Trainer:
    """All ranks of a trainer, in this thread."""

    def __init__(self, layout: Layout, address: str, kind=ShardedWriter, **knobs) -> None:
        self.layout = layout
        knobs.setdefault("deadlines", FAST)
        knobs.setdefault("attempt", next(_attempts))
        self.writers = [kind(layout, rank, address, **knobs) for rank in range(layout.ranks)]

    def publish(self, version: int) -> dict[str, torch.Tensor]:
        tensors = full(self.layout, version)
        for rank, writer in enumerate(self.writers):
            writer.publish(version, shards(self.layout, rank, tensors))
        return tensors

    def status(self, name: str = "generator-0"):
        return next((status for status in self.writers[0].readers if status.name == name), None)

    def close(self) -> None:
        for writer in reversed(self.writers):
            writer.close()


def until(condition, *busy) -> None:
    """Wait for the condition; groups among `busy` adopt what they are offered, writers are
    polled.
    """
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, [
            (end.writers[0].readers, end.writers[0].faults)
            if isinstance(end, Trainer)
            else end.versions
            for end in busy
        ]
        for end in busy:
            if isinstance(end, Trainer):
                for writer in end.writers:
                    writer.poll()
            else:
                end.adopt()
        time.sleep(0.001)


def holds(group: Group, tensors: dict[str, torch.Tensor]) -> bool:
    """Whether every rank of the group has its part of these."""
    return all(
        torch.equal(mine[name].detach(), wanted)
        for rank, mine in enumerate(group.tensors)
        for name, wanted in shards(group.layout, rank, tensors).items()
    )


def backed(backend: str, folder) -> dict[str, object]:
    """Knobs of a writer; on this processor files stand in for a GPU's memory, which is spoiled when
    it is freed.
    """
    return {"backend": backend, "memory": HostMemory(folder) if backend == "cuda_ipc" else None}


@contextmanager
def plane(source: Layout, destination: Layout, address: str, **knobs):
    """A trainer and one reader group."""
    trainer = Trainer(source, address, **knobs)
    group = Group(destination, address, memory=knobs.get("memory"))
    try:
        yield trainer, group
    finally:
        group.close()
        trainer.close()


def refuses_damaged(trainer: Trainer, group: Group, monkeypatch, kind: type, damage) -> None:
    """Of version 2 a step of this kind is damaged before it is unpacked: all refuse it by name, and
    take version 3.
    """
    first = trainer.publish(1)
    until(lambda: group.versions == {1}, group)
    unpack, damages = kind.unpack, iter([True])

    def damaged(step, sums):
        if next(damages, False):
            damage(step)
        return unpack(step, sums)

    monkeypatch.setattr(kind, "unpack", damaged)
    trainer.publish(2)
    until(lambda: trainer.status().state == "refused", group)
    until(
        lambda: all(
            "other bytes than were sent in ['" in reader.refused for reader in group.readers
        )
    )
    assert group.versions == {1} and holds(group, first)
    tensors = trainer.publish(3)
    until(lambda: group.versions == {3}, group)
    assert holds(group, tensors)
