"""Requests to a run that is under way: how one is made, and how the scheduler answers."""

import errno
import secrets
import socket
import stat
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import zmq

from dataflow.agent.rendezvous import KEYS_FILE, Rendezvous
from dataflow.errors import DataflowError, DeadlineError, RunError
from dataflow.folder.run_folder import RunFolder
from dataflow.folder.socket_folder import CONTROL
from dataflow.system.messages import Codec, Message, MessageError, Natural, Plain, Refused
from dataflow.system.processes import user_here
from dataflow.system.security import RunKeys, dealer_to

ANSWER_S = 10.0
SWAPPED_S = 45.0
"""Seconds to try an operator, and to start a worker with it."""
CHECKPOINT_S = 55.0
"""Seconds for a step to end and a checkpoint to be written; a longer wait is reported before."""
R = TypeVar("R")
_LOOK_MS = 1000
"""Seconds between two checks whether the scheduler lives: long enough for another to take its
place."""

Replicas = Mapping[str, Mapping[str, int]]
"""By node: how many replicas are joining, live, leaving."""
Facts = dict[str, Any]
"""What a scheduler knows of its run, in plain values: `dataflow.doctor.facts` makes facts of
it."""


class Scale(Message):
    """Let nodes have so many replicas."""

    wishes: Mapping[str, Natural]
    by: str = ""
    """The requester, as user@host."""


class TellFacts(Message):
    """Say what you know of the run."""

    stacks: bool = True
    """Ask the workers for their stacks as well, which come later."""


class StopRun(Message):
    """Finish the step under way, write a checkpoint and end."""

    by: str = ""
    """The requester, as user@host."""


class SwapNode(Message):
    """Let another operator take the place of a scorer."""

    node: str
    reference: str
    """MODULE:ATTRIBUTE, as the run's program would import it."""
    by: str
    """The requester, as user@host."""


class SetKnobs(Message):
    """Let knobs have other values."""

    wishes: Mapping[str, Plain]
    """By NODE.KNOB."""
    by: str
    """The requester, as user@host."""


class KeepCheckpoint(Message):
    """Let each trainer write a checkpoint that stays, after the step under way."""

    by: str
    """The requester, as user@host."""


class Scaled(Message):
    """The request is accepted; the replicas that the nodes have."""

    replicas: Replicas


class FactsTold(Message):
    """As `Facts`."""

    facts: Plain


class Stopping(Message):
    """The run will end."""


class Swapped(Message):
    """The operator is in place, or about to be."""

    text: str
    """Text for the user."""


class KnobsSet(Message):
    """The values count, or will at their next boundary."""

    text: str
    """Text for the user."""


class CheckpointKept(Message):
    """The checkpoint is written, or will be."""

    text: str
    """Text for the user."""


Immediate: TypeAlias = Scale | TellFacts | StopRun
"""Requests that are answered at once."""
Wish: TypeAlias = Scale | StopRun | SwapNode | SetKnobs | KeepCheckpoint
"""Requests that would change a run."""
Request: TypeAlias = TellFacts | Wish
Reply: TypeAlias = Scaled | FactsTold | Stopping | Swapped | KnobsSet | CheckpointKept | Refused
REQUESTS: Codec[Request] = Codec(
    "dataflow.requests", 4, Scale, TellFacts, StopRun, SwapNode, SetKnobs, KeepCheckpoint
)
REPLIES: Codec[Reply] = Codec(
    "dataflow.replies", 2, Scaled, FactsTold, Stopping, Swapped, KnobsSet, CheckpointKept, Refused
)


def answer(
    request: Immediate,
    scale: Callable[[Mapping[str, int]], Replicas],
    facts: Callable[[bool], Facts],
    stop: Callable[[], None],
) -> Reply:
    """The scheduler's reply to an invalid request."""
    match request:
        case TellFacts():
            return FactsTold(facts(request.stacks))
        case StopRun():
            stop()
            return Stopping()
        case Scale():
            try:
                return Scaled(scale(request.wishes))
            except DataflowError as error:
                return Refused(str(error))


