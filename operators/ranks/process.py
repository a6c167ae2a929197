"""A rank behind rank 0, as a process: its end of the channel, its last words where it fails, its
leave of the group.
"""

from __future__ import annotations

import socket
import traceback
from collections.abc import Callable
from typing import Any

from dataflow.system.channel import Channel
from dataflow.system.interrupts import leave_to_leader
from dataflow.system.messages import Codec
from operators.ranks import group
from operators.ranks.exchange import send_failure


def run_rank(
    end: int, codec: Codec[Any], wait_s: float, work: Callable[[Channel[Any]], None]
) -> int:
    """Do this rank's work over the socket of this number; the exit status.

    wait_s: how long the other end may take to read. work: follows rank 0 to the end. What it raises
    is printed and told to rank 0, and the group is not left: the others may be gone, or wait in an
    exchange.
    """
    leave_to_leader()
    channel = Channel(socket.socket(fileno=end), codec, wait_s)
    try:
        work(channel)
    except Exception as error:
        traceback.print_exc()
        send_failure(channel, error)
        return 1
    finally:
        channel.close()
    group.leave()
    return 0
