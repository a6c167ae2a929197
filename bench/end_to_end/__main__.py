"""How many rollouts per second a whole training loop makes, and how soon it is good: ours, a plain
loop, TRL.

    python -m bench.end_to_end --json FILE

Systems: `plain`, one process as a researcher would write it (`model.generate`, score, one
backward); `sync` and `async`, our graph with max_staleness 0 and 4; `trl`, TRL's GRPOTrainer where
it is installed. Cases: see bench.end_to_end.cases; what is equal and what differs between the
systems: see bench.end_to_end.systems.

Every run has a process of its own; systems take turns, and the table shows the median of the
repeats. plain and trl compute with --threads threads; our plan settles its own. The slow scorer
sleeps 50 ms per rollout, and every system may have 32 calls of it open at once:
`@scorer(concurrency=32)` in ours, a pool of 32 threads in the plain loop and inside TRL's reward
function.

A line of JSON per run: rollouts_per_s and tokens_per_s over the counted steps (those after the
warm-up; of the asynchronous graph also without the last five, for which the generator has nothing
left to do meanwhile); seconds_to_accuracy from the end of the warm-up until the held-out accuracy
is reached, evaluations not counted; efficiency, the share of the time in which what bounds the run
is at work (a slow scorer is, while its calls sleep); startup_s, from the start of the process to
the end of its first step.

Run it on an idle machine: a pool of two spinning threads on two cores that others use falls far
behind.
"""

import argparse
import importlib.util
import json
import os
import sys
import time
from pathlib import Path

from rich.console import Console

from bench.end_to_end.cases import CASES, SYSTEMS, make_case, make_policy
from bench.end_to_end.pace import HEAVY, Measured, figures, medians
from bench.end_to_end.systems import cooldown, run_system
from bench.own_process import figures_of
from bench.report import Figure, Report

RUN_TIMEOUT_S = 900.0
INSTALL = "skipped: install it with pip install 'dataflow-rl[bench]'"
_ALWAYS = ("rollouts_per_s", "efficiency", "tokens_per_s", "startup_s")
SHOWN = {
    "even": (*_ALWAYS, "seconds_to_accuracy", "accuracy_first", "accuracy_last"),
    "tail": (*_ALWAYS, "tokens_p50", "tokens_p99"),
    "slow_scorer": _ALWAYS,
}
"""Figures of a case that stand in the table; the JSON has them all."""
TITLES = {
    "rollouts_per_s": "rollouts/s",
    "tokens_per_s": "tokens/s",
    "startup_s": "start s",
    "seconds_to_accuracy": "s to accuracy",
    "accuracy_first": "first",
    "accuracy_last": "last",
    "tokens_p50": "p50",
    "tokens_p99": "p99",
}


