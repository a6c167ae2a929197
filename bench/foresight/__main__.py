"""Seconds of published reinforcement-learning steps, predicted by the cost model
(dataflow/foresight).

    python -m bench.foresight --fit rl_steps.csv            # each row left out in turn
    python -m bench.foresight --rows OTHER.csv --json OUT   # rows with the constants that are known
    python -m bench.foresight --own                         # our own runs on this machine (own.py)
    python -m bench.foresight --choice                      # does auto pick the fastest (choice.py)
    python -m bench.foresight --unlike                      # 64 H100 with 64 L40S (unlike.py)
    python -m bench.foresight --search                      # a thousand placements (search.py)
    python -m bench.foresight --generator                   # time per token, on rows of servers

A system has two constants, the shares of data-sheet rates that it reaches (memory and links, matrix
products), and one stated assumption on what it does not publish (bench.foresight.published). With
--fit they are fitted to all rows of a system but one, which is then predicted; beside it stand, on
the same rows, a regression on the number of devices and the mean of the others. With --rows the
constants are those of bench.foresight.constants, which --fit prints; a system that is not among
them gets the mean of those. OUT has a line per row: its columns and predicted_s. With --generator
each device, and each model, is left out of the runs to which seven constants of a server's step are
fitted, and is predicted.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from bench.foresight.choice import choice
from bench.foresight.constants import FITTED
from bench.foresight.fit import Ratio, by_costs, by_devices, by_mean, fitted, left_out, ratios
from bench.foresight.generator import generator
from bench.foresight.own import own
from bench.foresight.published import PRACTICES, Practice, by_system, read_models, seen
from bench.foresight.rows import read_rows, understood
from bench.foresight.search import search
from bench.foresight.unlike import unlike
from bench.report import Report
from dataflow.foresight.rates import ASSUMED, Rates

MODELS = Path(__file__).with_name("models.json")
RATIO_GOAL = 0.15
WAYS = {"costs": by_costs, "regression on devices": by_devices, "mean of the others": by_mean}


def main() -> int:
    """Fit, or predict."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.foresight",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument(
        "--fit", type=Path, help="rows with step_s: fit, leave each out, show how far off"
    )
    task.add_argument("--rows", type=Path, help="rows to predict")
    task.add_argument(
        "--own",
        action="store_true",
        help="foresee and make runs of our own on this machine's cores",
    )
    task.add_argument(
        "--choice",
        action="store_true",
        help="run every placement of ten graphs, and see what auto picks",
    )
    task.add_argument(
        "--generator",
        action="store_true",
        help="runs of servers that aiconfigurator-core has measured",
    )
    task.add_argument(
        "--search", action="store_true", help="how long a search takes, on 1,024 H100"
    )
    task.add_argument(
        "--unlike",
        action="store_true",
        help="foresee 64 H100 and 64 L40S, together, alone, by hand",
    )
    both = "of --own and --choice"
    parser.add_argument(
        "--graphs", default="", help="of --choice: these alone, by name, as in 'small+tail'"
    )
    parser.add_argument(
        "--policies", type=Path, default=Path("policies"), help=f"{both}: folder for the policies"
    )
    parser.add_argument(
        "--keep", type=Path, help=f"{both}: where run folders stay; those there are not made again"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        help=f"{both}: begin no run after so many; call again for the others",
    )
    parser.add_argument(
        "--rounds", type=int, help=f"{both}: how often runs are made (default: 1 and 3)"
    )
    parser.add_argument("--json", type=Path, help="file for the JSON lines")
    parser.add_argument(
        "--models",
        type=Path,
        default=MODELS,
        help="dimensions of models (default: those known here)",
    )
    options = parser.parse_args()
    if options.own:
        return own(
            options.json, options.policies, options.keep, options.seconds, options.rounds or 1
        )
    if options.choice:
        return choice(
            options.json,
            options.policies,
            options.keep,
            [name for name in options.graphs.split("+") if name],
            options.seconds,
            options.rounds or 3,
        )
    if options.search:
        return search(options.json)
    if options.unlike:
        return unlike(options.json)
    if options.generator:
        return generator(options.json)
    if options.rows:
        return predict(options.rows, options.models, options.json)
    return fit(options.fit, options.models, options.json)


