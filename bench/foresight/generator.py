"""Seconds per token of measured serving runs, predicted for a device or a model that the constants
have not seen.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, fields
from pathlib import Path

import numpy as np
from rich.console import Console

from bench.foresight.measured import Served, holding, read_served
from bench.report import Report
from dataflow.errors import GraphError
from dataflow.foresight.kernel_tables import PACKAGE, folder, version
from dataflow.foresight.steps import ServerConstants

_LEAST = 0.02
"""Relative errors below it weigh as squares, those above as they are, so that a few wrong rows turn
nothing."""
_TURNS = 40
DOUBTED = "Qwen/Qwen3-235B-A22B-FP8"
"""0.4 to 0.6 ms a layer in every row, whatever the batch: three times any other model's, as if
without graphs."""


def fitted(rows: Sequence[Served]) -> ServerConstants:
    """The constants, none negative, with the least mean of relative errors."""
    amounts = np.array([[amount / row.token_s for amount in astuple(row.step)] for row in rows])
    scale = amounts.mean(axis=0)
    amounts = amounts[:, scale > 0] / scale[scale > 0]
    weights, solution = np.ones(len(rows)), np.zeros(amounts.shape[1])
    for _ in range(_TURNS):
        solution = not_negative(amounts * weights[:, None], weights)
        weights = 1 / np.sqrt(np.maximum(np.abs(amounts @ solution - 1), _LEAST))
    values = np.zeros(len(scale))
    values[scale > 0] = solution / scale[scale > 0]
    return ServerConstants(
        **dict(zip((field.name for field in fields(ServerConstants)), values.tolist(), strict=True))
    )


def not_negative(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """x >= 0 with the least squares of a x - b (Lawson and Hanson, 1974, chapter 23)."""
    x, free = np.zeros(a.shape[1]), np.zeros(a.shape[1], dtype=bool)
    slope = a.T @ b
    while not free.all() and slope[~free].max() > 1e-9 * len(b):
        free[np.argmax(np.where(free, -np.inf, slope))] = True
        while True:
            solution = np.zeros_like(x)
            solution[free] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
            low = free & (solution <= 0)
            if not low.any():
                break
            x += np.min(x[low] / (x[low] - solution[low])) * (solution - x)
            free &= x > 1e-12
            x[~free] = 0.0
        x = solution
        slope = a.T @ (b - a @ x)
    return x


def left_out(
    rows: Sequence[Served], of: Callable[[Served], str]
) -> dict[str, list[tuple[Served, float]]]:
    """Each group of rows with what is predicted by constants fitted to all other groups."""
    predictions = {}
    for name in dict.fromkeys(map(of, rows)):
        constants = fitted([row for row in rows if of(row) != name])
        predictions[name] = [(row, constants.seconds(row.step)) for row in rows if of(row) == name]
    return predictions


def errors(predicted: Iterable[tuple[Served, float]]) -> list[float]:
    """Relative ones, signed."""
    return [seconds / row.token_s - 1 for row, seconds in predicted]


def generator(path: Path | None) -> int:
    """Leave each device and each model out, and show by how much time per token is off."""
    report, console = Report("foresight: generator", path), Console(width=150)
    all_rows = read_served(folder())
    rows, why = holding(all_rows)
    lines = [
        f"{PACKAGE} {version()}: {len(all_rows)} measured aggregated rows of vLLM; {len(rows)} kept"
    ]
    lines += [f"  {number} left out: the row {reason}" for reason, number in why.items()]
    for title, alike in (
        (f"without {DOUBTED}", [row for row in rows if row.model != DOUBTED]),
        ("all rows kept", rows),
        ("every row there is", all_rows),
    ):
        for kind, of in (("device", lambda row: row.device), ("model", lambda row: row.model)):
            means = []
            for name, predicted in left_out(alike, of).items():
                off = errors(predicted)
                means.append(statistics.fmean(map(abs, off)))
                report.add(
                    case=f"each {kind} left out, {title}",
                    system=name,
                    rows=len(off),
                    off=means[-1],
                    median=statistics.median(map(abs, off)),
                    bias=statistics.fmean(off),
                )
            lines.append(
                f"{title}, each {kind} left out: off by {statistics.fmean(means):.1%} in their"
                f" mean, {max(means):.1%} at worst"
            )
    constants = fitted([row for row in rows if row.model != DOUBTED])
    for name, amounts in _groups(rows).items():
        off = errors((row, constants.seconds(row.step)) for row in amounts)
        report.add(
            case="fitted to all but the doubted rows",
            system=name,
            rows=len(off),
            off=statistics.fmean(map(abs, off)),
            median=statistics.median(map(abs, off)),
            bias=statistics.fmean(off),
        )
    for name, amounts in _groups(rows).items():
        rows_composed = composed(amounts)
        if off := errors(rows_composed):
            report.add(
                case="kernels of vLLM 0.24 one after the other, nothing fitted",
                system=name,
                rows=len(off),
                off=statistics.fmean(map(abs, off)),
                median=statistics.median(map(abs, off)),
                bias=statistics.fmean(off),
            )
    report.show(console)
    console.print(
        *lines, f"fitted to all but the doubted rows: {constants}", sep="\n", highlight=False
    )
    return 0


def composed(rows: Iterable[Served]) -> list[tuple[Served, float]]:
    """By measured kernels: a step of the batch, and prompts that come in meanwhile; of rows that
    have tables.
    """
    composed_rows = []
    for row in rows:
        if row.kernels is None:
            continue
        try:
            seconds = row.kernels.decode(row.batch, row.prompt + row.answer / 2)
            composed_rows.append(
                (row, seconds + row.batch / row.answer * row.kernels.prompt(row.prompt))
            )
        except GraphError:  # these experts over so many ranks
            continue
    return composed_rows


def _groups(rows: Sequence[Served]) -> dict[str, list[Served]]:
    groups: dict[str, list[Served]] = {}
    for row in rows:
        groups.setdefault(f"{row.device} {row.model} {row.form}", []).append(row)
    return groups
