"""What the scheduler of a run under way says."""

from typing import Any


def told(rows: int, busy: float) -> dict[str, Any]:
    """rows: that the generator has taken in. busy: seconds."""
    heartbeat = {
        "nodes": {
            "generator": {
                "seconds": {"busy": busy, "waiting": 1.0, "blocked": 0.0, "starved": 0.0},
                "measured_s": 2 * busy,
                "rows_in": rows,
                "rows_out": rows * 8,
                "status": {"version": 3},
                "ended": False,
                "blocked": False,
            }
        },
        "edges": {"prompts>generator:prompts": [4, 8]},
        "crossed": {
            "file": {
                "prompts>generator:prompts": {
                    "sent": [rows, rows, rows * 100],
                    "received": [rows, rows, rows * 100],
                    "acknowledged": [rows, rows - 4, rows * 90],
                }
            }
        },
    }
    worker = {
        "state": "ready",
        "pid": 0,
        "silent_s": 0.1,
        "heartbeat": heartbeat,
        "nodes": ["generator"],
    }
    return {
        "phase": "training",
        "draining": False,
        "step": 6,
        "steps": 9,
        "still_s": 0.2,
        "pid": 0,
        "history": {},
        "workers": {"generator-0": worker},
    }
