"""The launcher for hosts that all start the same command, with RANK and WORLD_SIZE, as torchrun
does.
"""

import functools
import hashlib
import os
import socket
import sys
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils import z85

from dataflow.agent.environment import AgentEnvironment, pipe_of
from dataflow.errors import DeadlineError, GraphError
from dataflow.launchers.launcher import Joining
from dataflow.launchers.local import Local, Slot
from dataflow.system.addresses import resolved
from dataflow.system.messages import Codec, Message, MessageError, Natural, Secret
from dataflow.system.security import Listener, RunKeys, dealer_to, endpoint, read_private

# How a process that knows an address and a secret learns which run it is to join, and with which
# keys.

SECRET, SECRET_FILE = "DATAFLOW_SECRET", "DATAFLOW_SECRET_FILE"
_LEAST = 32
"""Characters of a secret."""
_AGAIN_MS = 500
"""Between two questions; the first may come before somebody is there who answers."""


class JoinRequest(Message):
    """A host wants to join."""

    rank: Natural


class JoinReply(Secret):
    """What it has to know."""

    scheduler: str
    folder: str
    keys: bytes


_ASKS: Codec[JoinRequest] = Codec("dataflow.bootstrap-ask", 1, JoinRequest)
_TOLD: Codec[JoinReply] = Codec("dataflow.bootstrap-told", 1, JoinReply)


def secret_keys(environ: Mapping[str, str]) -> RunKeys:
    """The keys of this bootstrap alone, made of the secret that all hosts share. Errors: GraphError
    without one.

    The secret is text of a variable, or of a file that nobody else may read; the run's own keys are
    new for each start.
    """
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
        self._listener = Listener(
            "what tells hosts their run (at MASTER_PORT, the same on all)",
            address,
            keys,
            {zmq.MAXMSGSIZE: 4096},
        )
        self._socket = self._listener.socket
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
        self._listener.close()


def ask(address: str, keys: RunKeys, rank: int, within_s: float) -> JoinReply:
    """What the server at an address says. Errors: DeadlineError when nobody who has the secret
    answers.
    """
    deadline = time.monotonic() + within_s
    with zmq.Context() as context, dealer_to(context, address, keys) as socket:
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
    try:
        return read_private(Path(place)).decode().strip() if place else ""
    except (OSError, ValueError) as error:
        raise GraphError(
            f"{SECRET_FILE} names '{place}', which cannot be read: {error}; make a new one, with"
            " mode 0600"
        ) from error


@dataclass(frozen=True, kw_only=True)
class LaunchRanks:
    """What the environment says of this process's place in the launch."""

    rank: int
    hosts: int
    leads_host: bool
    """Whether it is the first of its host; one agent is enough for all of them."""
    master: str
    """Name or address of the host of rank 0."""
    port: int
    """At which rank 0 tells the others which run they join: the one after MASTER_PORT, at which
    torchrun itself may listen."""

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> "LaunchRanks":
        """Errors: GraphError for what is missing or no number."""
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        missing = [name for name in names if not environ.get(name)]
        if missing:
            raise GraphError(
                "--on torchrun is for a command that is started on each host with"
                f" {', '.join(names)}, but {' and '.join(missing)} is not set; start it with"
                " torchrun, or set them"
            )
        numbers = {
            name: environ.get(name) or default
            for name, default in (
                ("RANK", ""),
                ("WORLD_SIZE", ""),
                ("MASTER_PORT", ""),
                ("LOCAL_RANK", "0"),
                ("LOCAL_WORLD_SIZE", "1"),
            )
        }
        for name, text in numbers.items():
            if not text.isdecimal():
                raise GraphError(f"{name} is '{text}', which is no number; set it as torchrun does")
        rank, world, port, local, on_each = map(int, numbers.values())
        if rank >= world or not on_each or world % on_each or not 0 < port < 65535:
            raise GraphError(
                f"RANK {rank} of WORLD_SIZE {world}, {on_each} on each host, with MASTER_PORT"
                f" {port} cannot be; ranks count from 0, each host has as many, and a port is below"
                " 65535"
            )
        return cls(
            rank=rank,
            hosts=world // on_each,
            leads_host=local == 0,
            master=environ["MASTER_ADDR"],
            port=port + 1,
        )


class Torchrun:
    """Rank 0 of such a launch, a Launcher: tells the others which run they join, and starts its own
    host's agent.
    """

    def __init__(self) -> None:
        self._server: BootstrapServer | None = None
        self._agent: Local | None = None

    @functools.cached_property
    def _ranks(self) -> LaunchRanks:
        return LaunchRanks.of(os.environ)

    @property
    def hosts(self) -> int:
        """As `Launcher.hosts`. Errors: GraphError for what the environment lacks."""
        return self._ranks.hosts

    @functools.cached_property
    def listen(self) -> str:
        """As `Launcher.listen`: MASTER_ADDR. Errors: GraphError."""
        return resolved(self._ranks.master, "MASTER_ADDR")

    def start(self, join: Joining) -> None:
        """As `Launcher.start`. Errors: GraphError without a secret, RunError where the port is
        taken.
        """
        keys = secret_keys(os.environ)
        os.environ.pop(SECRET, None)
        self._server = BootstrapServer(endpoint(self.listen, str(self._ranks.port)), keys, join)
        host, address, cpus, gpus = (
            os.environ.get(f"DATAFLOW_AGENT_{name}", "")
            for name in ("HOST", "ADDRESS", "CPUS", "GPUS")
        )
        slot = Slot(
            host=host or socket.gethostname(), address=address or self.listen, cpus=cpus, gpus=gpus
        )
        self._agent = Local([slot], self.listen)
        self._agent.start(join)

    def ended(self) -> list[str]:
        """As `Launcher.ended`; of the agent on this host: those elsewhere the scheduler hears
        itself.
        """
        if self._server is not None:
            self._server.answer()
        return self._agent.ended() if self._agent is not None else []

    def stop(self) -> None:
        """As `Launcher.stop`; the other agents belong to whoever started their processes, and end
        with the run.
        """
        if self._server is not None:
            self._server.close()
        if self._agent is not None:
            self._agent.stop()
        self._server = self._agent = None


def become_agent(environ: MutableMapping[str, str], within_s: float) -> None:
    """In any process of such a launch but rank 0: become its host's agent, or end where the host
    has one.

    Returns in rank 0. within_s: for rank 0 to begin. Errors: GraphError, DeadlineError.
    """
    ranks = LaunchRanks.of(environ)
    if ranks.rank == 0:
        return
    if not ranks.leads_host:
        sys.exit(0)
    keys = secret_keys(environ)
    environ.pop(SECRET, None)
    answer = ask(endpoint(ranks.master, str(ranks.port)), keys, ranks.rank, within_s)
    pipe = pipe_of(answer.keys)
    os.set_inheritable(pipe, True)
    agent = AgentEnvironment(
        scheduler=answer.scheduler, folder=answer.folder, keys=f"fd:{pipe}"
    ).to_environ()
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, "-m", "dataflow.agent"], {**environ, **agent})
