"""How well each algorithm learns the calculator steps of GSM8K from the same number of rollouts.

    python -m bench.learning --prompts train.jsonl --eval test.jsonl --json FILE --resume

The graph of graphs/calculator.py with what bench.learning.algorithms says of each algorithm: AIPO
with rollouts up to 0, 1, 4 and 8 versions old; the same without importance weights; GRPO, DAPO,
RLOO, PPO with a critic, and distillation from a teacher that saw the answers. Every run starts from
the same policy and ends when --steps x 32 prompts have had their 8 rollouts each; groups that a
filter drops count as well. A run has a process of its own; all algorithms take their turn before
the next seed begins.

A line of JSON per run: accuracy, on all steps of --eval after the last update, sampled at
temperature 1; first, before the first; curve, the accuracy by rollouts; staleness, the mean of the
trained rollouts' (how far the generator really ran ahead depends on the machine); ess, the
effective share of the tokens; dropped groups; seconds. With --resume, runs that stand in FILE
already are not made again. No run begins after --minutes. The table shows means over the seeds,
`spread` their standard deviation, and `difference`, the mean of the differences to synchronous AIPO
with the same seed, with its standard error; the picture, accuracy against rollouts, is drawn beside
FILE.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.learning.figures import row_of, summary
from bench.learning.picture import picture
from bench.own_process import figures_of
from bench.report import Report

NAMES = (
    "aipo-0",
    "aipo-1",
    "aipo-4",
    "aipo-8",
    "uncorrected-1",
    "uncorrected-4",
    "uncorrected-8",
    "grpo",
    "dapo",
    "rloo",
    "ppo",
    "distill",
)
RUN_TIMEOUT_S = 1800.0
POLICY_STEPS, TEACHER_STEPS = 180, 1_000
"""Batches of answers that they have seen before."""
TINY_ROWS = 16
WIDTH = 140
"""Columns of the table, where the output is no terminal that says more."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the bench; the exit status is 1 when a run failed."""
    options = parser().parse_args(arguments)
    if options.child:
        return _be_child(options)
    done = finished(options.json) if options.resume else []
    report, failed = Report("learning", options.json), False
    for line in done:
        report.add(**line)
    _policies(options, options.only)
    until = time.monotonic() + 60 * options.minutes
    runs = [(seed, name) for seed in range(options.seeds) for name in options.only]
    measured = {(line["seed"], line["system"]) for line in done}
    lines = list(done)
    for seed, name in runs:
        if (seed, name) in measured:
            continue
        if time.monotonic() > until:
            print(f"{name} with seed {seed}: no time is left; go on with --resume", flush=True)
            continue
        figures = measure(name, seed, options)
        failed |= "failed" in figures
        line = {"case": "calculator", "system": name, "seed": seed, **figures}
        report.add(**line)
        lines.append(line)
        print(
            f"{name} with seed {seed}: {figures.get('failed') or figures['accuracy']}", flush=True
        )
    table = Report("learning")
    for row in summary(lines, NAMES[0]):
        table.add(case="calculator", **row)
    table.show(Console(width=max(WIDTH, Console().width)))
    if options.json is not None:
        options.json.with_suffix(".svg").write_text(picture(lines), encoding="utf-8")
    return int(failed)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.learning",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--json", type=Path, help="file for the JSON lines; the picture is drawn beside it"
    )
    parser.add_argument(
        "--prompts", default="", help="GSM8K's train.jsonl; made-up steps without it"
    )
    parser.add_argument("--eval", default="", help="GSM8K's test.jsonl")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each algorithm (default 3)")
    parser.add_argument(
        "--steps", type=int, default=1_000, help="steps' worth of prompts of a run (default 1000)"
    )
    parser.add_argument(
        "--only", nargs="+", choices=NAMES, default=list(NAMES), help="default: all"
    )
    parser.add_argument(
        "--resume", action="store_true", help="keep the runs that stand in the file"
    )
    parser.add_argument(
        "--minutes", type=float, default=120.0, help="no run begins afterwards (default 120)"
    )
    parser.add_argument(
        "--points", type=int, default=10, help="evaluations of a run after the first (default 10)"
    )
    parser.add_argument(
        "--policies", type=Path, default=Path("policies"), help="folder for policy and teacher"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="a tiny policy and few prompts, to try the code"
    )
    parser.add_argument(
        "--child", nargs=3, metavar=("NAME", "SEED", "FILE"), help=argparse.SUPPRESS
    )
    return parser


def finished(path: Path | None) -> list[dict[str, Any]]:
    """The lines of runs that did not fail, as `Report.add` takes them."""
    if path is None or not path.is_file():
        return []
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        {key: value for key, value in line.items() if key != "bench"}
        for line in lines
        if "failed" not in line
    ]


def measure(name: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of one run in a process of its own, or {"failed": the end of what it said}."""
    flags = ["--prompts", options.prompts, "--eval", options.eval, "--steps", str(options.steps)]
    flags += ["--points", str(options.points), "--policies", str(options.policies.absolute())]
    flags += ["--tiny"] if options.tiny else []
    return figures_of("bench.learning", [name, str(seed)], flags, timeout_s=RUN_TIMEOUT_S)


def _policies(options: argparse.Namespace, names: Sequence[str]) -> tuple[str, str]:
    """Folders of policy and teacher, made unless they stand there; where no teacher is asked, the
    policy is both.
    """
    from graphs.tasks.calculator import warm

    size = {"layers": 1, "width": 16} if options.tiny else {}
    policy, teacher = (2, 3) if options.tiny else (POLICY_STEPS, TEACHER_STEPS)
    policy_folder = str(
        warm(options.policies / "calculator", options.prompts, steps=policy, **size)
    )
    if "distill" not in names:
        return policy_folder, policy_folder
    return policy_folder, str(
        warm(options.policies / "calculator-teacher", options.prompts, steps=teacher, **size)
    )


def _be_child(options: argparse.Namespace) -> int:
    from bench.learning.algorithms import GROUP_SIZE, PROMPTS_PER_STEP, budget, build, examples
    from dataflow import run
    from operators import Prompts

    name, seed, out = options.child[0], int(options.child[1]), Path(options.child[2])
    policy, teacher = _policies(options, [name])
    most = TINY_ROWS if options.tiny else None
    rows = budget(
        examples(options.prompts, held_out=False)[:most], options.steps * PROMPTS_PER_STEP, seed
    )
    held_out = examples(options.eval, held_out=True)[:most]
    graph = build(
        name,
        policy=policy,
        teacher=teacher,
        prompts=Prompts(rows, columns=("answer",), epochs=1),
        held_out=Prompts(held_out, columns=("answer",), name="held_out", group_size=1),
        every_steps=max(1, options.steps // options.points),
    )
    with tempfile.TemporaryDirectory() as runs:
        result = run(graph, seed=seed, runs=runs, quiet=True)
        if not result.verdict.clean:
            raise RuntimeError(
                f"the ledger of the run does not hold: {result.verdict.line}; see dataflow verify"
            )
        out.write_text(
            json.dumps(
                row_of(result.metrics, GROUP_SIZE, len(rows) * GROUP_SIZE)
                | {"seconds": result.seconds}
            )
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
