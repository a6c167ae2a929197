"""Who may speak to the processes of a run: keys where it listens at an address, and what counts as a word."""

import contextlib
import socket
from typing import Any, TypeAlias

import msgpack

from dataflow.errors import GraphError
from transport.data.security import Guard, RunKeys, endpoint, present, reachable

__all__ = ["MESSAGE_BYTES", "Guard", "RunKeys", "check_listen", "endpoint", "present", "reachable", "word"]

MESSAGE_BYTES = 64 << 20
"""The largest message of the control plane that is taken; a whole beat has a few KiB."""

Shape: TypeAlias = "tuple[type, ...] | list[Shape] | dict[str, Shape]"
"""Of plain values: one of some types; a list of so many; a map with these names, those with `?` if they like, or, with
the one name `*`, with any."""

_WHOLE, _NUMBER = (int, bool), (int, bool, float)
_WHOLES = "step done dropped round version tokens scored failed restarts queue waiting active"
_STATUS: dict[str, Shape] = {**{f"{name}?": _WHOLE for name in _WHOLES.split()}, "eval_accuracy?": _NUMBER}
_REPORT: dict[str, Shape] = {
    "status": _STATUS, "seconds": {"busy": _NUMBER, "idle": _NUMBER, "blocked": _NUMBER}, "rows_in": (int,),
    "rows_out": (int,), "ended": (bool,), "blocked": (bool,),
}  # fmt: skip
_WORDS: dict[str, dict[str, Shape]] = {
    "hello": {"pid": (int,), "addresses": {"*": (str,)}}, "done": {"ticket": (int,)}, "failed": {"message": (str,)},
    "beat": {"drained": (bool,), "nodes": {"*": _REPORT}, "edges": {"*": [_NUMBER, _NUMBER]}, "turned_s?": _NUMBER,
             "asleep_s?": _NUMBER, "at?": (str,), "at_s?": _NUMBER},
    "stacks": {"threads": (list,)},
}  # fmt: skip
"""What the words of workers carry, as far as somebody relies on it."""


def word(data: bytes) -> dict[str, Any] | None:
    """A word of the control plane: a map with a kind and what belongs to it; None for all else."""
    try:
        found = msgpack.unpackb(data)
    except (ValueError, TypeError, msgpack.UnpackException):  # TypeError: a map whose keys are maps
        return None
    if not isinstance(found, dict) or not isinstance(found.get("kind"), str):
        return None
    return found if fits(found, {"attempt?": (int,), **_WORDS.get(found["kind"], {})}) else None


def fits(value: Any, shape: Shape) -> bool:
    """Whether a plain value is of a shape."""
    if isinstance(shape, tuple):
        return type(value) in shape
    if isinstance(shape, list):
        return isinstance(value, list) and len(value) == len(shape) and all(map(fits, value, shape))
    if not isinstance(value, dict):
        return False
    if "*" in shape:
        return all(isinstance(name, str) and fits(each, shape["*"]) for name, each in value.items())
    needs = ((name.removesuffix("?"), name.endswith("?"), each) for name, each in shape.items())
    return all(fits(value[name], each) if name in value else optional for name, optional, each in needs)


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
