"""How long a version takes from several trainer ranks into several reader ranks, beside what the machine needs for it.

    python -m bench.weight_plane --ranks 1x1 2x1 2x2 4x2

Each rank is a process with one torch thread, on a core that it is given in turn; nobody computes. The trainer's ranks
hold rows (FSDP), the readers' rows of half of the tensors and columns of the others (tensor parallel). Every update has
other bytes, and each reader compares all of its own with them, outside of the time. Figures are medians, least_ms is
the best.

ms              from the first rank's call to publish until the last reader's parameters hold the version (median)
held_ms         the longest that a reader's loop was held: one look, or one adoption, in all updates
publish_ms      how long the call to publish held the trainer's ranks (median of the slowest)
memcpy_ms       the floor within a machine: as many processes as readers, each copying at once what a reader takes in
alone_ms        the same by one process with nobody beside it
raw_gloo_ms     the floor over gloo: the same bytes from each rank to each rank, in one message each
over_floor      ms over memcpy_ms within a machine, over raw_gloo_ms by gloo
least_over      the same of the best update and the floor's best: what the machine's other work has disturbed least

shared_memory   ShardedWriter and ShardedReader, written straight from the trainer's tensors (hold="until_settle")
snapshot        the same from the trainer's copy, so that it may change them as soon as publish returns
gloo            by messages, from the trainer's tensors
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import select
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.multiprocessing
from rich.console import Console

from bench.report import Report
from transport.data import keep_freed_memory
from transport.weights import Layout, Mesh, ShardedReader, ShardedWriter, reshard

CASES = ("1x1", "2x1", "2x2", "4x2")
FLOORS = ("memcpy", "alone", "raw_gloo")
SYSTEMS = (*FLOORS, "shared_memory", "snapshot", "gloo")
"""Floors first."""
GOALS = {"shared_memory": 1.5, "gloo": 1.2}
"""The most times the floor that is aimed at."""
HELD_MS = 5.0
PATIENCE_S = 120.0
WARM = 4
"""Updates before the counted ones: buffers take turns at both ends."""
LEAST = 5
"""Counted updates, whatever time they take."""
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
        return Layout.cut(self.shapes, Mesh.of(self.readers), lambda name: (int(name.split(".")[1]) % 2,))

    @property
    def pair_bytes(self) -> list[list[int]]:
        """From each rank to each rank."""
        found: list[list[int]] = reshard(self.source, self.target).pair_bytes.tolist()
        return found


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
        self._tensors = {name: torch.empty(shape) for name, (shape, _) in job.source.local(rank).items()}
        self._writer = ShardedWriter(
            job.source, rank, _address(job), backend=backend,  # type: ignore[arg-type]
            hold="snapshot" if job.system == "snapshot" else "until_settle",
        )  # fmt: skip

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
        self._tensors = {name: torch.nn.Parameter(torch.zeros(shape)) for name, (shape, _) in local.items()}
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
        return all(torch.equal(self._wanted[name], tensor) for name, tensor in self._tensors.items())

    def close(self) -> None:
        """See Rank."""
        self._reader.close()


class Raw:
    """A rank that sends or receives what goes to and from each peer, in one message each, by torch's own gloo."""

    def __init__(self, job: Job, rank: int, is_source: bool) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        everybody = job.sources + job.readers
        dist.init_process_group(
            "gloo", init_method=f"file://{job.folder}/gloo", rank=rank if is_source else job.sources + rank,
            world_size=everybody, timeout=timedelta(seconds=PATIENCE_S),
        )  # fmt: skip
        table = job.pair_bytes
        sizes = table[rank] if is_source else [row[rank] for row in table]
        first = job.sources if is_source else 0
        self._move = dist.isend if is_source else dist.irecv
        self._parts = [(first + at, torch.ones(size, dtype=torch.uint8)) for at, size in enumerate(sizes) if size]

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
        self._from, self._to = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)

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
    """A rank's part of a version in which neighbours, tensors and versions differ; all numbers are finite."""
    for number, (name, held) in enumerate(layout.tensors.items()):
        shards = held.shards
        for row in (shards.ranks == rank).nonzero()[0].tolist():
            box = tuple(slice(a, b) for a, b in zip(shards.start[row].tolist(), shards.stop[row].tolist(), strict=True))
            first = FLOAT_ONE + number + version
            full = torch.arange(first, first + prod(held.shape), dtype=torch.int32).view(held.shape)
            tensors[name].view(torch.int32).copy_(full[box])


