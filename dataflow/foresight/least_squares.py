"""Least squares whose answers are not negative, for a handful of columns."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from numpy.typing import NDArray

_TRIED, _TURNS = 10, 5000


def non_negative(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    """c >= 0 for which x c is nearest to y, float64[columns], and the sum of squares that is left.

    x: float64[rows, columns]. Of at most 10 columns all choices of those that count are tried; of more each is
    improved in turn, which comes as near as is wanted where no two columns are alike.

    >>> non_negative(np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([2.0, -1.0]))[0].tolist()
    [2.0, 0.0]
    """
    columns = x.shape[1]
    if columns > _TRIED:
        return _in_turn(x, y)
    best, left = np.zeros(columns), float(y @ y)
    for count in range(1, columns + 1):
        for chosen in combinations(range(columns), count):
            part = x[:, chosen]
            scale = np.maximum(np.abs(part).max(axis=0), 1e-300)
            found = np.linalg.lstsq(part / scale, y, rcond=1e-9)[0] / scale
            off = float(((part @ found - y) ** 2).sum())
            if (found >= 0).all() and off < left * (1 - 1e-6):
                best, left = np.zeros(columns), off
                best[list(chosen)] = found
    return best, left


def _in_turn(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    """Coordinate descent (Franc, Hlavac and Navara, 2005)."""
    scale = np.maximum(np.sqrt((x**2).sum(axis=0)), 1e-300)
    alike, wanted = (x / scale).T @ (x / scale), (x / scale).T @ y
    found, slope = np.zeros(len(scale)), -wanted
    for _ in range(_TURNS):
        before = found.copy()
        for at in range(len(found)):
            step = max(0.0, found[at] - slope[at]) - found[at]
            found[at] += step
            slope = slope + step * alike[at]
        if np.abs(found - before).max() <= 1e-12 * (1 + np.abs(found).max()):
            break
    return found / scale, float(((x / scale @ found - y) ** 2).sum())
