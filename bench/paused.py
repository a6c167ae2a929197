"""What a run does whose trainer stands still: memory of every process, depth of every queue, and
the pace afterwards.

    python -m bench.paused --seconds 120 --json FILE

The sorting task on real processes, with limits that let a trainer be silent for so long. After
--warm seconds of steps the trainer gets SIGSTOP, and after --seconds SIGCONT; once a second the
memory of every process of the run is read from outside, and every ten seconds the scheduler is
asked for its queues, the ledger for its groups.

memory: MiB of each process, resident (rss), and of these what is of no file (own), ten seconds into
the pause and at its end, each the median of three readings, and the change in percent. queues: rows
that came and are not acknowledged, at these moments and at most, against what the edge holds; of
its own edge the trainer told before the pause. groups: in flight by state, as the ledger has them,
when the pause began, and then the same; begun are those that a generator has seen, which staleness
bounds. pace: steps per second in windows of ten seconds before and after the pause, and their share
of the median before it. Exit status 1 when `dataflow verify` does not say clean, or a worker was
taken for dead.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from rich.console import Console

from bench.chaos.figures import Ended, faults_of
from bench.chaos.nemesis import everyone, workers
from bench.chaos.program import START_S, Failed, Program, judged, left_behind, steps_made
from bench.report import Figure, Report
from dataflow.errors import DataflowError
from dataflow.folder.ledger import Ledger
from dataflow.folder.run_folder import RunFolder
from dataflow.limits import Limits
from dataflow.runner import run
from dataflow.scheduler.requests import ask_for_facts
from dataflow.staleness import capacity

WINDOW_S = 10.0
WINDOWS = 3
READINGS = 3
"""That a figure of memory is the median of."""
LATE = 60.0
"""Seconds of silence beyond the pause after which a worker counts as hanging."""
ENDLESS = 1_000_000
TRAINER, LANE = "trainer", "prompts"
MIB = 2**20


@dataclass(frozen=True)
class Memory:
    """Of one process, bytes."""

    rss: int
    """Resident, with the files that it has mapped."""
    own: int
    """Resident and of no file: what other processes do does not change it."""


@dataclass
class Seen:
    """What was read during the pause, in order."""

    memory: list[Mapping[str, Memory]] = field(default_factory=list)
    """By process."""
    queues: list[Mapping[str, tuple[int, int]]] = field(default_factory=list)
    """By edge: depth and capacity, rows."""
    groups: list[Mapping[str, int]] = field(default_factory=list)
    """In flight, by state."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the bench; the exit status is 1 when the run is not clean."""
    options = parser().parse_args(arguments)
    if options.carry is not None:
        carry(options)
        return 0
    report = Report("paused", options.json)
    with tempfile.TemporaryDirectory() as temporary:
        try:
            good = disturb(options, Path(temporary), report)
        except Failed as failure:
            print(failure, flush=True)
            good = False
    report.show(Console(width=max(120, Console().width)))
    return int(not good)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.paused",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--seconds", type=float, default=120.0, help="that the trainer stands still (default 120)"
    )
    parser.add_argument(
        "--warm", type=float, default=45.0, help="of steps before that (default 45)"
    )
    parser.add_argument(
        "--settle",
        type=float,
        default=10.0,
        help="until the first reading that counts (default 10)",
    )
    parser.add_argument(
        "--max-staleness",
        type=int,
        default=4,
        help="versions that rollouts may be behind (default 4)",
    )
    parser.add_argument(
        "--policy", type=Path, default=Path("policies/sorting"), help="folder of the policy"
    )
    parser.add_argument("--json", type=Path, help="file for the JSON lines")
    parser.add_argument("--carry", type=Path, help="internal: be the run, in this folder")
    return parser


def carry(options: argparse.Namespace) -> None:
    """The run itself, in a process of its own, until it is told to end."""
    from graphs.sorting import build

    patience_s = options.seconds + LATE
    limits = Limits(
        hang_s=patience_s,
        stopped_s=patience_s,
        stuck_s=600 + patience_s,
        asleep_s=120 + patience_s,
        stall_s=300 + patience_s,
        slice_s=1800 + patience_s,
    )
    graph = build(
        policy=str(options.policy), max_staleness=options.max_staleness, eval_every=ENDLESS
    )
    run(graph, steps=ENDLESS, runs=options.carry, quiet=True, limits=limits)


