"""What a long run holds on to: the memory of each of its processes against the steps that it has
made.

    python -m bench.long_run --steps 20000 --json FILE

A policy of one layer and width 16 makes steps as small as they can be: 2 prompts, 2 rollouts of at
most 4 tokens each, a scorer in a process of its own, an evaluation every 50 steps. Each time that a
tenth of the steps is made, the memory of every process is read from outside.

memory: MiB of each process, and of all together, that are of no file, at each of these moments;
bytes_per_step: the slope of the straight line through those of the second half, in which nothing is
loaded any more. pace: steps per second in each tenth. Exit status 1 when `dataflow verify` does not
say clean.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from rich.console import Console

from bench.chaos.program import START_S, Failed, Program, judged
from bench.paused import MIB, memory_of
from bench.report import Figure, Report
from dataflow import Graph, Model, run, scorer

MARKS = 10
STEP_S = 5.0
"""That one step may take before the run counts as hanging."""
TAIL_BYTES = 1 << 16
ALL = "all"


@scorer
def reward(completion: str) -> float:
    """How many different letters there are."""
    return float(len(set(completion)))


def build(policy: Path, eval_every: int) -> Graph:
    """A graph with a step of almost nothing."""
    from graphs.tasks import sorting
    from operators import Evaluate, Generator, Prompts, Trainer
    from operators.credit import advantage
    from operators.losses import aipo
    from operators.warm_start import warm_start

    rows = list(sorting.rows(512, seed=0))
    folder = warm_start(
        str(policy),
        examples=((row["prompt"], row["answer"]) for row in rows),
        alphabet=sorting.ALPHABET,
        layers=1,
        width=16,
        heads=2,
        steps=2,
        seed=0,
    )
    g, model = Graph("long"), Model(str(folder))
    generator = Generator(model, group_size=2, max_tokens=4)
    trainer = Trainer(model, loss=aipo, prompts_per_step=2, lr=1e-4)
    trainer(
        advantage(reward(generator(g.source(Prompts(rows, columns=("answer",), shuffle_seed=0)))))
    )
    held_out = Prompts(rows[:4], columns=("answer",), name="held_out", group_size=1)
    Evaluate(every_steps=eval_every)(reward(generator(g.source(held_out))))
    g.feedback(trainer.weights, generator, max_staleness=4)
    return g


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the bench; the exit status is 1 when the run is not clean."""
    options = parser().parse_args(arguments)
    if options.carry is not None:
        run(
            build(options.carry / "policy", 50), steps=options.steps, runs=options.carry, quiet=True
        )
        return 0
    report = Report("long_run", options.json)
    with tempfile.TemporaryDirectory() as temporary:
        try:
            good = watch(options.steps, Path(temporary), report)
        except Failed as failure:
            print(failure, flush=True)
            good = False
    report.show(Console(width=max(160, Console().width)))
    return int(not good)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.long_run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=20_000, help="of the run (default 20000)")
    parser.add_argument("--json", type=Path, help="file for the JSON lines")
    parser.add_argument("--carry", type=Path, help="internal: be the run, in this folder")
    return parser


def watch(steps: int, runs: Path, report: Report) -> bool:
    """Read memory along the way; whether the run was clean."""
    command = [sys.executable, "-m", "bench.long_run", "--carry", str(runs), "--steps", str(steps)]
    program = Program(command, runs / "said")
    marks = [max(1, steps * mark // MARKS) for mark in range(MARKS)]
    read: dict[int, Mapping[str, float]] = {}
    times: list[tuple[int, float]] = []
    try:
        for mark in marks:
            within_s = START_S + STEP_S * steps / MARKS
            program.until(lambda mark=mark: last_step(runs) >= mark, within_s, f"step {mark}")  # type: ignore[misc]
            step = last_step(runs)
            times.append((step, time.monotonic()))
            read[step] = {name: memory.own / MIB for name, memory in memory_of(program.pid).items()}
        program.wait(START_S + STEP_S * steps / MARKS)
    finally:
        program.kill()
    for row in memory_rows(read):
        report.add(case="memory", system=str(row.pop("process")), **row)
    for (before, began), (after, ended) in pairwise(times):
        report.add(
            case="pace",
            system=f"steps {before} to {after}",
            steps_per_s=(after - before) / (ended - began),
        )
    clean, summary = judged(runs)
    print(summary, flush=True)
    return clean


def memory_rows(read: Mapping[int, Mapping[str, float]]) -> list[dict[str, Figure]]:
    """A row for each process that was there to the end, and one for all: MiB by step, and the slope
    of the second half in bytes a step.
    """
    steps = sorted(read)
    rows: list[dict[str, Figure]] = []
    together = {step: {**read[step], ALL: sum(read[step].values())} for step in steps}
    for name in sorted(together[steps[-1]], key=lambda process: (process == ALL, process)):
        steps_alive = [step for step in steps if name in together[step]]
        half = [step for step in steps_alive if step >= steps[-1] / 2]
        slope = (
            float(np.polyfit(half, [together[step][name] for step in half], 1)[0])
            if len(half) > 1
            else None
        )
        rows.append(
            {
                "process": name,
                **{f"at {step}": together[step][name] for step in steps_alive},
                "bytes_per_step": None if slope is None else slope * MIB,
            }
        )
    return rows


def last_step(runs: Path) -> int:
    """Of the newest whole line of a step in metrics.jsonl; 0 before there is one."""
    try:
        with (runs / "latest" / "metrics.jsonl").open("rb") as stream:
            stream.seek(max(0, stream.seek(0, 2) - TAIL_BYTES))
            lines = stream.read().splitlines(keepends=True)
    except FileNotFoundError:
        return 0
    for line in reversed(lines):
        if line.endswith(b"\n") and b'"loss"' in line:
            return int(json.loads(line)["step"])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
