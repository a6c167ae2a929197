"""Connections between hosts that carry nothing any more are replaced soon after the network is
back.

Left to itself, TCP doubles the time between its tries, so that a network that was cut for t seconds
is felt for up to 2t. The kernel gives up a connection on which nothing was acknowledged for
`DEAD_MS`; ZeroMQ then tries to make another, each time for `CONNECT_MS`. It is kernels that
acknowledge: a process that is stopped, or busy, loses no connection. What was on its way is lost
with a connection, and whoever speaks over it says it again.
"""

from typing import Any

import zmq

from transport.security import HANDSHAKE_MS

HEARTBEAT_MS, SILENT_MS = 2_000, 10_000
"""Of ZeroMQ's own signs of life, which its thread gives while a worker computes for minutes:
without them a connection is given up and made again; TCP alone would wait for minutes after a
cut."""
DEAD_MS = 3_000
"""Without an acknowledgement for so long a connection is given up."""
CONNECT_MS = 500
"""For one try to make another; several round trips between hosts."""


def watch(socket: "zmq.Socket[Any]", address: str) -> None:
    """Have ZeroMQ notice that a connection is lost, of a socket that connects to an address, or
    listens there; before it does.
    """
    socket.set(zmq.IPV6, "[" in address)
    socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.set(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.set(zmq.HEARTBEAT_TIMEOUT, SILENT_MS)
    give_up_soon(socket, address)


def give_up_soon(socket: "zmq.Socket[Any]", address: str) -> None:
    """Of a socket that connects to an address, or listens there; before it does. Within a machine
    nothing is lost.
    """
    if address.startswith("tcp://"):
        socket.set(zmq.TCP_MAXRT, DEAD_MS)
        socket.set(zmq.CONNECT_TIMEOUT, CONNECT_MS)
