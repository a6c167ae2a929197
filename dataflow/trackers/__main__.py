"""One tracker of a run as a process: python -m dataflow.trackers FD, started by `children`."""

import os
import socket
import sys
from typing import Any

from dataflow.system.interrupts import leave_to_leader
from dataflow.system.messages import Channel
from dataflow.system.priority import step_back
from dataflow.trackers.chosen import SEND_S, TRACKER_CODEC, TrackRun


def main() -> None:
    """Tell the tracker that the first message names, until the run is over or nobody leads it."""
    leave_to_leader()
    channel: Channel[Any] = Channel(socket.socket(fileno=int(sys.argv[1])), TRACKER_CODEC, SEND_S)
    order = channel.receive(SEND_S)
    assert isinstance(order, TrackRun), "it is said first"
    if order.steps_back:
        step_back()
    from dataflow.trackers.process import track  # at the priority of a tracker

    os._exit(track(order, channel))


if __name__ == "__main__":
    main()
