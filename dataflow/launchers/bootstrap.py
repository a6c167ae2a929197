"""How a process that knows an address and a secret learns which run it is to join, and with which
keys."""

import hashlib
import os
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from dataflow.errors import DeadlineError, GraphError, RunError
from dataflow.launchers.launcher import Joining
from dataflow.system.messages import MESSAGE_BYTES, Codec, MessageError, Natural
from dataflow.system.security import Guard, RunKeys, present

SECRET, SECRET_FILE = "DATAFLOW_SECRET", "DATAFLOW_SECRET_FILE"
_LEAST = 32
"""Characters of a secret."""
_AGAIN_MS = 500
"""Between two questions; the first may come before somebody is there who answers."""


@dataclass(frozen=True)
class JoinRequest:
    """A host wants to join."""

    rank: Natural


@dataclass(frozen=True)
class JoinReply:
    """What it has to know."""

    scheduler: str
    folder: str
    keys: bytes = field(repr=False)


_ASKS: Codec[JoinRequest] = Codec("dataflow.bootstrap-ask", 1, JoinRequest)
_TOLD: Codec[JoinReply] = Codec("dataflow.bootstrap-told", 1, JoinReply)


def secret_keys(environ: Mapping[str, str]) -> RunKeys:
    """The keys of this bootstrap alone, made of the secret that all hosts share. Errors: GraphError
    without one.

    The secret is text of a variable, or of a file that nobody else may read; the run's own keys are
    new for each start."""
    secret = environ.get(SECRET) or _read(environ.get(SECRET_FILE))
    if len(secret) < _LEAST:
        raise GraphError(
            f"hosts that join by an address prove themselves by a secret, but {SECRET} and the file"
            f" that {SECRET_FILE} names hold {len(secret) or 'no'} characters; make one of {_LEAST}"
            " or more, new for this run, and give it to all hosts: python -c 'import secrets;"
            " print(secrets.token_hex(32))'"
        )
    pairs = {}
    for name in ("receiver", "sender"):
        drawn = hashlib.blake2b(secret.encode(), digest_size=32, person=name.encode()).digest()
        private = z85.encode(drawn)
        pairs[f"{name}_secret"], pairs[f"{name}_public"] = private, zmq.curve_public(private)
    keys = RunKeys.from_plain(pairs)
    assert keys is not None, "there are four"
    return keys


class BootstrapServer:
    """Tells all hosts that have the secret which run they are to join.

    consumes: questions
    produces: an answer to each
    waits for: nothing; its owner calls `answer` often
    unblocked by: -
    """

    def __init__(self, address: str, keys: RunKeys, join: Joining) -> None:
        """address: tcp, of this machine. Errors: RunError where it is taken."""
        self._told = _TOLD.encode(JoinReply(join.address, join.folder, join.keys))
        self._guard = Guard(keys.receivers)
        self._socket = self._guard.context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, 4096)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPV6, int("[" in address))
        self._guard.protect(self._socket)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise RunError(
                f"hosts are to learn at {address} which run they join, but {error}; set another"
                " MASTER_PORT on all"
            ) from error
        self.asked: set[int] = set()
        """Ranks that have been told."""

    def answer(self) -> None:
        """Tell whoever has asked since."""
        while self._socket.poll(0):
            peer, *parts = self._socket.recv_multipart()
            try:
                ask = _ASKS.decode(b"".join(parts))
            except MessageError:
                continue
            self.asked.add(ask.rank)
            self._socket.send_multipart([peer, self._told])

    def close(self) -> None:
        """Nobody is told any more."""
        self._socket.close()
        self._guard.close()


def ask(address: str, keys: RunKeys, rank: int, within_s: float) -> JoinReply:
    """What the server at an address says. Errors: DeadlineError when nobody who has the secret
    answers."""
    deadline = time.monotonic() + within_s
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES)
        socket.setsockopt(zmq.IPV6, int("[" in address))
        present(socket, keys.senders)
        socket.connect(address)
        while time.monotonic() < deadline:
            if socket.poll(0, zmq.POLLOUT):
                socket.send(_ASKS.encode(JoinRequest(rank)))
            if socket.poll(_AGAIN_MS):
                return _TOLD.decode(b"".join(socket.recv_multipart()))
    raise DeadlineError(
        f"rank {rank} waited {within_s:.0f} s for rank 0 to say at {address} which run it joins;"
        " see that rank 0 runs, that this host reaches that address, and that both have the same"
        f" secret in {SECRET} or {SECRET_FILE}"
    )


def _read(place: str | None) -> str:
    if not place:
        return ""
    try:
        facts = Path(place).stat()
        if stat.S_IMODE(facts.st_mode) & 0o077 or facts.st_uid not in (os.getuid(), 0):
            raise GraphError(
                f"others may read the secret in '{place}': its mode is"
                f" {stat.S_IMODE(facts.st_mode):04o} and its owner {facts.st_uid}; make a new one,"
                " with mode 0600"
            )
        return Path(place).read_text().strip()
    except OSError as error:
        raise GraphError(
            f"{SECRET_FILE} names '{place}', which cannot be read: {error.strerror}; make it"
        ) from error
