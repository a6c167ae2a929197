"""Seconds of a kind of operator, by what they were spent on, and the constants that fit them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

_NOTHING, _TURNS = 1e-9, 20
"""A slope below this share of the length of y counts as none; turns for each column, at most."""
_NOISE = 0.03
"""Relative to a run's seconds: fits that differ by less are equally good."""
_SPREAD = 1.0
"""Of what is assumed: constants of another machine differ by so much of it, give or take, its speed
apart."""
_RIDGE = 0.01
"""Where nothing is assumed: root of the penalty on coefficients of columns of length 1, little
beside what tells columns apart."""
_FLOOR = 0.02
"""Share of a run's seconds: parts of it that are smaller count as if they were as large."""
_ALONE, _ALONE_IS, _ALONE_ABOUT = tuple(1 + number / 20 for number in range(17)), 1.1, 0.1
"""How much faster one process on cores may be while no other computes: what two share is caches and
memory, or the core itself, where both are its hardware threads (1.2 on one machine, 1.05 on
another). What it is where runs do not tell, give or take."""
_PARALLEL, _PARALLEL_ABOUT = tuple(number / 20 for number in range(6, 21)), 0.15
"""Shares of a full speedup that several threads may reach, and their standard deviation."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Coefficients of a table's columns, and the speedup of several threads."""

    rates: Sequence[float]
    parallel: float
    has_threads: bool
    missed: float
    """Distance from the measurements and from the assumptions, in units of their noise."""


@dataclass(frozen=True, kw_only=True)
class Beside:
    """What else computed on a process's cores."""

    threads: int = 1
    """Threads of the process itself."""
    share: float = 1.0
    """Of the speed of one among as many as there are cores, in the mean: more of them share the
    cores."""
    idle: float = 0.0
    """And how much of it more for each unit by which one that is alone is faster."""

    def speed(self, alone: float) -> float:
        """In the mean of the seconds that it was at work."""
        return self.share + (alone - 1) * self.idle


@dataclass(kw_only=True)
class CostTable:
    """Seconds of one kind of operator, run by run."""

    serial: slice
    """Columns of what one thread does alone, of several."""
    shared: slice
    """Columns of what they share out. The last column is that of their waits for each other."""
    parallel: float
    """Assumed of several threads, on cores."""
    assumed: Sequence[float] | None
    """Coefficients of another machine of this kind; None: nobody knows."""
    x: list[Sequence[float]] = field(default_factory=list)
    y: list[float] = field(default_factory=list)
    run: list[int] = field(default_factory=list)
    beside: list[Beside] = field(default_factory=list)

    def add(
        self, run: int, seconds: float, spent: Sequence[float], *, waits: float, beside: Beside
    ) -> None:
        """A row of a run; waits: how often several threads would wait for each other."""
        self.x.append([*spent, waits if beside.threads > 1 else 0.0])
        self.y.append(seconds)
        self.run.append(run)
        self.beside.append(beside)

    @property
    def has_threads(self) -> bool:
        """Whether a process of some run had several."""
        return any(beside.threads > 1 for beside in self.beside)

    def fit(self, alone: float, parallel: float) -> Fit:
        """Of seconds beside others, of one thread: `Constants.of` says what becomes of them.

        Ridge regression (Hoerl and Kennard, 1970), no coefficient below 0; all runs count alike.
        What columns cannot be told apart by stays as it is assumed, on a machine so many times as
        fast; where nothing is, it is shared out.
        """
        x, threads = np.array(self.x), np.array([beside.threads for beside in self.beside])
        x[:, self.serial] /= np.where(threads > 1, alone, 1.0)[:, None]
        x[:, self.shared] /= np.where(threads > 1, threads * parallel, 1.0)[:, None]
        y, run = (
            np.array(self.y) * [beside.speed(alone) for beside in self.beside],
            np.array(self.run),
        )
        whole = np.bincount(run, weights=y)[run]
        weights = 1 / np.maximum(1e-300, np.sqrt(np.maximum(_FLOOR * whole, y) * whole))
        rows, measured = x * weights[:, None], y * weights
        if self.assumed is None:
            unit, penalty, usual = (
                1 / np.maximum(np.sqrt((rows**2).sum(axis=0)), 1e-300),
                _RIDGE,
                0.0,
            )
        else:
            unit, penalty, usual = (
                _at_speed(np.array(self.assumed), rows, measured),
                _NOISE / _SPREAD,
                1.0,
            )
        fitted, error = non_negative(
            np.vstack([rows * unit, penalty * np.eye(len(unit))]),
            np.concatenate([measured, np.full(len(unit), penalty * usual)]),
        )
        missed = error / _NOISE**2 + ((parallel - self.parallel) / _PARALLEL_ABOUT) ** 2
        return Fit(
            rates=[float(rate) for rate in fitted * unit],
            parallel=parallel,
            has_threads=self.has_threads,
            missed=missed,
        )


