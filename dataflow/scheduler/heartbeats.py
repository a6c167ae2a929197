"""Sums over the heartbeats of all attempts of one worker, as plain values for the display and the
doctor."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from dataflow.scoring.failure import BY_CAUSE
from dataflow.worker.messages import Heartbeat, NodeReport

_COUNTERS = (
    "tokens",
    "scored",
    "failed",
    "does_not_apply",
    "restarts",
    "turns",
    "played",
    "retried",
    "world_s",
)
"""What a node's status counts from 0 in each process; all else in it is how things stand."""
_COUNTED = (BY_CAUSE, "decode_")
"""What others of them begin with."""

Told = Mapping[str, Any]
"""A heartbeat, in plain values; empty where there was none."""


def together(earlier: Told, now: Heartbeat | None) -> Told:
    """A heartbeat whose sums are those of both; what is known only of earlier attempts stays as it
    was."""
    nodes = dict(earlier.get("nodes", {}))
    for name, known in nodes.items():
        nodes[name] = {**known, "blocked": False, "starved": False, "ended": False, "turn": ""}
    if now is None:
        return {**earlier, "nodes": nodes}
    for name, report in now.nodes.items():
        plain = {each.name: getattr(report, each.name) for each in fields(NodeReport)}
        nodes[name] = _added(nodes[name], plain) if name in nodes else plain
    return {
        **earlier,
        **{each.name: getattr(now, each.name) for each in fields(Heartbeat)},
        "nodes": nodes,
    } | {"crossed": {**earlier.get("crossed", {}), **now.crossed}}


def _added(before: Told, report: dict[str, Any]) -> dict[str, Any]:
    status = dict(report["status"])
    for key, count in before["status"].items():
        if key in _COUNTERS or key.startswith(_COUNTED):
            status[key] = status.get(key, 0) + count
    return report | {
        "status": status,
        "seconds": {
            key: value + before["seconds"].get(key, 0.0) for key, value in report["seconds"].items()
        },
        **{key: report[key] + before[key] for key in ("rows_in", "rows_out", "measured_s")},
    }
