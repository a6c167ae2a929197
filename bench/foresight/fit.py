"""Two constants per system, fitted to some of its rows to predict the others; beside them what one would try first."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from bench.foresight.published import Run
from dataflow.foresight.rates import ASSUMED, Rates

Predict = Callable[[Run], float]
_LEAST, _GRID = 0.01, 41


def fitted(runs: Sequence[Run]) -> Rates:
    """The shares of data-sheet rates with the least squares of the logarithms, each at most 1."""

    def badness(rates: Rates) -> float:
        return sum(math.log(run.predicted_s(rates) / run.step_s) ** 2 for run in runs)

    best, wide = replace(ASSUMED, memory=_LEAST**0.5, compute=_LEAST**0.5), _LEAST**0.5
    for _ in range(3):  # each time around the best so far, and finer
        near = np.geomspace(wide, 1 / wide, _GRID)
        best = min(
            (
                replace(best, memory=float(min(1.0, best.memory * m)), compute=float(min(1.0, best.compute * c)))
                for m in near
                for c in near
            ),
            key=badness,
        )
        wide = float(near[-2] / near[-1])
    return replace(best, source=f"fitted to {len(runs)} rows of {runs[0].row['system']}")


def by_costs(runs: Sequence[Run]) -> Predict:
    """Ours."""
    rates = fitted(runs)
    return lambda run: run.predicted_s(rates)


def by_devices(runs: Sequence[Run]) -> Predict:
    """A regression of the logarithm of seconds on that of devices, by mode where there are two."""
    x = np.array([[1.0, math.log(float(run.row["gpus"])), float(run.overlaps)] for run in runs])
    y = np.array([math.log(run.step_s) for run in runs])
    weights = np.linalg.lstsq(x, y, rcond=None)[0]
    return lambda run: math.exp(float(np.array([1.0, math.log(float(run.row["gpus"])), float(run.overlaps)]) @ weights))


def by_mean(runs: Sequence[Run]) -> Predict:
    """The geometric mean of the other rows."""
    mean = math.exp(sum(math.log(run.step_s) for run in runs) / len(runs))
    return lambda run: mean


def left_out(runs: Sequence[Run], fit: Callable[[Sequence[Run]], Predict]) -> list[float]:
    """Of each run, what is predicted by a fit to all others."""
    return [fit([*runs[:at], *runs[at + 1 :]])(run) for at, run in enumerate(runs)]
