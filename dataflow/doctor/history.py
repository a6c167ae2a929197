"""How long each node of each worker has been in its state: from one report to the next, the clock
given.
"""

import collections
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from dataflow.worker.state_clock import BESIDE, STATES

WINDOW_S = 3.0
"""Seconds that shares and states look back."""
_SHOWN = {"busy": "working"}
"""Names of states, where users see another."""
_COUNTS = ("step", "version", "tokens", "round", "issued", "scored", "copied_bytes")

Reports: TypeAlias = Mapping[str, Mapping[str, Any]]
"""By worker: {"state", "silent_s", "heartbeat"}; the last as the worker sent it."""


@dataclass
class _Past:
    state: str = "waiting"
    since: float = 0.0
    worked: float = 0.0
    """The time at which it was last seen to work."""
    sums: collections.deque[tuple[float, dict[str, float]]] = field(
        default_factory=collections.deque
    )


class History:
    """States and how long they have lasted.

    consumes: the heartbeats of all workers, a few times a second
    produces: by worker and node: state, for how long, shares of the last seconds
    waits for: nothing
    unblocked by: -
    """

    def __init__(self) -> None:
        self._past: dict[tuple[str, str], _Past] = {}

    def note(self, reports: Reports, now: float) -> None:
        """Take in the newest heartbeats."""
        for worker, report in reports.items():
            heartbeat = report["heartbeat"]
            for node, report_of_node in heartbeat.get("nodes", {}).items():
                self._note(
                    self._past.setdefault((worker, node), _Past(since=now)),
                    report_of_node,
                    heartbeat,
                    node,
                    now,
                )

    def plain(self, now: float) -> dict[str, dict[str, dict[str, Any]]]:
        """By worker, by node: {"state", "for_s"} and the share of each state, None where not known.

        for_s: in this state; of one that does not work, since it last did, if only for a moment.
        """
        pasts: dict[str, dict[str, dict[str, Any]]] = {}
        for (worker, node), past in self._past.items():
            spent = _spent(past)
            whole = sum(spent[state] for state in STATES)
            shares = {key: value / whole if whole else None for key, value in spent.items()}
            since = past.since if past.state == "working" else max(past.since, past.worked)
            pasts.setdefault(worker, {})[node] = {
                "state": past.state,
                "for_s": now - since,
                **shares,
            }
        return pasts

    def _note(
        self,
        past: _Past,
        report: Mapping[str, Any],
        heartbeat: Mapping[str, Any],
        node: str,
        now: float,
    ) -> None:
        if past.sums and report["seconds"]["busy"] > past.sums[-1][1]["busy"]:
            past.worked = now
        past.sums.append(
            (now, {key: float(report["seconds"].get(key, 0.0)) for key in (*STATES, BESIDE)})
        )
        while len(past.sums) > 2 and now - past.sums[1][0] > WINDOW_S:
            past.sums.popleft()
        state = _state(report, heartbeat.get("at") == node, _spent(past), past.state)
        if state != past.state:
            past.state, past.since = state, now


def marks(reports: Reports) -> tuple[tuple[Any, ...], ...]:
    """Marks that change when a run moves: rows, tokens, steps, versions, of every node of every
    worker.
    """
    return tuple(
        (
            worker,
            node,
            node_report["rows_in"],
            node_report["rows_out"],
            *(node_report["status"].get(key) for key in _COUNTS),
        )
        for worker, report in sorted(reports.items())
        for node, node_report in sorted(report["heartbeat"].get("nodes", {}).items())
    )


def busy(reports: Reports) -> float:
    """Seconds that all nodes have spent at work."""
    nodes = [
        node_report
        for report in reports.values()
        for node_report in report["heartbeat"].get("nodes", {}).values()
    ]
    return sum(float(node_report["seconds"]["busy"]) for node_report in nodes)


def _state(
    report: Mapping[str, Any], in_slice: bool, spent: Mapping[str, float], before: str
) -> str:
    if report["ended"] or report["status"].get("done"):
        return "done"
    if report.get("paused"):
        return "paused"
    if not any(spent.values()):
        return "working" if in_slice else before
    most = max(STATES, key=lambda state: spent[state])
    return _SHOWN.get(most, most)


def _spent(past: _Past) -> dict[str, float]:
    """Seconds of the window, by state."""
    first, last = past.sums[0][1], past.sums[-1][1]
    return {key: max(0.0, last[key] - first[key]) for key in last}


# When a run that does not move is to be warned of, and when it is to end: pure.

MOST_BETWEEN_S = 5.0
"""A longer pause between two looks counts as so many seconds."""

Decision: TypeAlias = Literal["fine", "slow", "stalled"]


@dataclass(frozen=True, kw_only=True)
class Stillness:
    """How long nothing has moved, as far as was seen."""

    marks: object = None
    """What moves: rows, tokens, steps, versions; of any type that can be compared."""
    looked: float | None = None
    """Time of the last look."""
    still_s: float = 0.0
    """Seconds without a change of marks."""
    idle_s: float = 0.0
    """Seconds without a change of marks, and with nobody at work."""

    def look(self, marks: object, at_work: bool, now: float) -> "Stillness":
        """The stillness after another look. at_work: somebody works, starts, or is started
        again.
        """
        passed = 0.0 if self.looked is None else min(max(0.0, now - self.looked), MOST_BETWEEN_S)
        if marks != self.marks:
            return Stillness(marks=marks, looked=now)
        return replace(
            self,
            looked=now,
            still_s=self.still_s + passed,
            idle_s=0.0 if at_work else self.idle_s + passed,
        )


def decide(stillness: Stillness, *, stall_s: float, slice_s: float) -> Decision:
    """slow: warn; stalled, at twice the limit: end the run."""
    part = max(stillness.idle_s / stall_s, stillness.still_s / slice_s)
    return "stalled" if part >= 2 else "slow" if part >= 1 else "fine"