def main() -> int:
    """Run the bench; the exit status is 1 when a run failed."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.end_to_end",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, help="file for the JSON lines")
    parser.add_argument(
        "--repeats", type=int, default=3, help="runs of each system and case (default 3)"
    )
    parser.add_argument(
        "--cases", nargs="+", choices=CASES, default=list(CASES), help="default: all"
    )
    parser.add_argument(
        "--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), help="default: all"
    )
    parser.add_argument("--threads", type=int, default=2, help="of plain and trl (default 2)")
    parser.add_argument(
        "--policies", type=Path, default=Path("policies"), help="folder for the policies"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a smoke test: tiny policies, a few steps"
    )
    parser.add_argument(
        "--child", nargs=4, metavar=("SYSTEM", "CASE", "SEED", "FILE"), help=argparse.SUPPRESS
    )
    options = parser.parse_args()
    if options.child:
        return _be_child(options)
    report = Report("end_to_end", options.json)
    failed = run_all(options, report)
    return int(failed)


def run_all(options: argparse.Namespace, report: Report) -> bool:
    """Every system on every case, in turns; prints the medians. True when a run failed."""
    console, failed = Console(), False
    systems = [name for name in options.systems if name != "trl" or has_trl()]
    for name in options.cases:
        make_policy(make_case(name, options.policies, quick=options.quick), quick=options.quick)
        if systems != options.systems:
            report.add(case=name, system="trl", skipped=INSTALL)
    lines: dict[tuple[str, str], list[dict[str, Figure]]] = {}
    for repeat in range(1 if options.quick else options.repeats):
        for case in options.cases:
            for system in systems:
                figures = measure(system, case, repeat, options)
                if isinstance(figures, str):
                    failed = True
                    report.add(case=case, system=system, repeat=repeat, failed=figures)
                    console.print(
                        f"{case} {system}: {figures}", style="red", markup=False, soft_wrap=True
                    )
                else:
                    report.add(case=case, system=system, repeat=repeat, **figures)
                    lines.setdefault((case, system), []).append(figures)
                    console.print(
                        f"{case} {system}: {figures['rollouts_per_s']:,.0f} rollouts/s",
                        markup=False,
                    )
    _show(lines, options.quick, console)
    return failed


def measure(
    system: str, case: str, repeat: int, options: argparse.Namespace
) -> dict[str, Figure] | str:
    """The figures of one run in a process of its own, or the end of what it said when it failed."""
    flags = ["--threads", str(options.threads), "--policies", str(options.policies.absolute())]
    flags += ["--quick"] if options.quick else []
    answer = figures_of(
        "bench.end_to_end",
        [system, case, str(repeat)],
        flags,
        timeout_s=RUN_TIMEOUT_S,
        environment=environment(system, options.threads),
    )
    if "failed" in answer:
        return str(answer["failed"])
    measured = Measured(**answer)
    facts = make_case(case, options.policies, quick=options.quick)
    return figures(
        measured, warmup=facts.warmup[system], cooldown=cooldown(system), level=facts.level
    )


def environment(system: str, threads: int) -> dict[str, str]:
    """For plain and trl a thread pool of that size; ours settles the threads of each worker by
    itself.
    """
    variables = {
        name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "MKL_"))
    }
    variables |= {
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "BENCH_BORN": repr(time.time()),
    }
    if system in ("plain", "trl"):
        variables |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return variables


def has_trl() -> bool:
    """Whether TRL and what it needs are installed."""
    return all(importlib.util.find_spec(name) for name in ("trl", "datasets", "accelerate"))


def _be_child(options: argparse.Namespace) -> int:
    system, case, seed, out = options.child
    measured = run_system(
        system,
        make_case(case, options.policies, quick=options.quick),
        seed=int(seed),
        threads=options.threads,
        born=float(os.environ["BENCH_BORN"]),
    )
    Path(out).write_text(json.dumps(measured.to_plain()))
    return 0


def _show(
    lines: dict[tuple[str, str], list[dict[str, Figure]]], quick: bool, console: Console
) -> None:
    """A table of medians for each case, with their ratios to the plain loop's."""
    table = Report("end_to_end, median of the repeats")
    for (case, system), repeats in lines.items():
        middle = medians(repeats)
        plain = medians(lines[case, "plain"]) if (case, "plain") in lines else {}
        shown = {
            TITLES.get(name, name): value for name, value in middle.items() if name in SHOWN[case]
        }
        shown["rate / plain"] = _ratio(middle["rollouts_per_s"], plain.get("rollouts_per_s"))
        if case == "even":
            shown["time / plain"] = _ratio(
                middle["seconds_to_accuracy"], plain.get("seconds_to_accuracy")
            )
        table.add(case=case, system=system, **shown)
        p50, p99 = middle["tokens_p50"], middle["tokens_p99"]
        if case == "tail" and not quick and not is_heavy(p50, p99):
            console.print(
                f"tail {system}: median {p50}, 99th percentile {p99}: no heavy tail", style="red"
            )
    table.show(Console(width=max(120, console.width)))


def _ratio(figure: Figure, plain: Figure) -> float | None:
    if isinstance(figure, int | float) and isinstance(plain, int | float) and plain:
        return figure / plain
    return None


def is_heavy(p50: Figure, p99: Figure) -> bool:
    """Whether the 99th percentile is far enough from the median."""
    return isinstance(p50, int | float) and isinstance(p99, int | float) and p99 >= HEAVY * p50


if __name__ == "__main__":
    sys.exit(main())
