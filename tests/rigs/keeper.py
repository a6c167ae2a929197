"""The keeper of a run's trackers with the priority of others: where a machine has much else to do,
its own gives it nothing, and a test that waits for a tracker would wait for that.
"""

import os
import subprocess
from pathlib import Path
from typing import Any

from dataflow.system.child import program
from dataflow.trackers import __main__ as keeper
from dataflow.trackers import following

TESTS = Path(__file__).parent.parent


def stays_in_front() -> None:
    """The trackers of this process's runs are kept so."""
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(TESTS), os.environ.get("PYTHONPATH", "")))
    )
    following.step_back = _as_it_is  # type: ignore[attr-defined]
    following.program = _started  # type: ignore[attr-defined]


def _as_it_is(pid: int = 0) -> None:
    pass


def _started(module: str, **given: Any) -> "subprocess.Popen[Any]":
    return program("rigs.keeper", **given)


if __name__ == "__main__":
    keeper.step_back = _as_it_is  # type: ignore[attr-defined]
    keeper.main()
