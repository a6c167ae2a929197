"""Connections between hosts that carry nothing any more are replaced soon after the network is back.

Left to itself, TCP doubles the time between its tries, so that a network that was cut for t seconds is felt for up to
2t. The kernel gives up a connection on which nothing was acknowledged for `DEAD_MS`; ZeroMQ then tries to make another,
each time for `CONNECT_MS`. It is kernels that acknowledge: a process that is stopped, or busy, loses no connection.
What was on its way is lost with a connection, and whoever speaks over it says it again.
"""

from typing import Any

import zmq

DEAD_MS = 3_000
"""Without an acknowledgement for so long a connection is given up."""
CONNECT_MS = 500
"""For one try to make another; several round trips between hosts."""


def give_up_soon(socket: "zmq.Socket[Any]", address: str) -> None:
    """Of a socket that connects to an address, or listens there; before it does. Within a machine nothing is lost."""
    if address.startswith("tcp://"):
        socket.set(zmq.TCP_MAXRT, DEAD_MS)
        socket.set(zmq.CONNECT_TIMEOUT, CONNECT_MS)
