"""The part of bench.chaos that kills schedulers: one run with a standby, and one whose scheduler
nobody replaces.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from bench.chaos.figures import Ended, faults_of
from bench.chaos.program import (
    END_S,
    START_S,
    Failed,
    Program,
    judged,
    left_behind,
    started,
    steps_made,
)
from bench.report import Figure, Report

WINDOW_S = 5.0
"""Before and after a kill, in which steps are counted."""
SETTLED_S = 3 * WINDOW_S
"""Between two kills at least."""
ENDLESS = "1000000"
GONE_S = 60.0 + 120.0 + 30.0
"""The limits after which workers that are alone have ended, and some seconds."""


def kill_schedulers(
    options: argparse.Namespace, runs: Path, report: Report, flags: Sequence[str]
) -> bool:
    """Both runs; whether both are clean, every scheduler was replaced, and no process was left."""
    flags = [*flags, "--eval-every", ENDLESS, "--steps", ENDLESS]
    at = _replaced(runs / "standby", flags, options.scheduler_kills)
    folder = runs / "standby" / "latest"
    faults = [fault for fault in faults_of(folder) if fault["worker"] == "scheduler"]
    other_faults = len(faults_of(folder)) - len(faults)
    times = Ended.read(folder).step_times
    paces = [paces_around(times, moment, WINDOW_S) for moment in at]
    for (before, after), fault in zip(paces, faults, strict=False):
        report.add(
            case="scheduler kills",
            system="standby",
            without_s=fault["noticed_s"],
            taken_up_s=fault["recovered_s"],
            steps_before=before,
            steps_after=after,
            dip=1 - after / before if before else None,
        )
    clean, summary = judged(runs / "standby")
    dips = [1 - after / before for before, after in paces if before]
    report.add(
        case="schedulers",
        system="standby",
        clean="yes" if clean else "NO",
        kills=len(at),
        replaced=len(faults),
        others_restarted=other_faults,
        dip=statistics.median(dips) if dips else None,
        steps=len(times),
        left_behind=len(left_behind(runs / "standby")),
    )
    print(f"standby: {summary}", flush=True)
    return _alone(runs / "alone", flags, report) and clean and len(faults) == len(at)


def paces_around(times: Sequence[float], moment: float, window_s: float) -> tuple[int, int]:
    """Steps in the window before a moment, and in the one after it; times: of the steps, in
    order.
    """
    before = sum(moment - window_s <= time < moment for time in times)
    return before, sum(moment <= time < moment + window_s for time in times)


def _replaced(runs: Path, flags: Sequence[str], kills: int) -> list[float]:
    """Kill the scheduler of a run again and again; the moments, in seconds since 1970."""
    at: list[float] = []
    program = started(runs, *flags, "--standby")
    try:
        program.until(lambda: steps_made(runs) > 0, START_S, "the first step")
        for _ in range(kills):
            time.sleep(SETTLED_S)
            before, scheduler = steps_made(runs), _scheduler(runs)
            at.append(time.time())
            os.kill(scheduler, signal.SIGKILL)
            _wait(partial(_is_replaced, runs, deaths=len(at), steps=before), "the next scheduler")
        time.sleep(SETTLED_S)
        os.kill(_scheduler(runs), signal.SIGINT)
        _wait(lambda: not left_behind(runs), "the end of the run")
    finally:
        _end(program, runs)
    return at


def _alone(runs: Path, flags: Sequence[str], report: Report) -> bool:
    """Kill the scheduler of a run that nobody goes on with; whether all is in order afterwards."""
    program = started(runs, *flags)
    try:
        program.until(lambda: steps_made(runs) > 2, START_S, "the first steps")
        before, killed = steps_made(runs), time.monotonic()
        os.kill(_scheduler(runs), signal.SIGKILL)
        with contextlib.suppress(Failed):
            _wait(lambda: not left_behind(runs), "the end of the workers", GONE_S)
        gone_s = time.monotonic() - killed
    finally:
        _end(program, runs)
    clean, summary = judged(runs)
    orphans = len(left_behind(runs))
    figures: dict[str, Figure] = {
        "clean": "yes" if clean else "NO",
        "gone_s": gone_s,
        "steps": steps_made(runs),
        "steps_alone": steps_made(runs) - before,
        "left_behind": orphans,
    }
    report.add(case="schedulers", system="alone", **figures)
    print(f"alone: {summary}", flush=True)
    return clean and not orphans


def _scheduler(runs: Path) -> int:
    """The process that runs the newest run below `runs`."""
    return int((runs / "latest" / "lock").read_text().partition(" ")[0])


def _is_replaced(runs: Path, *, deaths: int, steps: int) -> bool:
    """Whether the run knows of so many deaths and has made more steps since the last."""
    return len(faults_of(runs / "latest")) >= deaths and steps_made(runs) > steps


def _wait(holds: Callable[[], bool], goal: str, within_s: float = END_S) -> None:
    deadline = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > deadline:
            raise Failed(f"{goal} did not come within {within_s:.0f} s")
        time.sleep(0.05)


def _end(program: Program, runs: Path) -> None:
    program.kill()
    for pid in left_behind(runs):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
