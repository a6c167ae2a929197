"""Tokens per second of one training step: ours packed, ours without shared prompts, a padded loop,
TRL.

    python -m bench.trainer --json FILE

The same batch for all: groups of 8 rollouts that share a prompt of 100 to 200 tokens, completions
with a heavy tail (median 48 tokens, 99th percentile 480) or of 128 tokens each. A step is forward,
backward, clip and update; nothing is generated. What exactly is timed of each system: see
bench.trainer.systems. All are open at once in one process, with the same number of threads, and
take turns.

Figures: tokens_per_s, trained tokens over the median seconds of a step; over_padded and over_trl,
the median over the turns of their seconds in that turn over the system's; spread, the slowest turn
minus the fastest over the median; computed, positions that go through the model in a step;
gradient_gap, the distance between the directions of the first step's gradient and the first
system's: all make the same step. Then the head of the model at a large vocabulary: see
bench.trainer.head. What does not fit into --minutes is skipped and says so. Run it on an idle
machine.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from bench.generator.cases import SIZES, make_policy, percentile
from bench.report import Figure, Report
from bench.trainer.batches import CASES, make_rollouts

SYSTEMS = ("packed", "unshared", "padded", "trl")
INSTALL = "install it with pip install 'dataflow-rl[bench]'"
HEAD_S = 90.0
"""SamplingMask for the head."""
WIDTH = 160
"""Columns of the table, where the output is no terminal that says more."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the bench; the exit status is 1 when a system failed."""
    options = parser().parse_args(arguments)
    import torch

    torch.set_num_threads(options.threads)
    until = time.monotonic() + 60 * options.minutes
    report, failed = Report("trainer", options.json), False
    steps = [case for case in options.cases if case in CASES]
    with tempfile.TemporaryDirectory() as folder:
        policy = make_policy(Path(folder) / "policy", options.model)
        for index, case in enumerate(steps):
            remaining_s = until - time.monotonic() - HEAD_S * ("head" in options.cases)
            failed |= run_case(case, policy, options, report, remaining_s / (len(steps) - index))
    if "head" in options.cases:
        _head(report, options.threads, until - time.monotonic())
    report.show(Console(width=max(WIDTH, Console().width)))
    return int(failed)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.trainer",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, help="file for the JSON lines")
    parser.add_argument(
        "--minutes", type=float, default=6.0, help="for everything together (default 6)"
    )
    parser.add_argument("--repeats", type=int, default=5, help="turns of every system (default 5)")
    parser.add_argument(
        "--cases",
        nargs="+",
        choices=(*CASES, "head"),
        default=[*CASES, "head"],
        help="default: all",
    )
    parser.add_argument(
        "--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), help="default: all"
    )
    parser.add_argument(
        "--model",
        choices=tuple(SIZES),
        default="small",
        help="1.1 or 20 million parameters, or tiny",
    )
    parser.add_argument("--groups", type=int, default=8, help="of 8 rollouts in a step (default 8)")
    parser.add_argument(
        "--rows", type=int, default=8, help="rollouts of a padded forward and backward (default 8)"
    )
    parser.add_argument("--threads", type=int, default=2, help="of every system (default 2)")
    return parser


def run_case(
    case: str, policy: Path, options: argparse.Namespace, report: Report, seconds: float
) -> bool:
    """A row for each system. True when one failed."""
    from bench.trainer.systems import OPEN, Setting, System, gradient

    until = time.monotonic() + seconds
    rollouts = make_rollouts(case, options.groups, options.model)
    setting = Setting(policy=policy, rollouts=rollouts, rows=options.rows)
    opened: dict[str, System] = {}
    without: dict[str, dict[str, Figure]] = {}
    gaps: dict[str, float] = {}
    first = None
    for name in options.systems:
        if time.monotonic() > until:
            without[name] = {"skipped": "no time is left"}
        elif name == "trl" and not has_trl():
            without[name] = {"skipped": INSTALL}
        else:
            try:
                system = OPEN[name](setting)
                system.step()
                flat = gradient(system)
                first = flat if first is None else first
                gaps[name], opened[name] = float((flat - first).norm()), system
            except Exception as error:
                without[name] = {"failed": f"{type(error).__name__}: {str(error)[:200]}"}
    turns: dict[str, list[float]] = {name: [] for name in opened}
    for turn in range(options.repeats):
        if turn and time.monotonic() > until:
            break
        for name, system in opened.items():
            began = time.perf_counter()
            system.step()
            turns[name].append(time.perf_counter() - began)
    lengths = list(map(len, rollouts.completions))
    batch: dict[str, Figure] = {
        "tokens": rollouts.tokens,
        "p50": percentile(lengths, 50),
        "p99": percentile(lengths, 99),
        "model": options.model,
        "threads": options.threads,
    }
    for name in options.systems:
        if name in without:
            report.add(case=case, system=name, **without[name])
        else:
            more: dict[str, Figure] = {
                "computed": opened[name].computed,
                "gradient_gap": gaps[name],
            }
            report.add(
                case=case, system=name, **figures(name, turns, rollouts.tokens), **more, **batch
            )
    return any("failed" in line for line in without.values())


def figures(name: str, turns: Mapping[str, Sequence[float]], tokens: int) -> dict[str, Figure]:
    """The figures of a row from every system's seconds, turn by turn."""
    mine = turns[name]
    middle = statistics.median(mine)
    row: dict[str, Figure] = {"tokens_per_s": tokens / middle, "seconds": middle}
    for rival in ("padded", "trl"):
        theirs = turns.get(rival)
        if theirs:
            row[f"over_{rival}"] = statistics.median(
                them / us for us, them in zip(mine, theirs, strict=True)
            )
    return row | {"spread": (max(mine) - min(mine)) / middle, "turns": len(mine)}


def _head(report: Report, threads: int, seconds: float) -> None:
    from bench.trainer.head import CASES as HEADS
    from bench.trainer.head import measure_head

    if seconds < HEAD_S / 2:
        report.add(case="head", system="all", skipped="too little time is left")
    else:
        measure_head(report, HEADS[:1], threads=threads)


def has_trl() -> bool:
    """Whether TRL and what it needs are installed."""
    return all(importlib.util.find_spec(name) for name in ("trl", "datasets", "accelerate"))


if __name__ == "__main__":
    raise SystemExit(main())
