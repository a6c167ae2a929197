"""One sentence on a run that is over, from what its nodes did in all of it; pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from dataflow.display.formatting import duration


def told_of_the_end(
    outcome: str, passed_s: float, nodes: Sequence[Mapping[str, Any]], bound: str | None
) -> str:
    """How it ended, and which node bounded it, so that the others waited for it.

    nodes: each with its name and shares, as the page has them."""
    ended = {
        "finished": "The run has finished",
        "stopped": "The run was stopped",
        "failed": "The run has failed",
    }.get(outcome, "The run did not come to its end")
    if not passed_s:
        return f"{ended}."
    said = f"{ended} after {duration(passed_s)} of training"
    busy = {node["name"]: float(node["shares"]["busy"]) for node in nodes if node.get("shares")}
    return (
        f"{said}; '{bound}' bounded it, at work {busy[bound]:.0%} of the time."
        if bound in busy
        else f"{said}."
    )
