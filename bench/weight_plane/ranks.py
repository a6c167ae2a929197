"""How long a version takes from several trainer ranks into several reader ranks, beside what the
machine needs for it.

    python -m bench.weight_plane --ranks 1x1 2x1 2x2 4x2

Each rank is a process with one torch thread, on a core that it is given in turn; nobody computes.
The trainer's ranks hold rows (FSDP), the readers' rows of half of the tensors and columns of the
others (tensor parallel). A system and its floors take turns, update by update. Every update has
other bytes, and each reader compares all of its own with them, outside of the time. Figures are
medians, least_ms is the best.

ms              from the first rank's call to publish until the last reader's parameters hold the
                version (median)
held_ms         the longest that a reader's loop was held: one look, or one adoption, in all updates
publish_ms      how long the call to publish held the trainer's ranks (median of the slowest)
memcpy_ms       the floor within a machine: as many processes as readers, each copying at once what
                a reader takes in
alone_ms        what one reader takes in, copied by one process with nobody beside it
raw_gloo_ms     the floor over gloo: the same ranks exchange the same bytes, in one message from
                each to each, all at once (isend, irecv), and nobody sums them
over_floor      ms over memcpy_ms within a machine, over raw_gloo_ms by gloo
least_over      the same of the best update and the floor's best: what the machine's other work has
                disturbed least

shared_memory   ShardedWriter and ShardedReader, written straight from the trainer's tensors
                (hold="until_settle")
snapshot        the same from the trainer's copy, so that it may change them as soon as publish
                returns
gloo            by messages, from the trainer's tensors
"""

from __future__ import annotations

import contextlib
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.multiprocessing
from rich.console import Console

from bench.report import Report
from bench.weight_plane.rank_ends import PATIENCE_S, Job, ranks_of, serve

FLOOR_OF = {"shared_memory": "memcpy", "snapshot": "memcpy", "gloo": "raw_gloo"}
IN_TURNS = (("memcpy", "alone", "shared_memory", "snapshot"), ("raw_gloo", "gloo"))
"""Systems whose updates take turns, floors first."""
FLOORS = ("memcpy", "alone", "raw_gloo")
SYSTEMS = tuple(system for turn in IN_TURNS for system in turn)
GOALS = {"shared_memory": 1.5, "gloo": 1.2}
"""The most times the floor that is aimed at."""
HELD_MS = 5.0
WARM = 4
"""Updates before the counted ones: buffers take turns at both ends."""
LEAST = 5
"""Counted updates, whatever time they take."""


@dataclass
class Found:
    """What the counted updates of one system took (ms)."""

    times: list[float] = field(default_factory=list)
    held: list[float] = field(default_factory=list)
    publish: list[float] = field(default_factory=list)

    @property
    def line(self) -> dict[str, float]:
        """The figures."""
        return {
            "ms": statistics.median(self.times),
            "least_ms": min(self.times),
            "held_ms": max(self.held, default=0.0),
            "publish_ms": statistics.median(self.publish or [0.0]),
        }


class Running:
    """The processes of one system on one case."""

    def __init__(self, job: Job) -> None:
        self.found = Found()
        self._job = job
        self._ends: list[Connection] = []
        self._children: list[Any] = []

    def __enter__(self) -> Running:
        context: Any = torch.multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["bench.weight_plane.rank_ends"])
        for number in range(len(list(ranks_of(self._job)))):
            mine, theirs = context.Pipe()
            self._children.append(
                context.Process(target=serve, args=(self._job, number, theirs), daemon=True)
            )
            self._children[-1].start()
            theirs.close()
            self._ends.append(mine)
        return self

    def update(self, version: int, *, counted: bool) -> None:
        """Move one version. ValueError when a reader holds other bytes than were published."""
        self._all(version)
        answers = self._all("go")
        if not all(self._all("check")):
            raise ValueError(
                f"{self._job.system}: a reader holds other bytes than were published as version"
                f" {version}"
            )
        if not counted:
            return
        self.found.times.append(
            (max(end for _, end, _ in answers) - min(began for began, _, _ in answers)) / 1e6
        )
        if self._job.system not in FLOORS:
            self.found.held.append(max(ms for _, _, ms in answers[self._job.sources :]))
            self.found.publish.append(max(ms for _, _, ms in answers[: self._job.sources]))

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self._all(None)
        finally:
            for child in self._children:
                child.join(5.0 if kind is None else 0.0)
                child.kill()
                child.join()

    def _all(self, order: Any) -> list[Any]:
        """What each process answers."""
        for end in self._ends:
            end.send(order)
        return [_heard(end) for end in self._ends]


def measure(jobs: Sequence[Job], updates: int, seconds: float) -> dict[str, Found]:
    """By system, which take turns; at most so many counted updates of each, and not more seconds
    for each than that.
    """
    with contextlib.ExitStack() as stack:
        running = {job.system: stack.enter_context(Running(job)) for job in jobs}
        began = time.monotonic()
        for version in range(1, WARM + updates + 1):
            for bench in running.values():
                bench.update(version, counted=version > WARM)
            if version == WARM:
                began = time.monotonic()
            if version >= WARM + LEAST and time.monotonic() - began > seconds * len(running):
                break
    return {system: bench.found for system, bench in running.items()}


def main(
    cases: list[str],
    mib: list[int],
    systems: list[str],
    *,
    updates: int,
    seconds: float,
    path: Path | None,
) -> int:
    """Run the cases, show the table; the exit status is 1 when a reader held other bytes."""
    report, table, console = (
        Report("weight_plane_ranks", path),
        Report("weight_plane_ranks"),
        Console(width=150),
    )
    notes = []
    for case in cases:
        sources, readers = (int(number) for number in case.split("x"))
        for size in mib:
            rows: dict[str, dict[str, float]] = {}
            for turns in IN_TURNS:
                with tempfile.TemporaryDirectory(prefix="dataflow-bench-") as folder:
                    jobs = [
                        Job(
                            system=system, sources=sources, readers=readers, mib=size, folder=folder
                        )
                        for system in turns
                        if system in systems
                    ]
                    rows |= {
                        system: line.line
                        for system, line in measure(jobs, updates, seconds).items()
                    }
            floors = {f"{name}_ms": rows[name]["ms"] for name in FLOORS if name in rows}
            for system in [name for name in rows if name not in FLOORS]:
                mine, floor = rows[system], rows.get(FLOOR_OF[system])
                line = mine | floors
                if floor:
                    line |= {
                        "over_floor": mine["ms"] / floor["ms"],
                        "least_over": mine["least_ms"] / floor["least_ms"],
                    }
                report.add(case=case, system=system, mib=size, processor=processor(), **line)
                table.add(case=case, MiB=size, system=system, **line)
                if system in GOALS and floor:
                    notes.append(
                        f"{case}, {size} MiB, {system}: {line['over_floor']:.2f} of its floor (best"
                        f" {line['least_over']:.2f}, goal {GOALS[system]:.1f}); a reader was held"
                        f" {line['held_ms']:.2f} ms (goal {HELD_MS:.0f})"
                    )
    table.show(console)
    console.print(
        f"{processor()}, {os.cpu_count()} cores", *notes, sep="\n", markup=False, highlight=False
    )
    return 0


def processor() -> str:
    """This machine's."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


def _heard(end: Connection) -> Any:
    if not end.poll(PATIENCE_S):
        raise TimeoutError(f"a process has said nothing for {PATIENCE_S:g} s")
    return end.recv()