def in_short(request: Wish) -> str:
    """A request as text."""
    match request:
        case Scale():
            return ", ".join(
                f"{node} = {count} replica{'s' * (count != 1)}"
                for node, count in request.wishes.items()
            )
        case StopRun():
            return "stop after the step under way"
        case SwapNode():
            return f"{request.node} = {request.reference}"
        case SetKnobs():
            return ", ".join(f"{place} = {value}" for place, value in request.wishes.items())
        case KeepCheckpoint():
            return "a checkpoint after the step under way"


def outcome(reply: Reply) -> str:
    """The outcome as text."""
    match reply:
        case Refused():
            return reply.error
        case Swapped() | KnobsSet() | CheckpointKept():
            return reply.text
        case Scaled():
            return "; ".join(told_replicas(reply.replicas))
        case Stopping():
            return "it ends after the step under way"
        case FactsTold():
            return "told"


def told_replicas(replicas: Replicas) -> list[str]:
    """A line for each node."""
    counts = {
        node: [f"{n} {how}" for how, n in states.items() if n] for node, states in replicas.items()
    }
    return [f"{node}: {', '.join(texts)}" for node, texts in counts.items()]


def ask_to_scale(
    folder: RunFolder, wishes: Mapping[str, int], timeout_s: float = ANSWER_S, by: str | None = None
) -> Replicas:
    """Ask the run in a folder for so many replicas of some nodes; what it has, once it has taken
    the wish in.

    by: who asks; None: `user_here()`. Raises RunError when the run is over or refuses,
    DeadlineError when it does not answer in time.
    """
    return _exchange(
        folder, Scale(wishes, user_here() if by is None else by), Scaled, timeout_s
    ).replicas


def ask_to_stop(folder: RunFolder, timeout_s: float = ANSWER_S, by: str | None = None) -> None:
    """Ask the run in a folder to finish the step under way, write a checkpoint and end; returns
    when it will.

    by: as for `ask_to_scale`. Raises RunError when the run is over, DeadlineError when it does not
    answer in time.
    """
    _exchange(folder, StopRun(user_here() if by is None else by), Stopping, timeout_s)


def ask_to_swap(
    folder: RunFolder,
    node: str,
    reference: str,
    timeout_s: float = SWAPPED_S,
    by: str | None = None,
) -> str:
    """Ask the run in a folder to let another operator take the place of a scorer or filter; what
    came of it.

    by: as for `ask_to_scale`. Raises RunError when the run is over or refuses, DeadlineError when
    it does not answer in time.
    """
    return _exchange(
        folder, SwapNode(node, reference, user_here() if by is None else by), Swapped, timeout_s
    ).text


def ask_to_set(
    folder: RunFolder,
    wishes: Mapping[str, Any],
    timeout_s: float = SWAPPED_S,
    by: str | None = None,
) -> str:
    """Ask the run in a folder to let knobs have other values, by NODE.KNOB; what came of it.

    by: as for `ask_to_scale`. Raises RunError when the run is over or refuses, DeadlineError when
    it does not answer in time.
    """
    return _exchange(
        folder, SetKnobs(wishes, user_here() if by is None else by), KnobsSet, timeout_s
    ).text


def ask_for_checkpoint(
    folder: RunFolder, timeout_s: float = CHECKPOINT_S, by: str | None = None
) -> str:
    """Ask the run in a folder for a checkpoint after the step under way; what came of it, once it
    is written.

    by: as for `ask_to_scale`. Raises RunError when the run is over or refuses, DeadlineError when
    it does not answer in time.
    """
    return _exchange(
        folder, KeepCheckpoint(user_here() if by is None else by), CheckpointKept, timeout_s
    ).text


def ask_for_facts(folder: RunFolder, timeout_s: float = ANSWER_S) -> Facts:
    """Ask the run in a folder what it knows of itself; it asks its workers for their stacks, which
    come later.

    Raises RunError when the run is over, DeadlineError when it does not answer in time.
    """
    facts: Facts = _exchange(folder, TellFacts(), FactsTold, timeout_s).facts
    return facts


