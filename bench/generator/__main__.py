"""How many tokens per second the generator makes: ours, transformers' generate and continuous
batching, vLLM.

    python -m bench.generator --json FILE
    python -m bench.generator --updates --json FILE

Groups of 8 rollouts share a prompt of 200 tokens; lengths are even (128 tokens) or have a heavy
tail (99th percentile 10 times the median), are fixed beforehand and the same for every system, and
only their tokens count. A model of random weights is made on the spot. Cases: see
bench.generator.cases; what each system does: see bench.generator.systems; --updates, the cost of
new weights every 50 ms: see bench.generator.updates.

All systems of a row are open at once, warm, have the same number of threads, and take turns;
figures are medians of the repeats, `ratio` is the median of the ratios to hf_generate in the same
turn, `spread` the largest minus the smallest over the median. tokens_per_s counts from the first
start to the last end; `steady` only as long as rollouts were waiting to start. A system that would
need more than --limit-s gets fewer rollouts, and its row says how many.

Run it on an idle machine. vLLM runs where DATAFLOW_VLLM_PYTHON names the interpreter of an
environment that has it.
"""

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from bench.generator.cases import CASES, Load, make_load, make_policy, percentile
from bench.generator.systems import OPEN, SYSTEMS, Made, Setting, System, Unavailable
from bench.report import Figure, Report

BASELINE = "hf_generate"
DEADLINE = 4
"""A run may take so many times the limit before it is given up."""
WIDTH = 180
"""Columns of the table, where the output is no terminal that says more."""


def main() -> int:
    """Run the bench; the exit status is 1 when a system failed."""
    options = parser().parse_args()
    report = Report("generator", options.json)
    with tempfile.TemporaryDirectory() as folder:
        policy = make_policy(Path(folder) / "policy", options.model)
        if options.updates:
            from bench.generator.updates import measure_updates

            for precision in options.precision:
                for in_flight in options.in_flight:
                    measure_updates(policy, in_flight, precision, options, report)
            failed = False
        else:
            failed = run_all(policy, options, report)
    report.show(Console(width=max(WIDTH, Console().width)))
    return int(failed)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.generator",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, help="file for the JSON lines")
    parser.add_argument(
        "--cases", nargs="+", choices=CASES, default=list(CASES), help="default: all"
    )
    parser.add_argument(
        "--in-flight", nargs="+", type=int, default=[64, 256], help="rollouts at once (64 256)"
    )
    parser.add_argument(
        "--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), help="default: all"
    )
    parser.add_argument("--repeats", type=int, default=3, help="turns of every system (default 3)")
    parser.add_argument("--threads", type=int, default=2, help="of every system (default 2)")
    parser.add_argument(
        "--precision", nargs="+", choices=("float32", "bfloat16"), default=["float32"]
    )
    parser.add_argument(
        "--model", choices=("small", "medium"), default="small", help="1.1 or 20 million parameters"
    )
    parser.add_argument(
        "--turnover", type=int, default=8, help="rollouts in all, over those in flight (default 8)"
    )
    parser.add_argument(
        "--limit-s", type=float, default=60.0, help="seconds of a system's turn (default 60)"
    )
    parser.add_argument(
        "--updates", action="store_true", help="measure the cost of weight updates instead"
    )
    parser.add_argument(
        "--engine",
        choices=("native", "vllm"),
        default="native",
        help="whose updates, with --updates",
    )
    return parser


def run_all(policy: Path, options: argparse.Namespace, report: Report) -> bool:
    """Every system on every case, in turns. True when one failed."""
    failed = False
    for precision in options.precision:
        for case in options.cases:
            for in_flight in options.in_flight:
                load = make_load(
                    case,
                    in_flight=in_flight,
                    rollouts=options.turnover * in_flight,
                    size=options.model,
                )
                setting = Setting(
                    folder=policy, in_flight=in_flight, precision=precision, threads=options.threads
                )
                failed |= run_case(case, load, setting, options, report)
    return failed


