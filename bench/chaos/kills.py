"""The part of bench.chaos that kills trainers: whole programs that are resumed, and workers that
are started again.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from bench.chaos.figures import Ended, drawn, equal_losses, kept, trained_twice
from bench.chaos.nemesis import workers
from bench.chaos.program import (
    END_S,
    START_S,
    Program,
    judged,
    left_behind,
    resumed,
    started,
    steps_made,
)
from bench.report import Figure, Report
from dataflow.folder.run_folder import RunFolder

KILLS_A_RUN = 5
WITHIN_S = 2.5
"""After the first new step: a kill falls somewhere in it."""
STARTING_S = 8.0
AT_START = 0.2
"""Share of the kills of a whole tree that fall while it starts."""
ENDLESS = "1000000"


def kill_trainers(options: argparse.Namespace, runs: Path, report: Report) -> bool:
    """All kills, five to a run; whether every run is clean, has trained nothing twice, and repeats
    its losses.
    """
    draw = random.Random(options.seed)
    parts = [
        min(KILLS_A_RUN, options.trainer_kills - done)
        for done in range(0, options.trainer_kills, KILLS_A_RUN)
    ]
    lines: list[dict[str, Any]] = []
    good = True
    for number, kills in enumerate(parts):
        how, staleness = ("tree", "worker")[number % 2], (0, 4)[number // 2 % 2]
        name = f"{how}-{staleness}"
        below = runs / f"{number:02}-{name}"
        flags = _flags(options, staleness)
        at = (_trees if how == "tree" else _workers)(below, flags, kills, draw)
        figures = _figures(below, at)
        if staleness == 0:
            figures |= _compared(below, runs / f"{number:02}-undisturbed", flags)
        lines.append({"system": name, "kills": len(at), **figures})
        report.add(case="kills of a run", **lines[-1])
        print(f"{name}: {figures}", flush=True)
        good &= (
            figures["clean"] == "yes"
            and not figures["trained_twice"]
            and figures.get("same") == figures.get("compared")
        )
    for name in dict.fromkeys(line["system"] for line in lines):
        report.add(
            case="kills", system=name, **summed([line for line in lines if line["system"] == name])
        )
    return good


def summed(lines: Sequence[dict[str, Any]]) -> dict[str, Figure]:
    """All runs of a kind together, and the share of the finished groups that were kept."""
    names = (
        "kills",
        "steps",
        "trained_twice",
        "at_stake",
        "again",
        "dropped",
        "kept",
        "compared",
        "same",
        "left_behind",
    )
    sums: dict[str, Figure] = {name: sum(line.get(name, 0) for line in lines) for name in names}
    at_stake = sum(line["at_stake"] for line in lines)
    sums["share_kept"] = sum(line["kept"] for line in lines) / at_stake if at_stake else None
    return {"runs": len(lines), "clean": sum(line["clean"] == "yes" for line in lines), **sums}


def _trees(runs: Path, flags: Sequence[str], kills: int, draw: random.Random) -> list[float]:
    """Kill all processes of a run at random moments and resume it; the moments."""
    at: list[float] = []
    program = started(runs, *flags)
    try:
        for _ in range(kills):
            if at and draw.random() < AT_START:
                time.sleep(draw.uniform(0, STARTING_S))
            else:
                _under_way(program, runs)
                time.sleep(draw.uniform(0, WITHIN_S))
            at.append(time.time())
            program.kill()
            program = resumed(runs)
        _under_way(program, runs)
        program.end()
    finally:
        program.kill()
    return at


def _workers(runs: Path, flags: Sequence[str], kills: int, draw: random.Random) -> list[float]:
    """Kill the trainer's process of a run at random moments; the moments."""
    at: list[float] = []
    program = started(runs, *flags)
    try:
        for _ in range(kills):
            _under_way(program, runs)
            time.sleep(draw.uniform(0, WITHIN_S))
            with contextlib.suppress(psutil.Error):
                workers(program.pid)["trainer-0"].kill()
            at.append(time.time())
        _under_way(program, runs)
        program.end()
    finally:
        program.kill()
    return at


def _under_way(program: Program, runs: Path) -> None:
    """Wait until it has made one step more."""
    before = steps_made(runs)
    program.until(lambda: steps_made(runs) > before, START_S, f"step {before + 1}")


def _figures(runs: Path, at: Sequence[float]) -> dict[str, Any]:
    folder = runs / "latest"
    clean, summary = judged(runs)
    if not clean:
        print(summary, flush=True)
    ended = Ended.read(folder)
    return {
        "clean": "yes" if clean else "NO",
        "steps": len(ended.step_times),
        "trained_twice": trained_twice(folder),
        **kept(at, drawn(folder), ended.ended),
        "left_behind": len(left_behind(runs)),
    }


def _compared(runs: Path, undisturbed: Path, flags: Sequence[str]) -> dict[str, Any]:
    """The losses beside those of a run that nobody kills, as far as the first one came."""
    steps = steps_made(runs)
    program = started(undisturbed, *flags)
    try:
        program.until(lambda: steps_made(undisturbed) >= steps, START_S + END_S, f"step {steps}")
        program.end()
    finally:
        program.kill()
    mine, its = (RunFolder.open(folder / "latest").read_metrics() for folder in (runs, undisturbed))
    compared, same = equal_losses(mine, its)
    return {"compared": compared, "same": same}


def _flags(options: argparse.Namespace, staleness: int) -> list[str]:
    return [
        "--policy",
        str(options.policies.absolute() / "calculator-tiny"),
        "--tiny",
        "--steps",
        ENDLESS,
        "--max-staleness",
        str(staleness),
        "--eval-every",
        "100",
        "--checkpoint-every",
        "10",
    ]
