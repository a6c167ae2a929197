"""Commands to a run that is under way: how one is asked, and how the scheduler answers."""

import errno
import secrets
import socket
import stat
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgpack
import zmq

from dataflow.errors import DataflowError, DeadlineError, RunError
from dataflow.folder.run_folder import RunFolder
from dataflow.folder.socket_folder import CONTROL

ANSWER_S = 10.0
_LOOK_MS = 1000
"""Between two looks whether the scheduler lives: long enough for another that takes its place."""

Replicas = dict[str, dict[str, int]]
"""By node: how many replicas are joining, live, leaving."""


Said = dict[str, Any]
"""What a scheduler knows of its run, in plain values: `dataflow.doctor.gather` makes facts of it."""


def answer(
    message: Any, scale: Callable[[Mapping[str, int]], Replicas], facts: Callable[[], Said], stop: Callable[[], None]
) -> dict[str, Any]:
    """What the scheduler says to somebody who is no worker: its answer, or why there is none."""
    kind = message.get("kind") if isinstance(message, dict) else None
    if kind == "facts":
        return {"facts": facts()}
    if kind == "stop":
        stop()
        return {"stops": True}
    wishes = message.get("wishes") if kind == "scale" else None
    if not isinstance(wishes, dict) or not all(_is_wish(node, count) for node, count in wishes.items()):
        return {"error": f"a command is a map of nodes and whole numbers, but the run got {message!r:.200}; see --help"}
    try:
        return {"replicas": scale(wishes)}
    except DataflowError as error:
        return {"error": str(error)}


def ask_to_scale(folder: RunFolder, wishes: Mapping[str, int], timeout_s: float = ANSWER_S) -> Replicas:
    """Ask the run in a folder for so many replicas of some nodes; what it has, once it has taken the wish in.

    Raises RunError when the run is over or refuses, DeadlineError when it does not answer in time.
    """
    said = _exchange(folder, {"kind": "scale", "wishes": dict(wishes)}, timeout_s)
    found: Replicas = said["replicas"]
    return found


def ask_to_stop(folder: RunFolder, timeout_s: float = ANSWER_S) -> None:
    """Ask the run in a folder to finish the step under way, write a checkpoint and end; returns when it will.

    Raises RunError when the run is over, DeadlineError when it does not answer in time.
    """
    _exchange(folder, {"kind": "stop"}, timeout_s)


def ask_for_facts(folder: RunFolder, timeout_s: float = ANSWER_S) -> Said:
    """Ask the run in a folder what it knows of itself; it asks its workers for their stacks, which come later.

    Raises RunError when the run is over, DeadlineError when it does not answer in time.
    """
    found: Said = _exchange(folder, {"kind": "facts"}, timeout_s)["facts"]
    return found


def _exchange(folder: RunFolder, message: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
    """Send one command and wait for what is said to it, unless nobody is there to say anything. Raises as
    `ask_to_scale`."""
    address = _address(folder)
    deadline = time.monotonic() + timeout_s
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.set(zmq.IDENTITY, f"command-{secrets.token_hex(8)}".encode())
    dealer.set(zmq.LINGER, 0)
    try:
        dealer.connect(address)
        dealer.send(msgpack.packb(dict(message)))
        while not dealer.poll(min(_LOOK_MS, int(timeout_s * 1000))):
            if not listens(Path(_address(folder).removeprefix("ipc://"))):
                raise RunError(
                    f"the scheduler of '{folder.path.name}' has died; dataflow resume takes over the workers that it "
                    f"left; without that they finish their step, write a checkpoint and end within a minute or two"
                )
            if time.monotonic() >= deadline:
                raise DeadlineError(
                    f"'{folder.path.name}' has not answered within {timeout_s:.0f} s; it may have just ended, or its "
                    f"scheduler is stopped; look at its display, and ask again"
                )
        said: dict[str, Any] = msgpack.unpackb(dealer.recv())
    finally:
        dealer.close()
        context.term()
    if "error" in said:
        raise RunError(said["error"])
    return said


def listens(path: Path) -> bool:
    """Whether some process has the socket with this name open. It does not notice: the question is of another kind."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asks:
        try:
            if stat.S_ISSOCK(path.lstat().st_mode):
                asks.connect(str(path))
        except OSError as error:
            return error.errno not in (errno.ECONNREFUSED, errno.ENOENT)
    return False


def _address(folder: RunFolder) -> str:
    address = str(folder.read_json(CONTROL).get("address", ""))
    if not address.startswith("ipc://") or not Path(address.removeprefix("ipc://")).exists():
        raise RunError(
            f"'{folder.path.name}' takes no commands: it is over, or it runs in one process; "
            f"name the folder of a run that is under way, such as runs/latest"
        )
    return address


def _is_wish(node: object, count: object) -> bool:
    return isinstance(node, str) and isinstance(count, int) and not isinstance(count, bool)
