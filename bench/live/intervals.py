"""What windows beside each other say: the difference that a page makes, and between which bounds it lies; pure."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

NONE = "no page"
QUANTILES = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 8: 2.306, 10: 2.228, 15: 2.131, 20: 2.086,
             30: 2.042, 60: 2.0, 120: 1.98}  # fmt: skip
"""97.5% of Student's t, by degrees of freedom; between two the wider."""

Window = Mapping[str, Any]


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean of some values, and between which two numbers it lies with 95%.

    >>> interval([1.0, 1.0, 1.0])
    (1.0, 1.0, 1.0)
    """
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, -math.inf, math.inf
    quantile = QUANTILES[max(freedom for freedom in QUANTILES if freedom <= len(values) - 1)]
    half = quantile * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def differences(
    windows: Sequence[Window], case: str, figure: Callable[[Window], float], none: str = NONE
) -> list[float]:  # fmt: skip
    """Of each window of a case the logarithm of a figure, less the mean of those of the two windows of the case `none`
    around it. For that itself: of every second one, less its neighbours of the same kind, which is 0 but for chance.

    windows: in the order in which they were, each with its `piece`; in a piece every second one is of `none`."""
    found: list[float] = []
    step = 2 if case == none else 1
    for at in range(step, len(windows) - step):
        around = windows[at - step], windows[at + step]
        if windows[at]["case"] != case or any(each["case"] != none for each in around):
            continue
        if len({each["piece"] for each in (windows[at], *around)}) > 1 or (case == none and at // 2 % 2):
            continue
        beside = [math.log(figure(each)) for each in around]
        found.append(math.log(figure(windows[at])) - statistics.fmean(beside))
    return found


def percent_less(values: Sequence[float]) -> tuple[float, float, float]:
    """By how many percent a figure is lower, and the bounds of that: from the logarithms of its ratios."""
    mean, low, high = (100 * (1 - math.exp(value)) for value in interval(values))
    return mean, high, low
