"""Who may speak to the processes of a run: keys where it listens at an address."""

import contextlib
import socket

from dataflow.errors import GraphError
from transport.security import (
    KEYS_BYTES,
    Guard,
    RunKeys,
    again_at,
    endpoint,
    give_up_soon,
    present,
    reachable,
)

__all__ = [
    "KEYS_BYTES",
    "Guard",
    "RunKeys",
    "again_at",
    "check_listen",
    "endpoint",
    "give_up_soon",
    "present",
    "reachable",
]


def check_listen(host: str) -> None:
    """Refuse a host at which this machine cannot listen. Errors: GraphError."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as trial:
            trial.bind(address)
    except (OSError, UnicodeError) as error:
        raise GraphError(
            f"the run is to listen at '{host}', but {error}; give an address of this machine, or"
            " leave listen= out to use sockets that only this machine's processes of this user can"
            " open"
        ) from None
