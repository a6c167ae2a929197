"""The ranks whose processes `bench.weight_plane.ranks` measures: of a trainer, of a reader, and of
the floors.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from multiprocessing.connection import Connection
from typing import Protocol

import torch
import torch.distributed as dist

from transport.data import keep_freed_memory
from transport.weights import Layout, Mesh, ShardedReader, ShardedWriter, reshard

PATIENCE_S = 120.0
COLUMNS = 1024
FLOAT_ONE = 0x3F800000
"""1.0 in float32, as an integer."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One system on one case."""

    system: str
    sources: int
    readers: int
    mib: int
    folder: str

    @property
    def shapes(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """About 16 MiB of float32 each, at least four."""
        count = max(4, self.mib // 16)
        rows = (self.mib << 20) // (4 * count * COLUMNS)
        return {f"layers.{number}.weight": ((rows, COLUMNS), "float32") for number in range(count)}

    @property
    def source(self) -> Layout:
        """Of the trainer."""
        return Layout.fsdp(self.shapes, self.sources)

    @property
    def target(self) -> Layout:
        """Of the readers."""
        return Layout.cut(
            self.shapes, Mesh.of(self.readers), lambda name: (int(name.split(".")[1]) % 2,)
        )

    @property
    def pair_bytes(self) -> list[list[int]]:
        """From each rank to each rank."""
        nbytes: list[list[int]] = reshard(self.source, self.target).pair_bytes.tolist()
        return nbytes


class Rank(Protocol):
    """One process of a system."""

    def prepare(self, version: int) -> None:
        """What comes before the time."""

    def move(self, version: int) -> float:
        """What is timed; how long it held the loop (ms)."""

    def check(self, version: int) -> bool:
        """Whether this rank holds the version's bytes."""

    def close(self) -> None:
        """Leave."""


class Source:
    """A trainer's rank."""

    def __init__(self, job: Job, rank: int) -> None:
        backend = "gloo" if job.system == "gloo" else "shared_memory"
        self._layout, self._rank = job.source, rank
        self._tensors = {
            name: torch.empty(shape) for name, (shape, _) in job.source.local(rank).items()
        }
        self._writer = ShardedWriter(
            job.source,
            rank,
            _address(job),
            backend=backend,  # type: ignore[arg-type]
            hold="snapshot" if job.system == "snapshot" else "until_settle",
        )

    def prepare(self, version: int) -> None:
        """See Rank."""
        self._writer.settle(PATIENCE_S)
        fill(self._layout, self._rank, self._tensors, version)

    def move(self, version: int) -> float:
        """See Rank."""
        began = time.monotonic_ns()
        while not self._writer.publish(version, self._tensors):
            self._writer.poll()
        return (time.monotonic_ns() - began) / 1e6

    def check(self, version: int) -> bool:
        """See Rank."""
        return True

    def close(self) -> None:
        """See Rank."""
        self._writer.close()


class Reader:
    """A reader's rank."""

    def __init__(self, job: Job, rank: int) -> None:
        self._layout, self._rank = job.target, rank
        local = job.target.local(rank)
        self._tensors = {
            name: torch.nn.Parameter(torch.zeros(shape)) for name, (shape, _) in local.items()
        }
        self._wanted = {name: torch.empty(shape) for name, (shape, _) in local.items()}
        self._reader = ShardedReader(job.target, rank, _address(job), "readers")
        self._reader.attach(self._tensors)

    def prepare(self, version: int) -> None:
        """Nothing."""

    def move(self, version: int) -> float:
        """See Rank."""
        held_ns = 0
        deadline = time.monotonic() + PATIENCE_S
        while self._reader.version < version:
            assert time.monotonic() < deadline, f"version {version} has not come"
            select.select([self._reader.socket], [], [], 0.5)
            began = time.monotonic_ns()
            if self._reader.poll():
                self._reader.adopt()
            held_ns = max(held_ns, time.monotonic_ns() - began)
        return held_ns / 1e6

    def check(self, version: int) -> bool:
        """See Rank."""
        fill(self._layout, self._rank, self._wanted, version)
        return all(
            torch.equal(self._wanted[name], tensor) for name, tensor in self._tensors.items()
        )

    def close(self) -> None:
        """See Rank."""
        self._reader.close()


class Raw:
    """A rank that sends or receives what goes to and from each peer, in one message each, by
    torch's own gloo.
    """

    def __init__(self, job: Job, rank: int, is_source: bool) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        everybody = job.sources + job.readers
        dist.init_process_group(
            "gloo",
            init_method=f"file://{job.folder}/gloo",
            rank=rank if is_source else job.sources + rank,
            world_size=everybody,
            timeout=timedelta(seconds=PATIENCE_S),
        )
        table = job.pair_bytes
        sizes = table[rank] if is_source else [row[rank] for row in table]
        first = job.sources if is_source else 0
        self._move = dist.isend if is_source else dist.irecv
        self._parts = [
            (first + at, torch.ones(size, dtype=torch.uint8))
            for at, size in enumerate(sizes)
            if size
        ]

    def prepare(self, version: int) -> None:
        """Nothing."""

    def move(self, version: int) -> float:
        """See Rank."""
        for work in [self._move(part, peer) for peer, part in self._parts]:
            assert work is not None
            work.wait()
        return 0.0

    def check(self, version: int) -> bool:
        """See Rank."""
        return True

    def close(self) -> None:
        """See Rank."""
        dist.destroy_process_group()


class Memcpy:
    """A reader that copies what it takes in from memory of its own."""

    def __init__(self, job: Job, rank: int) -> None:
        size = sum(row[rank] for row in job.pair_bytes)
        self._from, self._to = (
            torch.ones(size, dtype=torch.uint8),
            torch.zeros(size, dtype=torch.uint8),
        )

    def prepare(self, version: int) -> None:
        """Nothing."""

    def move(self, version: int) -> float:
        """See Rank."""
        ctypes.memmove(self._to.data_ptr(), self._from.data_ptr(), self._from.numel())
        return 0.0

    def check(self, version: int) -> bool:
        """See Rank."""
        return True

    def close(self) -> None:
        """Nothing."""


def fill(layout: Layout, rank: int, tensors: dict[str, torch.Tensor], version: int) -> None:
    """A rank's part of a version in which neighbours, tensors and versions differ; all numbers are
    finite.
    """
    for number, (name, tensor) in enumerate(layout.tensors.items()):
        shards = tensor.shards
        for row in (shards.ranks == rank).nonzero()[0].tolist():
            box = tuple(
                slice(a, b)
                for a, b in zip(shards.start[row].tolist(), shards.stop[row].tolist(), strict=True)
            )
            first = FLOAT_ONE + number + version
            full = torch.arange(first, first + prod(tensor.shape), dtype=torch.int32).view(
                tensor.shape
            )
            tensors[name].view(torch.int32).copy_(full[box])


def ranks_of(job: Job) -> Iterator[Callable[[], Rank]]:
    """What makes each process's end."""
    if job.system == "memcpy":
        yield from (lambda rank=rank: Memcpy(job, rank) for rank in range(job.readers))
    elif job.system == "alone":
        yield lambda: Memcpy(job, 0)
    elif job.system == "raw_gloo":
        yield from (lambda rank=rank: Raw(job, rank, True) for rank in range(job.sources))
        yield from (lambda rank=rank: Raw(job, rank, False) for rank in range(job.readers))
    else:
        yield from (lambda rank=rank: Source(job, rank) for rank in range(job.sources))
        yield from (lambda rank=rank: Reader(job, rank) for rank in range(job.readers))


def serve(job: Job, number: int, orders: Connection) -> None:
    """One process: prepares, moves and checks versions as it is told, until there is none."""
    torch.set_num_threads(1)
    keep_freed_memory()
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[number % len(cores)]})
    end = list(ranks_of(job))[number]()
    with contextlib.closing(end):
        while (version := orders.recv()) is not None:
            end.prepare(version)
            orders.send("prepared")
            orders.recv()
            began = time.monotonic_ns()
            held_ns = end.move(version)
            orders.send((began, time.monotonic_ns(), held_ns))
            orders.recv()
            orders.send(end.check(version))
    orders.send("closed")


def _address(job: Job) -> str:
    return f"ipc://{job.folder}/{job.system}.sock"
