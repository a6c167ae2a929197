"""The figures of the learning bench: of one run from its metrics, and of all runs of an
algorithm.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bench.report import Figure

TRAINER = "trainer"
Point = tuple[int, float]
"""(rollouts generated, accuracy)."""


def row_of(metrics: Sequence[Mapping[str, Any]], group_size: int, total: int) -> dict[str, Figure]:
    """The figures of a run that generated `total` rollouts, from the lines of its metrics.jsonl.

    Rollouts of dropped groups count as well; groups that were dropped after the last step are in
    `total` alone.
    """
    steps = sorted(
        (line for line in metrics if line.get("node") == TRAINER),
        key=lambda line: int(line["step"]),
    )
    generated = {0: 0}
    for line in steps:
        dropped = sum(line["dropped"].values()) * group_size
        generated[line["step"]] = generated[line["step"] - 1] + line["rollouts"] + dropped
    rounds = sorted(
        (line["step"], line["eval_accuracy"]) for line in metrics if "eval_accuracy" in line
    )
    curve = [(generated[step], accuracy) for step, accuracy in rounds]
    curve[-1] = (total, curve[-1][1])
    return {
        "accuracy": curve[-1][1],
        "first": curve[0][1],
        "rollouts": total,
        "steps": len(steps),
        "dropped": sum(sum(line["dropped"].values()) for line in steps),
        "staleness": _mean([line["staleness_mean"] for line in steps]),
        "ess": _mean([line["ess"] for line in steps if line.get("ess") is not None]),
        "curve": json.dumps(curve),
    }


def curve_of(line: Mapping[str, Any]) -> list[Point]:
    """The curve of a run's line."""
    return [(int(rollouts), float(accuracy)) for rollouts, accuracy in json.loads(line["curve"])]


def mean_curve(lines: Sequence[Mapping[str, Any]]) -> list[Point]:
    """Means over the seeds of the points that all of them have; they are evaluated after the same
    steps.
    """
    curves = [curve_of(line) for line in lines]
    return [
        (
            round(statistics.mean(rollouts for rollouts, _ in points)),
            statistics.mean(share for _, share in points),
        )
        for points in zip(*curves, strict=False)
    ]


def summary(lines: Sequence[Mapping[str, Any]], baseline: str) -> list[dict[str, Any]]:
    """A row for each algorithm, in the order in which they first occur; failed runs are left out
    and counted.
    """
    good = [line for line in lines if "failed" not in line]
    base = {line["seed"]: line["accuracy"] for line in good if line["system"] == baseline}
    rows = []
    for name in dict.fromkeys(line["system"] for line in lines):
        mine = [line for line in good if line["system"] == name]
        row: dict[str, Figure] = {"system": name, "runs": len(mine)}
        if mine:
            shares = [line["accuracy"] for line in mine]
            gaps = [line["accuracy"] - base[line["seed"]] for line in mine if line["seed"] in base]
            row |= {"accuracy": statistics.mean(shares), "spread": _deviation(shares)}
            if gaps and name != baseline:
                row |= {"difference": statistics.mean(gaps), "error": _error(gaps)}
            for figure in ("staleness", "ess", "dropped", "steps", "seconds"):
                row[figure] = _mean([line[figure] for line in mine if line.get(figure) is not None])
        rows.append(row)
    return rows


def _mean(values: Sequence[float]) -> float | None:
    return statistics.mean(values) if values else None


def _deviation(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None


def _error(values: Sequence[float]) -> float | None:
    """Standard error of the mean."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
