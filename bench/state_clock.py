"""What the clock of each node's time costs a run: python -m bench.state_clock --json FILE --minutes 3.

The sorting demo on real processes, without end. The time is cut into windows, in rounds of two in an order drawn by
lot: with the clock, and without it, when each node's loop goes round as it would if nobody counted busy, blocked,
waiting and starved seconds. Signals switch it in all workers.

steps_per_s of a window: steps over the seconds from its first to its last, as metrics.jsonl has them. ratio: those with
the clock over those without it in the same round; the median over all rounds, and an interval that holds the mean with
95% (Student's t, on logarithms). counted: share of a window in which the trainer was at work, by its clock: 0 without
it. FILE keeps all windows: a further call goes on with it, so that the measurement can be made in short pieces, each
with the machine for itself.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.report import Report
from bench.windows import carried, carry, interval, steps_since
from dataflow.folder.run_folder import RunFolder
from dataflow.scheduler.requests import ask_for_facts
from dataflow.worker.loop import NodeLoop

CASES = {"with the clock": signal.SIGRTMIN + 4, "without": signal.SIGRTMIN + 5}
"""The signal that says so to a worker."""
SETTLE_S = 0.7
"""After each change, which belongs to no window."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure for a while, and tell what all windows say."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.state_clock", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="file of all windows, which further calls go on with")
    parser.add_argument("--minutes", type=float, default=3.0, help="to measure now; 0: tell only (default 3)")
    parser.add_argument("--window", type=float, default=6.0, help="seconds of one (default 6)")
    parser.add_argument("--policy", type=Path, help="folder of the policy, to be made once")
    parser.add_argument("--carry", type=Path, help="internal: be the run, in this folder")
    options = parser.parse_args(arguments)
    if options.carry is not None:
        let_switch()
        carry(options.carry, options.policy)
        return 0
    known = options.json is not None and options.json.is_file()
    windows: list[dict[str, Any]] = json.loads(options.json.read_text()) if known else []
    if options.minutes > 0:
        with carried("bench.state_clock", options.policy) as metrics:
            rounds = 1 + max((window["round"] for window in windows), default=-1)
            over = time.monotonic() + options.minutes * 60 - len(CASES) * (options.window + SETTLE_S)
            while time.monotonic() < over:
                for case in random.Random(rounds).sample(list(CASES), len(CASES)):
                    windows.append({"round": rounds, "case": case, **measured(case, options.window, metrics)})
                rounds += 1
                if options.json is not None:
                    options.json.write_text(json.dumps(windows, indent=0))
    tell(windows)
    return 0


def let_switch() -> None:
    """Let all processes that this one forks take the clock away from their loops, and give it back, when told to."""
    clocked = NodeLoop.turn

    def unclocked(loop: NodeLoop) -> bool:
        began = loop._clock()
        if moved := loop._turn():
            loop._span(loop.node, began, loop._clock())
        return moved

    for number, turn in zip(CASES.values(), (clocked, unclocked), strict=True):
        signal.signal(number, lambda *_, turn=turn: setattr(NodeLoop, "turn", turn))


def measured(case: str, seconds: float, metrics: Path) -> dict[str, Any]:
    """One window."""
    folder = RunFolder.open(metrics.parent.resolve())
    for worker in ask_for_facts(folder)["workers"].values():
        os.kill(int(worker["pid"]), CASES[case])
    time.sleep(SETTLE_S)
    counted, size, began = _counted(folder), metrics.stat().st_size, time.monotonic()
    time.sleep(seconds)
    passed = time.monotonic() - began
    rate, steps = steps_since(metrics, size)
    return {"steps_per_s": rate, "steps": steps, "counted": (_counted(folder) - counted) / passed}


def _counted(folder: RunFolder) -> float:
    """Seconds at work that the trainer's clock has counted."""
    workers = ask_for_facts(folder)["workers"].values()
    told = [worker["heartbeat"]["nodes"]["trainer"] for worker in workers if "trainer" in worker["nodes"]]
    return sum(float(node["seconds"]["busy"]) for node in told)


def tell(windows: Sequence[Mapping[str, Any]]) -> None:
    """A table over all rounds."""
    report = Report("state_clock")
    by_round: dict[int, dict[str, Mapping[str, Any]]] = {}
    for window in windows:
        by_round.setdefault(window["round"], {})[window["case"]] = window
    whole = [each for each in by_round.values() if len(each) == len(CASES)]
    first, second = CASES
    ratios = [each[first]["steps_per_s"] / each[second]["steps_per_s"] for each in whole]
    for case in CASES if whole else ():
        found = interval([math.log(ratio) for ratio in ratios])
        report.add(
            case=f"sorting, {len(whole)} rounds, {os.cpu_count()} cores", system=case,
            steps_per_s=statistics.median(each[case]["steps_per_s"] for each in whole),
            counted=statistics.fmean(each[case]["counted"] for each in whole),
            ratio=round(statistics.median(ratios), 4) if case == first else None,
            interval_95=f"{math.exp(found[1]):.4f} to {math.exp(found[2]):.4f}" if case == first else None,
        )  # fmt: skip
    report.show(Console(width=max(120, Console().width)))


if __name__ == "__main__":
    sys.exit(main())
