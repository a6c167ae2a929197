"""What charts share: round numbers along an axis, running means, and fewer points than there are
pixels.
"""

import math
from collections.abc import Sequence

import numpy as np

from dataflow.draw.decimate import decimate, running_mean

MOST_POINTS = 1_500
Point = tuple[float, float]


def smooth(series: Sequence[Point]) -> list[Point]:
    """Its running mean."""
    means = running_mean(np.array([value for _, value in series], np.float64))
    return [(step, mean) for (step, _), mean in zip(series, means.tolist(), strict=True)]


def thin(series: Sequence[Point]) -> list[Point]:
    """As few of the points as a picture can show: both ends, and what stands out."""
    if len(series) <= MOST_POINTS:
        return list(series)
    points = np.array(series, np.float64)
    xs, ys = decimate(points[:, 0], points[:, 1], MOST_POINTS)
    return list(zip(xs.tolist(), ys.tolist(), strict=True))


def ticks(low: float, high: float, about: int, whole: bool = False) -> list[float]:
    """Round numbers that enclose low and high."""
    # A span that floats cannot divide is widened.
    high = max(high, low + 1e-6 * max(abs(low), abs(high)), low + 1e-9)
    raw = (high - low) / about
    size = 10 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= raw * 0.999)
    if whole:
        step = max(math.ceil(step), 1)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [at * step for at in range(first, last + 1)]


def figure(value: float) -> str:
    """As it stands at an axis."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.10g}"