def _at_speed(
    assumed: NDArray[np.float64], rows: NDArray[np.float64], measured: NDArray[np.float64]
) -> NDArray[np.float64]:
    """What is assumed, on a machine as many times as fast as fits best."""
    seconds = rows @ assumed
    return assumed * max(1e-3, float(seconds @ measured) / max(1e-300, float(seconds @ seconds)))


def best(tables: Sequence[CostTable], *, on_cores: bool) -> tuple[float, Sequence[Fit]]:
    """The speed of a process that is alone, and each table's fit at that speed; where runs do not
    tell, as assumed.
    """
    if not on_cores:
        return 1.0, [table.fit(1.0, table.parallel) for table in tables]
    least: tuple[float, float, Sequence[Fit]] | None = None
    for alone in _ALONE:
        fits = [
            min(
                (
                    table.fit(alone, parallel)
                    for parallel in (_PARALLEL if table.has_threads else (table.parallel,))
                ),
                key=lambda fit: fit.missed,
            )
            for table in tables
        ]
        missed = sum(fit.missed for fit in fits) + ((alone - _ALONE_IS) / _ALONE_ABOUT) ** 2
        if least is None or missed < least[0]:
            least = missed, alone, fits
    assert least is not None, "some are tried"
    return least[1:]


def non_negative(
    x: NDArray[np.float64], y: NDArray[np.float64]
) -> tuple[NDArray[np.float64], float]:
    """c >= 0 for which x c is nearest to y, float64[columns], and the sum of squares that is left.

    x: float64[rows, columns]. By Lawson and Hanson (1974): columns that bring it nearer come in one
    after the other, those that would turn negative go; rows are made as few as columns before (QR).

    >>> non_negative(np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([2.0, -1.0]))[0].tolist()
    [2.0, 0.0]
    """
    scale = np.maximum(np.sqrt((x**2).sum(axis=0)), 1e-300)
    few = np.asarray(np.linalg.qr(np.column_stack([x / scale, y]), mode="r"))
    a, b = few[:, :-1], few[:, -1]
    least, solution = _NOTHING * max(float(np.linalg.norm(y)), 1e-300), np.zeros(len(scale))
    chosen, barred = np.zeros(len(scale), bool), np.zeros(len(scale), bool)
    for _ in range(_TURNS * len(scale)):
        slope = np.where(chosen | barred, -np.inf, a.T @ (b - a @ solution))
        at = int(np.argmax(slope))
        if slope[at] <= least:
            break
        chosen[at] = True
        before, solution, chosen = solution, *_inside(a, b, solution, chosen)
        barred = barred & (solution == before).all()
        barred[at] |= not chosen[at]
    return solution / scale, float(((a @ solution - b) ** 2).sum())


def _inside(
    a: NDArray[np.float64],
    b: NDArray[np.float64],
    solution: NDArray[np.float64],
    chosen: NDArray[np.bool_],
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """The nearest with these columns, or with those of them that are left when it is not to turn
    negative.
    """
    while chosen.any():
        target = np.zeros(len(solution))
        target[chosen] = np.linalg.lstsq(a[:, chosen], b, rcond=1e-9)[0]
        low = chosen & (target <= 0)
        if not low.any():
            return target, chosen
        way = float(np.min(solution[low] / np.maximum(solution[low] - target[low], 1e-300)))
        solution = solution + way * (target - solution)
        gone = low & (solution <= 1e-12 * max(1e-300, float(np.abs(solution).max())))
        if not gone.any():
            gone = low
        chosen = chosen & ~gone
        solution = np.where(chosen, solution, 0.0)
    return np.zeros(len(solution)), chosen