def run_case(
    case: str, load: Load, setting: Setting, options: argparse.Namespace, report: Report
) -> bool:
    """A row for each system. True when one failed."""
    console = Console()
    opened: dict[str, tuple[System, Load]] = {}
    runs: dict[str, list[Made]] = {}
    without: dict[str, dict[str, Figure]] = {}
    try:
        for name in options.systems:
            try:
                system = OPEN[name](setting)
                opened[name] = system, load
                warm = system.warm(load, DEADLINE * options.limit_s)
                opened[name] = system, affordable(load, warm, options.limit_s)
            except Unavailable as error:
                without[name] = {"skipped": str(error)}
            except Exception as error:
                without[name] = {"failed": f"{type(error).__name__}: {error}"}
        for _ in range(options.repeats):
            for name, (system, own_load) in opened.items():
                if name in without:
                    continue
                try:
                    run = system.run(own_load, DEADLINE * options.limit_s)
                    check(run, own_load)
                    runs.setdefault(name, []).append(run)
                    console.print(
                        f"{case} {setting.in_flight} {name}: {run.tokens_per_s:,.0f} tokens/s",
                        markup=False,
                    )
                except Exception as error:
                    without[name] = {"failed": f"{type(error).__name__}: {error}"}
    finally:
        for system, _ in opened.values():
            system.close()
    common: dict[str, Figure] = {
        "in_flight": setting.in_flight,
        "threads": setting.threads,
        "precision": setting.precision,
        "model": options.model,
    }
    for name in options.systems:
        if name in without:
            report.add(case=case, system=name, **common, **without[name])
            why = ": ".join(str(part) for part in next(iter(without[name].items())))
            console.print(f"{case} {setting.in_flight} {name} {why}", style="red", markup=False)
        else:
            about = opened[name][0].about
            report.add(
                case=case,
                system=name,
                **common,
                **figures(runs[name], runs.get(BASELINE)),
                options=about,
            )
    return any("failed" in line for line in without.values())


def affordable(load: Load, warm: Made, limit_s: float) -> Load:
    """As much of the load as the pace of the warm-up lets one hope for within the limit, in whole
    rounds in flight.
    """
    rollouts = int(limit_s * len(warm.lengths) / warm.seconds)
    if rollouts > load.in_flight:
        rollouts -= rollouts % load.in_flight
    return load.first(rollouts)


def check(run: Made, load: Load) -> None:
    """Raises RuntimeError where rollouts have other lengths than were asked for: the figures would
    mean nothing.
    """
    wrong = [
        i
        for i, (length, expected) in enumerate(zip(run.lengths, load.lengths, strict=True))
        if length != expected
    ]
    if wrong:
        first = wrong[0]
        raise RuntimeError(
            f"{len(wrong)} of {len(load.lengths)} rollouts have other lengths than asked; found"
            f" {run.lengths[first]} tokens for {load.lengths[first]} in rollout {first}; look at"
            " the limits that the system was given"
        )


def figures(runs: Sequence[Made], baseline: Sequence[Made] | None) -> dict[str, Figure]:
    """The figures of a row: medians over the repeats."""
    rates = [run.tokens_per_s for run in runs]
    steady = [run.steady_tokens_per_s for run in runs if run.steady_tokens_per_s is not None]
    lengths = runs[0].lengths
    ratios = [
        mine / reference.tokens_per_s
        for mine, reference in zip(rates, baseline or (), strict=False)
    ]
    return {
        "tokens_per_s": statistics.median(rates),
        "ratio": statistics.median(ratios) if ratios else None,
        "rollouts_per_s": statistics.median(len(run.lengths) / run.seconds for run in runs),
        "seconds": statistics.median(run.seconds for run in runs),
        "steady": statistics.median(steady) if steady else None,
        "spread": (max(rates) - min(rates)) / statistics.median(rates),
        "repeats": len(runs),
        "rollouts": len(lengths),
        "tokens_p50": percentile(lengths, 50),
        "tokens_p99": percentile(lengths, 99),
    }


if __name__ == "__main__":
    raise SystemExit(main())