def disturb(options: argparse.Namespace, runs: Path, report: Report) -> bool:
    """Run, pause, go on and end; whether the run was clean and nobody was taken for dead."""
    flags = [
        "--seconds",
        str(options.seconds),
        "--policy",
        str(options.policy.absolute()),
        "--max-staleness",
        str(options.max_staleness),
    ]
    command = [sys.executable, "-m", "bench.paused", "--carry", str(runs), *flags]
    program = Program(command, runs / "said")
    try:
        program.until(lambda: steps_made(runs) > 0, START_S, "the first step")
        _pass(program, max(options.warm, WINDOWS * WINDOW_S + 1))
        watched, began, ended = paused(program, runs, options.seconds)
        _pass(program, WINDOWS * WINDOW_S + 1)
        program.end()
    finally:
        program.kill()
    settled = min(int(options.settle), len(watched.memory) // 3)
    for row in memory_rows(watched.memory, settled):
        report.add(case="memory", system=str(row.pop("process")), **row)
    for row in queue_rows(watched.queues):
        report.add(case="queues", system=str(row.pop("edge")), **row)
    for row in group_rows(watched.groups, begun_at_most(runs / "latest", options.max_staleness)):
        report.add(case="groups", system=str(row.pop("state")), **row)
    for row in pace_rows(Ended.read(runs / "latest").step_times, began, ended):
        report.add(case="pace", system=str(row.pop("window")), **row)
    clean, summary = judged(runs)
    faults = len(faults_of(runs / "latest"))
    print(summary, flush=True)
    report.add(
        case="verdict",
        system="run",
        clean="yes" if clean else "NO",
        faults=faults,
        left_behind=len(left_behind(runs)),
        paused_s=ended - began,
    )
    return clean and not faults


def paused(program: Program, runs: Path, seconds: float) -> tuple[Seen, float, float]:
    """Stop the trainer for so long; what was seen meanwhile, and when it was stopped and woken,
    seconds since 1970.
    """
    folder, watched = RunFolder.open(runs / "latest"), Seen()
    trainer = workers(program.pid)[f"{TRAINER}-0"]
    trainer.suspend()
    began, due = time.time(), time.monotonic()
    over = due + seconds
    try:
        while due < over:
            if not len(watched.memory) % int(WINDOW_S):
                _ask(folder, watched)
            watched.memory.append(memory_of(program.pid))
            due = min(due + 1.0, over)
            _pass(program, due - time.monotonic())
        _ask(folder, watched)
    finally:
        trainer.resume()
    return watched, began, time.time()


def memory_of(scheduler: int) -> dict[str, Memory]:
    """Of every process of a run, by name."""
    named = {process.pid: name for name, process in workers(scheduler).items()}
    by_name: dict[str, Memory] = {}
    for process in everyone(scheduler):
        with contextlib.suppress(psutil.Error):
            name = named.get(process.pid) or _name(process, scheduler, named)
            usage = process.memory_info()
            by_name[name] = Memory(usage.rss, usage.rss - usage.shared)
    return by_name


def memory_rows(readings: Sequence[Mapping[str, Memory]], settled: int) -> list[dict[str, Figure]]:
    """A row for each process that was there from `settled` on to the end."""
    first, last = readings[settled : settled + READINGS], readings[-READINGS:]
    rows: list[dict[str, Figure]] = []
    for name in sorted(set.intersection(*(set(reading) for reading in (*first, *last)))):
        row: dict[str, Figure] = {"process": name}
        for kind in ("rss", "own"):
            start, end = (
                statistics.median(getattr(reading[name], kind) for reading in part)
                for part in (first, last)
            )
            row |= {
                f"{kind}_start": start / MIB,
                f"{kind}_end": end / MIB,
                f"{kind}_percent": percent(start, end),
            }
        rows.append(row)
    return rows


def queue_rows(readings: Sequence[Mapping[str, tuple[int, int]]]) -> list[dict[str, Figure]]:
    """A row for each edge: its depth 10 s into the pause, at the end and at most, and what it
    holds.
    """
    rows: list[dict[str, Figure]] = []
    for name in sorted({edge for reading in readings for edge in reading}):
        depths = [reading[name][0] for reading in readings if name in reading]
        bound = next(reading[name][1] for reading in readings if name in reading)
        start = depths[min(1, len(depths) - 1)]
        rows.append(
            {
                "edge": name,
                "start": start,
                "end": depths[-1],
                "most": max(depths),
                "bound": bound,
                "within": "yes" if max(depths) <= bound else "NO",
            }
        )
    return rows


def group_rows(readings: Sequence[Mapping[str, int]], bound: int) -> list[dict[str, Figure]]:
    """A row for each state in which groups were in flight, and one for those that were begun, with
    their bound.
    """
    rows: list[dict[str, Figure]] = []
    totals = [
        {**reading, "begun": sum(count for state, count in reading.items() if state != "issued")}
        for reading in readings
    ]
    for state in sorted({state for reading in totals for state in reading}):
        counts = [reading.get(state, 0) for reading in totals]
        start = counts[min(1, len(counts) - 1)]
        row: dict[str, Figure] = {
            "state": state,
            "at_once": counts[0],
            "start": start,
            "end": counts[-1],
            "most": max(counts),
        }
        if state == "begun":
            row |= {"bound": bound, "within": "yes" if max(counts) <= bound else "NO"}
        rows.append(row)
    return rows


def begun_at_most(folder: Path, max_staleness: int) -> int:
    """Groups that a generator may have begun and no step has trained, by the size of the last
    step.
    """
    with Ledger.open(folder / "ledger.db", readonly=True) as ledger:
        return capacity(len(ledger.steps(TRAINER)[-1].trained), max_staleness)


def pace_rows(times: Sequence[float], began: float, ended: float) -> list[dict[str, Figure]]:
    """A row for each window before `began` and after `ended`; times of the steps, seconds since
    1970.
    """
    before = [
        (f"{at * WINDOW_S:.0f} s before", began - at * WINDOW_S) for at in range(WINDOWS, 0, -1)
    ]
    after = [(f"{at * WINDOW_S:.0f} s after", ended + at * WINDOW_S) for at in range(WINDOWS)]
    rates = {
        name: sum(start <= at < start + WINDOW_S for at in times) / WINDOW_S
        for name, start in before + after
    }
    usual = statistics.median(rates[name] for name, _ in before)
    return [
        {"window": name, "steps_per_s": rate, "share": rate / usual if usual else None}
        for name, rate in rates.items()
    ]


def percent(start: float, end: float) -> float:
    """How much more the end is than the start."""
    return 100.0 * (end / start - 1.0) if start else 0.0


def _ask(folder: RunFolder, watched: Seen) -> None:
    """Read queues and groups once, if the run answers."""
    with contextlib.suppress(DataflowError):
        heartbeats = [worker["heartbeat"] for worker in ask_for_facts(folder)["workers"].values()]
        edges = {
            name: depth
            for heartbeat in heartbeats
            for name, depth in heartbeat.get("edges", {}).items()
        }
        watched.queues.append(
            {name: (int(depth), int(capacity)) for name, (depth, capacity) in edges.items()}
        )
        with Ledger.open(folder.ledger, readonly=True) as ledger:
            counts: dict[str, int] = {}
            for group in ledger.in_flight(LANE, TRAINER):
                counts[group.state] = counts.get(group.state, 0) + 1
        watched.groups.append(counts)


def _name(process: psutil.Process, scheduler: int, named: Mapping[int, str]) -> str:
    """Of a process that is no worker."""
    if process.pid == scheduler:
        return "scheduler"
    if above := named.get(process.ppid()):
        return f"{above}/{process.pid}"
    begets = any(child.pid in named for child in process.children())
    return "forkserver" if begets else f"helper/{process.pid}"


def _pass(program: Program, seconds: float) -> None:
    """Let time go by. Errors: Failed when the program ends."""
    over = time.monotonic() + seconds
    program.until(lambda: time.monotonic() >= over, seconds + START_S, "the time to pass")


if __name__ == "__main__":
    raise SystemExit(main())
