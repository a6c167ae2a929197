"""One sentence on a run that is over, from what its nodes did in all of it; pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from dataflow.display.formatting import duration

_CLOSE = 0.05
"""Shares that differ by less are alike."""


def told_of_the_end(outcome: str, passed_s: float, nodes: Sequence[Mapping[str, Any]]) -> str:
    """How it ended, and which node was at work most, so that the others waited for it.

    nodes: each with its name and shares, as the page has them."""
    ended = {
        "finished": "The run has finished", "stopped": "The run was stopped", "failed": "The run has failed",
    }.get(outcome, "The run did not come to its end")  # fmt: skip
    if not passed_s:
        return f"{ended}."
    busy = {str(node["name"]): float(node["shares"]["busy"]) for node in nodes if node.get("shares")}
    most = max(busy.values(), default=0.0)
    said = f"{ended} after {duration(passed_s)} of training"
    first = [name for name, share in busy.items() if most and share > most - _CLOSE]
    if not first:
        return f"{said}."
    names = f"'{first[0]}'" if len(first) == 1 else f"{', '.join(map(repr, first[:-1]))} and {first[-1]!r}"
    return f"{said}; {names} {'was' if len(first) == 1 else 'were'} at work most: {most:.0%} of the time."
