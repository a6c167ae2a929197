"""Who may speak to the processes of a run: keys where it listens at an address."""

import contextlib
import os
import socket
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import zmq

from dataflow.errors import GraphError, RunError
from transport.codec import MESSAGE_BYTES
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
    "Listener",
    "RunKeys",
    "again_at",
    "check_listen",
    "dealer_to",
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


def dealer_to(
    context: "zmq.Context[Any]",
    address: str,
    keys: RunKeys | None,
    options: Mapping[int, int | bytes] = {},
) -> "zmq.Socket[Any]":
    """A DEALER socket to who listens at an address, with the run's keys where it has them; before
    it connects. options: where they are others.
    """
    socket: zmq.Socket[Any] = context.socket(zmq.DEALER)
    for option, value in {**_usual(address), **options}.items():
        socket.set(option, value)
    if keys is not None:
        present(socket, keys.senders)
    return socket


def _usual(address: str) -> Mapping[int, int | bytes]:
    return {zmq.LINGER: 0, zmq.MAXMSGSIZE: MESSAGE_BYTES, zmq.IPV6: int("[" in address)}


class Listener:
    """A ROUTER socket at an address, for holders of the run's keys alone where it has them."""

    def __init__(
        self, who: str, address: str, keys: RunKeys | None, options: Mapping[int, int] = {}
    ) -> None:
        """who: listens, for people. options: of the socket, where they are others. Errors: RunError
        where nobody can listen there.
        """
        self._guard = None if keys is None else Guard(keys.receivers)
        self._context: zmq.Context[Any] = self._guard.context if self._guard else zmq.Context()
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        for option, value in {**_usual(address), **options}.items():
            self.socket.set(option, value)
        if self._guard is not None:
            self._guard.protect(self.socket)
        try:
            self.socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise RunError(
                f"{who} cannot listen at {address}: {error.strerror}; give an address of this"
                " machine (and no port, or one that nobody has)"
            ) from None
        self.address = reachable(self.socket.get_string(zmq.LAST_ENDPOINT))
        """With the port that it has."""

    def close(self) -> None:
        """Listen no more; waits at most for what is to leave within the socket's linger."""
        self.socket.close()
        if self._guard is not None:
            self._guard.close()
        else:
            self._context.term()