def fit(rows: Path, models: Path, path: Path | None) -> int:
    """Fit to rows, and say how far each is off when it is left out."""
    report, console, known_models = (
        Report("foresight", path),
        Console(width=150),
        read_models(models),
    )
    notes: list[str] = []
    compared: list[tuple[str, Ratio]] = []
    for system, alike in by_system(read_rows(rows)).items():
        practice = practice_of(system)
        runs = [seen(row, known_models, practice) for row in alike]
        predictions = {way: left_out(runs, how) for way, how in WAYS.items()}
        for at, run in enumerate(runs):
            report.add(
                case=system,
                system=run.row["model"],
                mode=run.row["mode"],
                devices=f"{run.row['gpus']} {run.row['gpu']}",
                step_s=run.step_s,
                **{way: predicted[at] for way, predicted in predictions.items()},
                off=predictions["costs"][at] / run.step_s - 1,
            )
        off = {
            way: statistics.median(
                abs(seconds / run.step_s - 1) for seconds, run in zip(predicted, runs, strict=True)
            )
            for way, predicted in predictions.items()
        }
        rates = fitted(runs)
        compared += [(system, ratio) for ratio in ratios(runs)]
        notes += [
            (
                f"{system}: off by, in the median,"
                f" {', '.join(f'{way} {error:.0%}' for way, error in off.items())}"
            ),
            (
                f"  Rates(memory={rates.memory:.3f}, compute={rates.compute:.3f}); assumed:"
                f" {practice.assumption}"
            ),
        ]
    for system, ratio in compared:
        report.add(
            case="synchronous over asynchronous",
            system=system,
            of=ratio.case,
            published=ratio.published,
            ours=ratio.predicted,
            off=ratio.off,
            fitted_to_all=ratio.fitted,
        )
    near = sum(abs(ratio.off) <= RATIO_GOAL for _, ratio in compared)
    seen_near = sum(abs(ratio.fitted / ratio.published - 1) <= RATIO_GOAL for _, ratio in compared)
    notes.append(
        f"ratios within {RATIO_GOAL:.0%}: {near} of {len(compared)} with both rows left out,"
        f" {seen_near} with all rows"
    )
    report.show(console)
    console.print(*notes, sep="\n", highlight=False)
    return 0


def predict(rows: Path, models: Path, path: Path | None) -> int:
    """A line per row. Status 1 when one cannot be predicted: its line says why, and has no
    predicted_s.
    """
    known_models, failed, lines = read_models(models), False, []
    for row in read_rows(rows):
        line: dict[str, object] = {**row}
        try:
            clear, model, assumptions = understood(row, known_models)
            rates = rates_of(clear["system"])
            run = seen(clear, {clear["model"]: model}, practice_of(clear["system"]))
            line |= {"predicted_s": run.predicted_s(rates), "constants": rates.source}
            if assumptions:
                line["assumed"] = "; ".join(assumptions)
        except (ArithmeticError, LookupError, ValueError, TypeError) as error:
            # a row for itself: others go on
            failed = True
            line["failed"] = f"{type(error).__name__}: {error}"
        lines.append(line)
        print(
            *(row.get(column, "") for column in ("system", "model", "mode", "gpus")),
            line.get("predicted_s", line.get("failed")),
            line.get("assumed", ""),
        )
    if path is not None:
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return int(failed)


def practice_of(system: str) -> Practice:
    """Of a system, or of the one whose name begins alike."""
    near = [name for name in PRACTICES if name.split("-")[0] == system.split("-")[0]]
    return PRACTICES.get(system) or (
        PRACTICES[near[-1]]
        if near
        else Practice(
            assumption="as NeMo-RL",
            prompt_tokens=150,
            forward=6,
            rollouts=1024,
            mean_tokens=1500,
            max_tokens=8192,
        )
    )


def rates_of(system: str, known: Mapping[str, Rates] = FITTED) -> Rates:
    """Those fitted to a system; of one that is not known, the geometric means of those whose name
    begins alike, or of all.
    """
    if system in known:
        return known[system]
    alike = {
        name: rates for name, rates in known.items() if name.split("-")[0] == system.split("-")[0]
    } or known
    return replace(
        ASSUMED,
        memory=statistics.geometric_mean(rates.memory for rates in alike.values()),
        compute=statistics.geometric_mean(rates.compute for rates in alike.values()),
        source=f"means of {', '.join(alike)}: {system or 'a system without a name'} was not fitted",
    )


if __name__ == "__main__":
    raise SystemExit(main())
