"""`dataflow doctor RUN`: asks the run, or reads what it left."""

import contextlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dataflow.doctor import ended, report
from dataflow.doctor.gather import describe_process, gather
from dataflow.errors import DeadlineError, RunError
from dataflow.folder.run_folder import RunFolder
from dataflow.folder.socket_folder import CONTROL
from dataflow.system import processes

ANSWER_S = 3.0
"""Seconds for a scheduler to answer."""
_STACKS_S = 1.5

Said = Mapping[str, Any]
"""What a scheduler knows of its run, in plain values."""
Ask = Callable[[RunFolder, float], Said]
"""Asks the scheduler of a run, for so many seconds: RunError when the run is over, DeadlineError
without an answer."""


def examine(run: str | Path, ask: Ask, *, all_stacks: bool = False) -> str:
    """The report on a run, whatever state it is in. Errors: RunFolderError when there is no such
    folder.
    """
    folder = RunFolder.open(run)
    try:
        answer = told(folder, ask)
    except RunError as error:
        return ended.report(folder, _scheduler(folder, error))
    return report.report(folder, gather(folder, answer), all_stacks=all_stacks)


def told(folder: RunFolder, ask: Ask, patience_s: float = _STACKS_S) -> Said:
    """What the scheduler says, asked until every worker that answers has told its stacks, or the
    time is up.

    Errors: RunError when the run is over, DeadlineError when the scheduler does not answer.
    """
    began = time.monotonic()
    answer = ask(folder, ANSWER_S)
    while time.monotonic() - began < patience_s and not _all_told(answer, time.monotonic() - began):
        time.sleep(0.1)
        with contextlib.suppress(DeadlineError):
            answer = ask(folder, ANSWER_S)
    return answer


def _all_told(answer: Said, since_s: float) -> bool:
    """Whether every worker with a heartbeat has sent its stacks within so many seconds."""
    live = [
        w
        for w in answer["workers"].values()
        if w["state"] in ("starting", "ready") and w["silent_s"] < 1.0
    ]
    return all(worker["threads"] and worker["threads_s"] <= since_s for worker in live)


def _scheduler(folder: RunFolder, error: RunError) -> str:
    """What is known of a scheduler that does not answer."""
    control = folder.read_json(CONTROL, {"pid": int, "machine": str})
    pid, machine = control.get("pid"), processes.machine()
    if pid is None or control.get("machine", machine) != machine:
        return "" if not isinstance(error, DeadlineError) else str(error)
    process = processes.look([int(pid)], 0.0)[int(pid)]
    if not process.state:
        return f"its scheduler (pid {pid}) has ended without an end of the run: it was killed"
    return f"its scheduler does not answer: {describe_process(process)}"