def ranks_of(job: Job) -> Iterator[Callable[[], Rank]]:
    """What makes each process's end."""
    if job.system == "memcpy":
        yield from (lambda rank=rank: Memcpy(job, rank) for rank in range(job.readers))  # type: ignore[misc]
    elif job.system == "alone":
        yield lambda: Memcpy(job, 0)
    elif job.system == "raw_gloo":
        yield from (lambda rank=rank: Raw(job, rank, True) for rank in range(job.sources))  # type: ignore[misc]
        yield from (lambda rank=rank: Raw(job, rank, False) for rank in range(job.readers))  # type: ignore[misc]
    else:
        yield from (lambda rank=rank: Source(job, rank) for rank in range(job.sources))  # type: ignore[misc]
        yield from (lambda rank=rank: Reader(job, rank) for rank in range(job.readers))  # type: ignore[misc]


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
            held = end.move(version)
            orders.send((began, time.monotonic_ns(), held))
            orders.recv()
            orders.send(end.check(version))
    orders.send("closed")


def measure(job: Job, updates: int, seconds: float) -> dict[str, float]:
    """Milliseconds of the median update, and the holds."""
    context: Any = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["bench.weight_plane.ranks"])
    ends, children = [], []
    times, held, publish = [], [0.0], []
    count = len(list(ranks_of(job)))
    is_plane = job.system in ("shared_memory", "snapshot", "gloo")
    try:
        for number in range(count):
            mine, theirs = context.Pipe()
            children.append(context.Process(target=serve, args=(job, number, theirs), daemon=True))
            children[-1].start()
            theirs.close()
            ends.append(mine)
        counting = time.monotonic()
        for version in range(1, WARM + updates + 1):
            _all(ends, version)
            found = _all(ends, "go")
            if not all(_all(ends, "check")):
                raise ValueError(f"{job.system}: a reader holds other bytes than were published as version {version}")
            if version <= WARM:
                counting = time.monotonic()
                continue
            times.append((max(end for _, end, _ in found) - min(began for began, _, _ in found)) / 1e6)
            if is_plane:
                held.append(max(each for _, _, each in found[job.sources :]))
                publish.append(max(each for _, _, each in found[: job.sources]))
            if len(times) >= LEAST and time.monotonic() - counting > seconds:
                break
        for end in ends:
            end.send(None)
        for end in ends:
            _heard(end)
    finally:
        for child in children:
            child.join(5.0)
            child.kill()
            child.join()
    return {
        "ms": statistics.median(times),
        "least_ms": min(times),
        "held_ms": max(held),
        "publish_ms": statistics.median(publish or [0.0]),
    }


def main(
    cases: list[str], mib: list[int], systems: list[str], *, updates: int, seconds: float, path: Path | None
) -> int:
    """Run the cases, show the table; the exit status is 1 when a reader held other bytes."""
    report, table, console = Report("weight_plane_ranks", path), Report("weight_plane_ranks"), Console(width=150)
    notes = []
    for case in cases:
        sources, readers = (int(number) for number in case.split("x"))
        for size in mib:
            found: dict[str, dict[str, float]] = {}
            for system in systems:
                with tempfile.TemporaryDirectory(prefix="dataflow-bench-") as folder:
                    job = Job(system=system, sources=sources, readers=readers, mib=size, folder=folder)
                    found[system] = measure(job, updates, seconds)
            floors = {f"{name}_ms": found[name]["ms"] for name in FLOORS if name in found}
            for system in systems:
                if f"{system}_ms" in floors:
                    continue
                mine, floor = found[system], found.get("raw_gloo" if system == "gloo" else "memcpy")
                line = mine | floors
                if floor:
                    line |= {
                        "over_floor": mine["ms"] / floor["ms"], "least_over": mine["least_ms"] / floor["least_ms"],
                    }  # fmt: skip
                report.add(case=case, system=system, mib=size, processor=processor(), **line)
                table.add(case=case, MiB=size, system=system, **line)
                if system in GOALS and floor:
                    notes.append(
                        f"{case}, {size} MiB, {system}: {line['over_floor']:.2f} of its floor (best "
                        f"{line['least_over']:.2f}, goal {GOALS[system]:.1f}); a reader was held "
                        f"{line['held_ms']:.2f} ms (goal {HELD_MS:.0f})"
                    )
    table.show(console)
    console.print(f"{processor()}, {os.cpu_count()} cores", *notes, sep="\n", markup=False, highlight=False)
    return 0


def processor() -> str:
    """This machine's."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


def _all(ends: list[Connection], order: Any) -> list[Any]:
    """What each process answers."""
    for end in ends:
        end.send(order)
    return [_heard(end) for end in ends]


def _heard(end: Connection) -> Any:
    if not end.poll(PATIENCE_S):
        raise TimeoutError(f"a process has said nothing for {PATIENCE_S:g} s")
    return end.recv()


def _address(job: Job) -> str:
    return f"ipc://{job.folder}/weights.sock"
