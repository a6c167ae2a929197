"""Two constants per system, fitted to some of its rows to predict the others; beside them what one
would try first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bench.foresight.published import Run
from dataflow.foresight.rates import ASSUMED, Parts, Rates

Predict = Callable[[Run], float]
_LEAST, _GRID = 0.01, 81
_SQUARES = 0.1
"""Logarithms of errors below this count by their squares, larger ones as they are (Huber, 1964):
one row that nothing explains does not decide."""
_FIRM, _LOOSE = 0.1, 0.01
"""Weights of the squared logarithm between a constant and its assumed value, for memory and for
products: what no row tells stays near that. All servers' memory is about as fast as its data sheet
says; products reach 10 to 70%."""


def fitted(runs: Sequence[Run]) -> Rates:
    """The shares of data-sheet rates, each at most 1, at which the logarithms of predictions are
    nearest.
    """

    def badness(memory: NDArray[np.float64], compute: NDArray[np.float64]) -> NDArray[np.float64]:
        far = (
            _FIRM * np.log(memory / ASSUMED.memory) ** 2
            + _LOOSE * np.log(compute / ASSUMED.compute) ** 2
        )
        for run in runs:
            off = np.abs(np.log(predicted_at(run, memory, compute) / run.step_s))
            far = far + np.where(off < _SQUARES, off**2, _SQUARES * (2 * off - _SQUARES))
        return np.asarray(far)

    memory, compute, wide = _LEAST**0.5, _LEAST**0.5, _LEAST**0.5
    for _ in range(3):  # each time around the best so far, and finer
        near = np.geomspace(wide, 1 / wide, _GRID)
        tried = np.meshgrid(np.minimum(1.0, memory * near), np.minimum(1.0, compute * near))
        best = np.unravel_index(np.argmin(badness(*tried)), tried[0].shape)
        memory, compute, wide = (
            float(tried[0][best]),
            float(tried[1][best]),
            float(near[-2] / near[-1]),
        )
    return replace(
        ASSUMED,
        memory=memory,
        compute=compute,
        source=f"fitted to {len(runs)} rows of {runs[0].row['system']}" if runs else ASSUMED.source,
    )


def predicted_at(
    run: Run, memory: NDArray[np.float64], compute: NDArray[np.float64]
) -> NDArray[np.float64]:
    """As `Run.predicted_s`, at many rates."""

    def seconds(parts: Parts) -> NDArray[np.float64]:
        return np.asarray(
            (parts.memory + parts.links) / memory + parts.compute / compute + parts.fixed
        )

    generation, training = seconds(run.generation), seconds(run.training)
    longest = np.maximum(np.maximum(generation, training), seconds(run.waits))
    return np.asarray((longest if run.overlaps else generation + training) + seconds(run.exchange))


def by_costs(runs: Sequence[Run]) -> Predict:
    """Ours."""
    rates = fitted(runs)
    return lambda run: run.predicted_s(rates)


def by_devices(runs: Sequence[Run]) -> Predict:
    """A regression of the logarithm of seconds on that of devices, by mode where there are two."""
    x = np.array([[1.0, math.log(float(run.row["gpus"])), float(run.overlaps)] for run in runs])
    y = np.array([math.log(run.step_s) for run in runs])
    weights = np.linalg.lstsq(x, y, rcond=None)[0]
    return lambda run: math.exp(
        float(np.array([1.0, math.log(float(run.row["gpus"])), float(run.overlaps)]) @ weights)
    )


def by_mean(runs: Sequence[Run]) -> Predict:
    """The geometric mean of the other rows."""
    mean = math.exp(sum(math.log(run.step_s) for run in runs) / len(runs))
    return lambda run: mean


def left_out(runs: Sequence[Run], fit: Callable[[Sequence[Run]], Predict]) -> list[float]:
    """Of each run, what is predicted by a fit to all others."""
    return [fit([*runs[:at], *runs[at + 1 :]])(run) for at, run in enumerate(runs)]


@dataclass(frozen=True)
class Ratio:
    """Of a synchronous step to an asynchronous one, of one model on as many devices."""

    case: str
    published: float
    predicted: float
    """By constants that were fitted to neither."""
    fitted: float
    """By those that were fitted to all rows."""

    @property
    def off(self) -> float:
        """Of what is predicted."""
        return self.predicted / self.published - 1


def ratios(runs: Sequence[Run]) -> list[Ratio]:
    """Of each synchronous run to each asynchronous one that goes with it."""
    compared, rates = [], fitted(runs)
    for slow, fast in itertools.product(runs, runs):
        alike = all(slow.row[column] == fast.row[column] for column in ("model", "gpu", "gpus"))
        if alike and fast.overlaps and not slow.overlaps:
            rates_without = fitted([run for run in runs if run is not slow and run is not fast])
            compared.append(
                Ratio(
                    case=f"{slow.row['model']}, {slow.row['gpus']} {slow.row['gpu']}",
                    published=slow.step_s / fast.step_s,
                    predicted=slow.predicted_s(rates_without) / fast.predicted_s(rates_without),
                    fitted=slow.predicted_s(rates) / fast.predicted_s(rates),
                )
            )
    return compared
