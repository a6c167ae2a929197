"""What windows beside each other say: the difference that a page makes, and between which bounds it
lies; pure.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

NONE = "no page"
QUANTILES = {
    1: 12.71,
    2: 4.303,
    3: 3.182,
    4: 2.776,
    5: 2.571,
    6: 2.447,
    8: 2.306,
    10: 2.228,
    15: 2.131,
    20: 2.086,
    30: 2.042,
    60: 2.0,
    120: 1.98,
}
"""97.5% of Student's t, by degrees of freedom; between two the wider."""

Window = Mapping[str, Any]
MOST_FOREIGN = 3.0
"""Percent of all processors that others may take in a window."""


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
) -> list[float]:
    """Of each window of a case the logarithm of a figure, less the mean of those of the two windows
    of the case `none` around it. For that itself: of every second one, less its neighbours of the
    same kind, which is 0 but for chance.

    windows: in the order in which they were, each with its `piece`; in a piece every second one is
    of `none`.
    """
    logs: list[float] = []
    step = 2 if case == none else 1
    for at in range(step, len(windows) - step):
        around = windows[at - step], windows[at + step]
        if windows[at]["case"] != case or any(window["case"] != none for window in around):
            continue
        if len({window["piece"] for window in (windows[at], *around)}) > 1 or (
            case == none and at // 2 % 2
        ):
            continue
        beside = [math.log(figure(window)) for window in around]
        logs.append(math.log(figure(windows[at])) - statistics.fmean(beside))
    return logs


def percent_less(values: Sequence[float]) -> tuple[float, float, float]:
    """By how many percent a figure is lower, and the bounds of that: from the logarithms of its
    ratios.
    """
    mean, low, high = (100 * (1 - math.exp(value)) for value in interval(values))
    return mean, high, low


def counting(windows: Sequence[Window]) -> list[Window]:
    """The same windows, with no case where others took too much of the machine, or no step was
    made.
    """
    return [
        (
            window
            if window["foreign"] <= MOST_FOREIGN and window["steps_per_s"] > 0
            else {**window, "case": ""}
        )
        for window in windows
    ]


def compared(counted: Sequence[Window], case: str, none: str = NONE) -> dict[str, Any]:
    """Columns of a table: how windows of a case differ from those of `none`; empty where there are
    none to compare.
    """
    slower = differences(counted, case, lambda window: float(window["steps_per_s"]), none)
    dearer = differences(counted, case, lambda window: float(window["cpu_per_step"]), none)
    if not slower:
        return {}
    less, low, high = percent_less(slower)
    more, more_high, more_low = (-ratio for ratio in percent_less(dearer))
    return {
        "steps_per_s": statistics.median(
            window["steps_per_s"] for window in counted if window["case"] == case
        ),
        "less_percent": round(less, 2),
        "interval_95": f"{low:.2f} to {high:.2f}",
        "cpu_more_percent": round(more, 2),
        "cpu_interval_95": f"{more_low:.2f} to {more_high:.2f}",
    }


def left_out(counted: Sequence[Window]) -> str:
    """How many windows do not count, and why; empty: all do."""
    lost = sum(not window["case"] for window in counted)
    why = (
        f"left out: {lost} of {len(counted)} windows, in which others took more than"
        f" {MOST_FOREIGN:.0f}%"
    )
    return why if lost else ""
