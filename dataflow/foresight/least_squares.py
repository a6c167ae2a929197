"""Least squares whose answers are not negative, for a handful of columns."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_NOTHING, _TURNS = 1e-9, 20
"""Of the length of y: a slope below that is none. Turns for each column, at most."""


def non_negative(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    """c >= 0 for which x c is nearest to y, float64[columns], and the sum of squares that is left.

    x: float64[rows, columns]. By Lawson and Hanson (1974): columns that bring it nearer come in one after the other,
    those that would turn negative go; rows are made as few as columns before (QR).

    >>> non_negative(np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([2.0, -1.0]))[0].tolist()
    [2.0, 0.0]
    """
    scale = np.maximum(np.sqrt((x**2).sum(axis=0)), 1e-300)
    few = np.asarray(np.linalg.qr(np.column_stack([x / scale, y]), mode="r"))
    a, b = few[:, :-1], few[:, -1]
    least, found = _NOTHING * max(float(np.linalg.norm(y)), 1e-300), np.zeros(len(scale))
    chosen, barred = np.zeros(len(scale), bool), np.zeros(len(scale), bool)
    for _ in range(_TURNS * len(scale)):
        slope = np.where(chosen | barred, -np.inf, a.T @ (b - a @ found))
        at = int(slope.argmax())
        if slope[at] <= least:
            break
        chosen[at] = True
        before, found, chosen = found, *_inside(a, b, found, chosen)
        barred = barred & (found == before).all()
        barred[at] |= not chosen[at]
    return found / scale, float(((a @ found - b) ** 2).sum())


def _inside(
    a: NDArray[np.float64], b: NDArray[np.float64], found: NDArray[np.float64], chosen: NDArray[np.bool_]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """The nearest with these columns, or with those of them that are left when it is not to turn negative."""
    while chosen.any():
        wanted = np.zeros(len(found))
        wanted[chosen] = np.linalg.lstsq(a[:, chosen], b, rcond=1e-9)[0]
        low = chosen & (wanted <= 0)
        if not low.any():
            return wanted, chosen
        way = float((found[low] / np.maximum(found[low] - wanted[low], 1e-300)).min())
        found = found + way * (wanted - found)
        gone = low & (found <= 1e-12 * max(1e-300, float(np.abs(found).max())))
        if not gone.any():
            gone = low
        chosen = chosen & ~gone
        found = np.where(chosen, found, 0.0)
    return np.zeros(len(found)), chosen
