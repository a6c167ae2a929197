"""The numbers of a run over its steps: read as they come, kept in columns, given as few points."""

import collections
import math
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dataflow.draw.charts import ACCURACY_NAME, LEAST_POINTS, decimate, running_mean
from dataflow.folder.run_folder import RunFolder
from dataflow.history.bottleneck import bounded
from dataflow.history.describe import described
from dataflow.runs.pictures import DOZEN, FIGURES

MOST_SERIES = 600
MOST_POINTS = 4_000_000
"""Of all series of a run that are kept: 64 MB."""
LOOK_S = 0.5
"""For one look: a long file is read in several."""
DEPTH = 3
"""Of maps within a line whose numbers are series of their own."""
SHOWN_POINTS, SHOWN_S, LATE_S = 600, 2.0, 10.0
"""Of a chart, where nobody says how many. So many seconds after something new the next is shown at
the earliest; so many after, where it is less than a point."""
_NOT_SERIES = ("step", "node", "seconds", "version")
SMOOTHED = 20
"""From so many points on a running mean stands beside them."""


@dataclass
class Series:
    """One number of one node."""

    node: str
    name: str
    steps: "array[float]" = field(default_factory=lambda: array("d"))
    values: "array[float]" = field(default_factory=lambda: array("d"))
    missing: int = 0
    """Steps at which it was there, and no finite number."""

    def put(self, step: float, value: float) -> None:
        """One more point."""
        if math.isfinite(value):
            self.steps.append(step)
            self.values.append(value)
        else:
            self.missing += 1

    def back_to(self, step: float) -> None:
        """Forget what was at this step and after it."""
        while self.steps and self.steps[-1] >= step:
            self.steps.pop()
            self.values.pop()

    def halve(self) -> None:
        """Keep half of the points: those that stand out."""
        xs, ys = decimate(np.array(self.steps), np.array(self.values), max(4, len(self.steps) // 2))
        self.steps, self.values = array("d", xs.tolist()), array("d", ys.tolist())


class Metrics:
    """What metrics.jsonl and activity.jsonl of one run say, as far as they are read.

    A step that is made again, after a return to a checkpoint, takes the place of what stood there
    and after it; where that was so, `restarts` knows.
    """

    def __init__(self, folder: RunFolder, most_points: int = MOST_POINTS) -> None:
        self._folder, self._most = folder, most_points
        self._series: dict[tuple[str, str], Series] = {}
        self._read = self._read_activity = 0
        self._last: dict[tuple[str, bool], float] = {}
        self._before: dict[str, Any] | None = None
        self._config: Mapping[str, Any] = {}
        self.restarts: list[int] = []
        self.rounds: list[int] = []
        """Steps of evaluations."""
        self.newest: dict[str, dict[str, Any]] = {}
        """By node the last line about a step."""
        self.changes = 0
        """Grows with every line that is taken in."""
        self._shown = 0, float("-inf")
        """`changes` as pages know it, since when."""
        self.left_out = 0
        """Numbers that are no series, since there are too many."""

    def look(self, budget_s: float = LOOK_S) -> float:
        """Take in what was added, for at most so long; which share of metrics.jsonl is read: 1 when
        there is no more, though its last line may be half written.
        """
        size = self._folder.metrics.stat().st_size if self._folder.metrics.is_file() else 0
        if size < self._read:  # another run's file stands there now
            self.__init__(self._folder, self._most)  # type: ignore[misc]
        deadline = time.monotonic() + budget_s
        for place, line in self._folder.stream_metrics(self._read):
            self._read = place
            self.take(line)
            if time.monotonic() > deadline:
                return min(1.0, self._read / size)
        self._look_at_activity()
        return 1.0

    def take(self, line: Mapping[str, Any]) -> None:
        """Take in a line of metrics.jsonl."""
        step = line.get("step")
        if isinstance(step, bool) or not isinstance(step, int | float) or not math.isfinite(step):
            return
        node, judged = str(line.get("node", "")), ACCURACY_NAME in line
        last = self._last.get((node, judged))
        self._last[node, judged] = step
        if last is not None and step <= last:
            for (owner, _), series in self._series.items():
                if owner == node:
                    series.back_to(step)
            if not judged:
                self.restarts.append(int(step))
        if judged and int(step) not in self.rounds[-8:]:
            self.rounds.append(int(step))
        if not judged:
            self.newest[node] = dict(line)
        for name, value in numbers(line):
            self._put(node, name, step, value)
        self.changes += 1

    def shown(self) -> int:
        """`changes` as pages know it: what charts show is as new as that, or newer."""
        shown, since = self._shown
        passed, is_point = time.monotonic() - since, (self.changes - shown) * SHOWN_POINTS >= shown
        if self.changes != shown and passed >= (SHOWN_S if is_point else LATE_S):
            self._shown = self.changes, time.monotonic()
        return self._shown[0]

    def names(self) -> list[dict[str, Any]]:
        """Of each series its key, what it is called, its last value, and whether it is among those
        shown first.
        """
        count = collections.Counter(name for _, name in self._series)
        ranks = {figure.name: rank for rank, figure in enumerate(FIGURES)}
        with_points = [key for key, series in self._series.items() if series.steps]
        keys = sorted(with_points, key=lambda key: (ranks.get(key[1], len(ranks)), key[1], key[0]))
        first = [key for key in keys if key[1] in ranks][:DOZEN]
        return [
            {
                "key": f"{node}/{name}",
                "label": f"{name} · {node}" if count[name] > 1 else name,
                "last": self._series[node, name].values[-1],
                "points": len(self._series[node, name].values),
                "missing": self._series[node, name].missing,
                "first": (node, name) in first,
                "says": FIGURES[ranks[name]].title if name in ranks else "",
            }
            for node, name in keys
        ]

    def points(
        self, key: str, most: int, begin: float = -math.inf, end: float = math.inf
    ) -> dict[str, Any]:
        """At most so many points of a series between two steps, and of its running mean a third as
        many.

        Errors: LookupError where there is none.
        """
        node, _, name = key.partition("/")
        series = self._series.get((node, name))
        if series is None:
            raise LookupError(f"this run has no series '{key}'")
        xs, ys = np.array(series.steps), np.array(series.values)
        inside = slice(
            int(np.searchsorted(xs, begin, "left")), int(np.searchsorted(xs, end, "right"))
        )
        whole = int(inside.stop - inside.start)
        points: dict[str, Any] = {"of": whole, "missing": series.missing, "mean": None}
        if whole >= SMOOTHED and name != ACCURACY_NAME:
            means = running_mean(ys)[inside]
            points["mean"] = [
                axis.tolist() for axis in decimate(xs[inside], means, max(LEAST_POINTS, most // 3))
            ]
        xs, ys = decimate(xs[inside], ys[inside], most)
        return points | {"steps": xs.tolist(), "values": ys.tolist()}

    def _put(self, node: str, name: str, step: float, value: float) -> None:
        series = self._series.get((node, name))
        if series is None:
            if len(self._series) >= MOST_SERIES:
                self.left_out += 1
                return
            series = self._series[node, name] = Series(node, name)
        if series.steps and step < series.steps[-1]:
            series.back_to(step)
        series.put(step, value)
        if (
            self.changes % 1000 == 0
            and sum(len(series.steps) for series in self._series.values()) > self._most
        ):
            for other_series in self._series.values():
                other_series.halve()

    def _look_at_activity(self) -> None:
        """Shares of the time at work, from what lies between two lines of activity.jsonl."""
        for place, line in self._folder.stream_activity(self._read_activity):
            self._read_activity = place
            before, step = self._before, _step(line)
            if before is None or not 0 <= _step(before) < step:
                if before is None or _step(before) != step:
                    # the first one, or of a run that was taken up at an earlier step
                    self._before = line
                continue
            self._before = line
            self._between(before, line, step)

    def _between(self, before: Mapping[str, Any], line: Mapping[str, Any], step: float) -> None:
        nodes, old = line["nodes"], before["nodes"]
        passed = _number(line.get("seconds")) - _number(before.get("seconds"))
        if not passed > 0:
            return
        shares: dict[str, dict[str, float]] = {"busy": {}, "beside": {}}
        for node, figures in nodes.items():
            if isinstance(figures, dict) and isinstance(old.get(node), dict):
                for state, share_by_node in shares.items():
                    spent = _number(figures.get(state)) - _number(old[node].get(state))
                    share = spent / passed / max(1.0, _number(figures.get("replicas")))
                    if share >= 0:  # less: it was started anew
                        share_by_node[str(node)] = min(1.0, share)
        for node, share in shares["busy"].items():
            self._put(node, "busy_share", step, share)
        self._config = self._config or described(self._folder)[1]
        beside = {node: share for node, share in shares["beside"].items() if node in shares["busy"]}
        if (bound := bounded(1.0, shares["busy"], beside, self._config)) is not None:
            self._put("", "efficiency", step, bound.share)


def numbers(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers in a line, those within maps by a path: `dropped.stale`; null, which stood for
    NaN, is NaN again.
    """
    for name, value in line.items():
        if name not in _NOT_SERIES and name != "by_staleness":
            yield from _flat(name, value, DEPTH)


def _flat(name: str, value: Any, depth: int) -> Iterable[tuple[str, float]]:
    if isinstance(value, bool):
        return
    if value is None:
        yield name, math.nan
    elif isinstance(value, int | float):
        yield name, _number(value)
    elif isinstance(value, dict) and depth:
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}", inner, depth - 1)


def _step(line: Mapping[str, Any]) -> float:
    """The furthest that a node has come in a line of activity.jsonl; below 0: none says so."""
    nodes = line.get("nodes")
    figures = nodes.values() if isinstance(nodes, dict) else ()
    steps = [_number(node["step"]) for node in figures if isinstance(node, dict) and "step" in node]
    return max((step for step in steps if math.isfinite(step)), default=-1.0)


def _number(value: Any) -> float:
    try:
        return float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return math.inf
