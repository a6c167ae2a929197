"""The figures of a run that are told beside those of another: from its lines and times, pure."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from dataflow.folder.faults import restarts
from dataflow.folder.run_folder import RunFolder
from dataflow.history.bottleneck import bounded
from dataflow.history.describe import described
from dataflow.history.resume import TIMES
from dataflow.history.summary import window_of
from dataflow.runs.tables import Lines, fault_lines, series


@dataclass(frozen=True)
class Course:
    """How one figure went."""

    first: float
    last: float
    best: float
    steps: int = 1
    """That each of them is the mean of."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Those of one run; None: not known."""

    steps: int
    seconds: float | None
    """Of training."""
    step_s: float | None
    """Median seconds from one step to the next, without the first tenth."""
    rollouts: int
    rollouts_per_s: float | None
    tokens_per_s: float | None
    """Trained, the median of the steps without the first tenth."""
    accuracy: Course | None
    reward: Course | None
    """Means over the first and the last steps, as many as `window_of` says; the best running
    one."""
    loss: Course | None
    """The same; the best is the least."""
    staleness_mean: float | None
    staleness_max: float | None
    efficiency: float | None
    """Share of the seconds in which what bounds the run was at work."""
    bounded_by: str
    """The node that bounds it."""
    dropped: int
    """Groups."""
    faults: int
    restarts: int


def figures_of(folder: RunFolder, lines: Lines, window: int | None = None) -> Figures:
    """Those of the run in a folder. lines: as `read_lines` has them. window: as for `figures`."""
    times = folder.read_json("times.json", TIMES)
    return figures(
        lines.steps,
        lines.evaluations,
        times,
        described(folder)[1],
        faults=len(fault_lines(folder)),
        restarts=restarts(folder.path),
        window=window,
    )


def figures(
    steps: Sequence[Mapping[str, Any]],
    evaluations: Sequence[Mapping[str, Any]],
    times: Mapping[str, Any],
    config: Mapping[str, Any],
    *,
    faults: int = 0,
    restarts: int = 0,
    window: int | None = None,
) -> Figures:
    """From lines of metrics.jsonl, times.json and config.json.

    window: steps of a mean at begin and end, the same for runs that are compared; None: `window_of`
    these steps.
    """
    window = window_of(len(steps)) if window is None else window
    full = steps[len(steps) // 10 :]
    # From one step to the next: a run that was resumed, or made steps again, has gaps.
    ends = [value for _, value in series(full, "seconds")]
    pauses = [after - before for before, after in pairwise(ends) if after > before]
    seconds = times.get("seconds") or None
    rollouts = sum(int(value) for _, value in series(steps, "rollouts"))
    bound = bounded(
        seconds, times.get("busy_seconds") or {}, times.get("beside_seconds") or {}, config
    )
    accuracy = [value for _, value in series(evaluations, "eval_accuracy")]
    stale = [value for _, value in series(steps, "staleness_mean")]
    return Figures(
        steps=len(steps),
        seconds=seconds,
        step_s=statistics.median(pauses) if pauses else None,
        rollouts=rollouts,
        rollouts_per_s=rollouts / seconds if seconds and rollouts else None,
        tokens_per_s=_median([value for _, value in series(full, "trained_tokens_per_s")]),
        accuracy=Course(accuracy[0], accuracy[-1], max(accuracy)) if accuracy else None,
        reward=_course([value for _, value in series(steps, "reward_mean")], max, window),
        loss=_course([value for _, value in series(steps, "loss")], min, window),
        staleness_mean=statistics.fmean(stale) if stale else None,
        staleness_max=max((value for _, value in series(steps, "staleness_max")), default=None),
        efficiency=bound.share if bound else None,
        bounded_by=bound.node if bound else "",
        dropped=sum(_count(line.get("dropped")) for line in steps),
        faults=faults,
        restarts=restarts,
    )


def _course(values: Sequence[float], best: Any, window: int) -> Course | None:
    if not values:
        return None
    window = min(window, len(values))
    means = [
        statistics.fmean(values[at : at + window])
        for at in range(0, len(values) - window + 1, window)
    ]
    last = statistics.fmean(values[-window:])
    return Course(statistics.fmean(values[:window]), last, best([*means, last]), window)


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _count(dropped: Any) -> int:
    return (
        sum(value for value in dropped.values() if isinstance(value, int))
        if isinstance(dropped, dict)
        else 0
    )
