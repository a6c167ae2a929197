"""Held-out accuracy after the same rollouts, by how stale they may be: AIPO, and plain policy
gradient beside it.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from bench.learning.algorithms import budget
from bench.learning.figures import curve_of, row_of, summary
from bench.learning.picture import picture
from bench.real.evaluation import accuracies
from bench.real.runs import Line, chosen, made_once, run_to_end, setting_of
from bench.real.task import Task, task_of
from bench.report import Figure, Report

CASE = "parity"
TITLE = "Sums and differences by SmolLM2-135M-Instruct"
CURVE_QUESTIONS = 256
"""Held-out questions of an evaluation within a run."""


@dataclass(frozen=True)
class Arm:
    """What differs between runs of one seed."""

    max_staleness: int
    corrected: bool = True


ARMS = {
    "aipo-0": Arm(0),
    "aipo-1": Arm(1),
    "aipo-4": Arm(4),
    "aipo-8": Arm(8),
    "uncorrected-8": Arm(8, corrected=False),
}
"""By name; the number is max_staleness. Uncorrected: -A * log pi, as if the rollouts were the
policy's own."""


def parity(
    options: argparse.Namespace, flags: Sequence[str], about: Mapping[str, Figure]
) -> list[Line]:
    """Every arm and seed that FILE lacks, each in a process of its own; table and picture of all.

    flags: the command line, which each run gets as well. about: the conditions.
    """
    runs = [(name, seed) for seed in range(options.seeds) for name in chosen(options, tuple(ARMS))]
    lines = made_once(options, CASE, runs, flags=flags, about=about, describe=told)
    show(lines, setting_of(options))
    print(DIFFERS, flush=True)
    if options.json is not None:
        options.json.with_suffix(".svg").write_text(
            picture(lines, TITLE, "questions"), encoding="utf-8"
        )
    return lines


DIFFERS = """\
What differs from the paper's GSM8K and MATH: a model of 135 million parameters instead of 8 to 405
billion, questions of one step with answers of a few tokens, one number that is right or wrong, some
ten thousand rollouts instead of millions, two cores instead of GPUs, and a rate that makes all of
it learn within minutes. What is the same: the loss, its weights and their cap, generation that
never waits, weights that change in the midst of a rollout.
`error`: standard error of the mean over the seeds; `difference`: to aipo-0 with the same seed."""


def told(line: Mapping[str, Any]) -> str:
    """One run in a line."""
    return (
        f"accuracy {line['first']:.3f} to {line['accuracy']:.3f} (greedy {line['greedy']:.3f}),"
        f" staleness {line['staleness']:.2f}, {line['seconds']:.0f} s"
    )


def show(lines: Sequence[Mapping[str, Any]], setting: str) -> None:
    """Two tables, of means over the seeds: what was learnt, and from how stale rollouts."""
    table = Report("real")
    for row in learnt(lines):
        table.add(case=f"{CASE}, {setting}", **row)
    for name in dict.fromkeys(line["system"] for line in lines):
        mine = [line for line in lines if line["system"] == name and "failed" not in line]
        staleness: dict[str, Any] = {key: mean(mine, key) for key in STALENESS}
        table.add(case="staleness of what was trained", system=name, **staleness)
    table.show(Console(width=max(140, Console().width)))


STALENESS = (
    "staleness",
    "staleness_late",
    "staleness_most",
    "clipped",
    "ess",
    "kl",
    "dropped",
    "seconds",
)


def learnt(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each arm: accuracies with their standard errors over the seeds."""
    rows = []
    for row in summary(lines, "aipo-0"):
        mine = [line for line in lines if line["system"] == row["system"] and "failed" not in line]
        figures: dict[str, Figure] = {"system": row["system"], "runs": row["runs"]}
        if mine:
            figures |= {"accuracy": row["accuracy"], "error": error(mine, "accuracy")}
            figures |= {"difference": row.get("difference"), "its error": row.get("error")}
            figures |= {"greedy": mean(mine, "greedy"), "greedy error": error(mine, "greedy")}
            figures |= {"first": mean(mine, "first"), "rollouts": mean(mine, "rollouts")}
        rows.append(figures)
    return rows


def mean(lines: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """Over the lines that have it."""
    values = [float(line[name]) for line in lines if line.get(name) is not None]
    return statistics.mean(values) if values else None


def error(lines: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """Standard error of that mean."""
    values = [float(line[name]) for line in lines if line.get(name) is not None]
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def run_arm(name: str, seed: int, options: argparse.Namespace) -> dict[str, Figure]:
    """One run, in this process and its workers, and what its last weights answer."""
    task, arm = task_of(options), ARMS[name]
    rows = budget(task.train, options.steps * task.prompts_per_step, seed)
    held_out = task.prompts(task.held_out[:CURVE_QUESTIONS], name="held_out", group_size=1)
    graph = task.graph(
        name,
        task.prompts(rows, epochs=1),
        max_staleness=arm.max_staleness,
        corrected=arm.corrected,
        held_out=held_out,
        every_steps=max(1, options.steps // options.points),
    )
    with tempfile.TemporaryDirectory() as runs:
        result, last = run_to_end(graph, seed, runs)
        figures_of_arm = figures(task, result.metrics, len(rows)) | accuracies(
            task, str(last), samples=options.samples
        )
        curve = curve_of(figures_of_arm)
        curve[-1] = (curve[-1][0], float(figures_of_arm["accuracy"] or 0.0))
        return figures_of_arm | {
            "curve": json.dumps(curve),
            "seconds": result.seconds,
            "efficiency": result.efficiency,
        }


def figures(task: Task, metrics: Sequence[Mapping[str, Any]], prompts: int) -> dict[str, Figure]:
    """Of a run that issued so many prompts: those of bench.learning, and how far its rollouts were
    from the policy.

    staleness_late: the mean over the second half, when queues are full. clipped: share of the
    trained tokens whose weight was capped. kl: of generator and trainer, nats per token.
    """
    steps = [line for line in metrics if line.get("node") == "trainer"]
    late = steps[len(steps) // 2 :]

    def over(lines: Sequence[Mapping[str, Any]], name: str) -> float | None:
        values = [line[name] for line in lines if line.get(name) is not None]
        return statistics.mean(values) if values else None

    return row_of(metrics, task.group_size, prompts * task.group_size) | {
        "staleness_late": over(late, "staleness_mean"),
        "staleness_most": max((line["staleness_max"] for line in steps), default=None),
        "clipped": over(steps, "truncated_share"),
        "kl": over(steps, "kl"),
    }
