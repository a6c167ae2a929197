"""Who may speak to the processes of a run: keys where it listens at an address, and what counts as a word."""

import contextlib
import socket
from typing import Any

import msgpack

from dataflow.errors import GraphError
from transport.data.security import Guard, RunKeys, endpoint, present, reachable

__all__ = ["MESSAGE_BYTES", "Guard", "RunKeys", "check_listen", "endpoint", "present", "reachable", "word"]

MESSAGE_BYTES = 64 << 20
"""The largest message of the control plane that is taken; a whole beat has a few KiB."""

_FIELDS: dict[str, dict[str, type]] = {
    "hello": {"pid": int, "addresses": dict}, "done": {"ticket": int}, "failed": {"message": str},
    "beat": {"drained": bool, "nodes": dict, "edges": dict}, "stacks": {"threads": list},
}  # fmt: skip
"""What the words of workers carry at least."""


def word(data: bytes) -> dict[str, Any] | None:
    """A word of the control plane: a map with a kind and what belongs to it; None for all else."""
    try:
        found = msgpack.unpackb(data)
    except (ValueError, TypeError, msgpack.UnpackException):  # TypeError: a map whose keys are maps
        return None
    if not isinstance(found, dict) or not isinstance(found.get("kind"), str):
        return None
    needs = _FIELDS.get(found["kind"], {})
    return found if all(type(found.get(name)) is kind for name, kind in needs.items()) else None


def check_listen(host: str) -> None:
    """Refuse a host at which this machine cannot listen. Errors: GraphError."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as trial:
            trial.bind(address)
    except (OSError, UnicodeError) as error:
        raise GraphError(
            f"the run is to listen at '{host}', but {error}; give an address of this machine, or leave listen= out "
            f"to use sockets that only this machine's processes of this user can open"
        ) from None
