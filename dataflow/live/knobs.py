"""Which knobs of a run may change while it goes on, with the values that hold now."""

from typing import Any

from dataflow.folder.knob_changes import of_operators, read_changes
from dataflow.folder.run_folder import RunFolder
from dataflow.folder.swaps import latest, read_swaps
from dataflow.history.describe import described
from dataflow.system.files import to_json


def settable_now(folder: RunFolder) -> dict[str, list[dict[str, str]]]:
    """By node, its knobs: name, value as one types it, and from when on another one counts."""
    declared, swaps = described(folder)[1].get("settable"), latest(read_swaps(folder))
    known = dict(declared) if isinstance(declared, dict) else {}
    known |= {swap.node: dict(swap.knobs) for swap in swaps}
    changed = {
        (each.node, each.knob): each.value for each in of_operators(read_changes(folder), swaps)
    }
    found: dict[str, list[dict[str, str]]] = {}
    for node, knobs in known.items():
        found[node] = [
            {
                "name": knob,
                "value": _typed(changed.get((node, knob), told.get("value"))),
                "at": str(told.get("at", "")),
            }
            for knob, told in knobs.items()
        ]
    return found


def _typed(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return to_json(value) if isinstance(value, list) else str(value)
