"""The keeper of a run's trackers as a process: python -m dataflow.trackers FD, started by
`following`.
"""

import contextlib
import os
import socket
import sys
from typing import Any

from dataflow.folder.run_folder import RunFolder
from dataflow.system.channel import Channel
from dataflow.system.interrupts import leave_to_leader
from dataflow.system.messages import MessageError
from dataflow.system.priority import step_back
from dataflow.trackers import messages
from dataflow.trackers.keeper import SEND_S, TrackerKeeper
from dataflow.trackers.run_process import RunProcess

TURN_S = 0.2


def main() -> None:
    """The process ends with the run, or soon after nobody leads it by whom it was started."""
    step_back()
    leave_to_leader()
    run: Channel[Any] = Channel(
        socket.socket(fileno=int(sys.argv[1])), messages.KEEPER_CODEC, SEND_S
    )
    told = run.receive(SEND_S)
    assert isinstance(told, messages.KeepTrackers), "it is said first"

    def say(text: str) -> None:
        with contextlib.suppress(OSError):  # the disk may be full of which it speaks
            print(text, flush=True)
        with contextlib.suppress(OSError):
            run.send(messages.KeeperSays(text=text))

    limits, folder = told.limits, RunFolder.open(told.folder)
    keeper = TrackerKeeper(
        folder,
        told.trackers,
        say,
        limits=limits,
        path=told.path,
    )
    parent = RunProcess(folder, told.parent)
    try:
        while not keeper.is_done:
            keeper.turn(TURN_S)
            outcome = _outcome(run) if parent.is_there else "died"
            if outcome:
                keeper.end(outcome, limits.track_s)
    finally:
        keeper.close()
    os._exit(0)


def _outcome(run: Channel[Any]) -> str:
    """What the run says; empty: it goes on."""
    try:
        if run.readable(0.0):
            return next((m.outcome for m in run.arrived() if isinstance(m, messages.RunIsOver)), "")
    except (EOFError, OSError, MessageError):
        return "died"
    return ""


if __name__ == "__main__":
    main()