def ask_for_state(folder: RunFolder, timeout_s: float = ANSWER_S) -> Facts:
    """As `ask_for_facts`, without the stacks: no worker is asked for anything, so it may be asked
    often.
    """
    facts: Facts = _exchange(folder, TellFacts(stacks=False), FactsTold, timeout_s).facts
    return facts


def _exchange(folder: RunFolder, request: Request, kind: type[R], timeout_s: float) -> R:
    """Make one request and wait for its reply, unless nobody is there to give one. Raises as
    `ask_to_scale`.
    """
    address, keys, whom = _address(folder), _keys(folder), folder.read_json(CONTROL)
    deadline = time.monotonic() + timeout_s
    # of the process: each has threads of its own
    name = f"client-{secrets.token_hex(8)}".encode()
    dealer = dealer_to(zmq.Context.instance(), address, keys, {zmq.IDENTITY: name})
    try:
        dealer.connect(address)
        dealer.send(REQUESTS.encode(request))
        while not dealer.poll(min(_LOOK_MS, int(timeout_s * 1000))):
            if not _is_there(_address(folder)):
                raise RunError(
                    f"the scheduler of '{folder.path.name}' has died; dataflow resume takes over"
                    " the workers that it left; without that they finish their step, write a"
                    " checkpoint and end within a minute or two"
                )
            if folder.read_json(CONTROL) != whom:
                raise RunError(
                    f"the scheduler of '{folder.path.name}' was replaced while it was asked, so it"
                    " may have done it or not; look with dataflow doctor, and ask again"
                )
            if time.monotonic() >= deadline:
                raise DeadlineError(
                    f"'{folder.path.name}' has not answered within {timeout_s:.0f} s; it may have"
                    " just ended, or its scheduler is stopped; look at its display, and ask again"
                )
        reply = REPLIES.decode(dealer.recv())
    except MessageError as error:
        raise RunError(f"'{folder.path.name}' gave an answer that is none: {error}") from error
    finally:
        dealer.close()
    if isinstance(reply, Refused):
        raise RunError(reply.error)
    assert isinstance(reply, kind), f"the reply to {request} is {reply}"
    return reply


def listens(path: Path) -> bool:
    """Whether some process has the socket with this name open. It does not notice: the question is
    of another kind.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asks:
        try:
            if stat.S_ISSOCK(path.lstat().st_mode):
                asks.connect(str(path))
        except OSError as error:
            return error.errno not in (errno.ECONNREFUSED, errno.ENOENT)
    return False


def _is_there(address: str) -> bool:
    """Whether a process can be asked there; of one on another host that does not answer, nobody
    knows.
    """
    if address.startswith("ipc:"):
        return listens(Path(address.removeprefix("ipc://")))
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _LOOK_MS / 1000).close()
    except OSError as error:
        return error.errno != errno.ECONNREFUSED
    return True


def _keys(folder: RunFolder) -> RunKeys | None:
    """The keys of a run over hosts; None: the run takes commands at a socket that only this user's
    processes can open.
    """
    if not _address(folder).startswith("tcp:"):
        return None
    keys = Rendezvous.keys(folder.path)
    if keys is None:
        raise RunError(
            f"'{folder.path.name}' runs over hosts and takes commands of those who have its keys"
            f" alone, but {KEYS_FILE} in its folder is missing or not yours to read; ask as the"
            " user who has started it"
        )
    return keys


def _address(folder: RunFolder) -> str:
    address = str(folder.read_json(CONTROL).get("address", ""))
    is_there = address.startswith("ipc://") and Path(address.removeprefix("ipc://")).exists()
    if not is_there and not address.startswith("tcp://"):
        raise RunError(
            f"'{folder.path.name}' takes no commands: it is over, or it runs in one process; "
            "name the folder of a run that is under way, such as runs/latest"
        )
    return address
