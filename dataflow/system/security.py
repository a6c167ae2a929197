"""Who may speak to the processes of a run: keys where it listens at an address."""

import contextlib
import os
import socket
import stat
from pathlib import Path

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
    "read_private",
]


def read_private(path: Path) -> bytes:
    """What a file holds that only this user may read, or root. Raises OSError, and ValueError where
    others may.
    """
    facts = path.stat()
    mode, owner = stat.S_IMODE(facts.st_mode), facts.st_uid
    if mode & 0o077 or owner not in (os.getuid(), 0):
        raise ValueError(f"others may read it, with mode {mode:04o} and owner {owner}")
    return path.read_bytes()


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
