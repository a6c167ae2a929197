"""What a scheduler knows of the agent of one host."""

import re
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from msgspec import structs

from dataflow.agent.messages import (
    FROM_AGENT,
    TO_AGENT,
    Begin,
    Built,
    FromAgent,
    Handed,
    HandedOver,
    Join,
    Spawn,
    ToAgent,
    is_repeated,
)
from dataflow.folder.ledger import HOME
from dataflow.planning.hosts import Host
from dataflow.system.messages import Frames, Life, MessageError, Numbered
from dataflow.system.security import Listener, RunKeys, endpoint

# The socket at which agents speak to a scheduler; it decides nothing.


_AT_ONCE = 64
"""Messages to read between two looks at other work."""


class AgentsSocket:
    """For holders of the run's keys alone.

    consumes: messages of agents
    produces: messages to them, by the identity of each
    waits for: nothing; its owner polls `socket`
    unblocked by: -
    """

    def __init__(
        self,
        listen: str,
        keys: RunKeys,
        number: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """listen: an address of this machine, with a port or without. number: of this
        scheduler. Errors: RunError where it cannot listen there.
        """
        self._clock, self._first_session = clock, Life(number).first_number
        self._peers: dict[bytes, Numbered] = {}
        self._listener = Listener(
            "the scheduler of a run over hosts",
            f"tcp://{listen}" if listen.count(":") == 1 else endpoint(listen),
            keys,
            {zmq.ROUTER_MANDATORY: 1, zmq.ROUTER_HANDOVER: 1, zmq.SNDHWM: 0},
        )
        self.socket, self.address = self._listener.socket, self._listener.address

    def send(self, identity: bytes, message: ToAgent) -> bool:
        """Send a message; whether a connection takes it. Without one, it waits for the next."""
        peer = self._peer(identity)
        return self._send(
            identity,
            peer.frames(TO_AGENT.encode(message), self._clock(), is_kept=not is_repeated(message)),
        )

    def forget(self, identity: bytes) -> None:
        """Drop what an agent has not received."""
        self._peer(identity).begin_anew()

    def remove(self, identity: bytes) -> None:
        """Another agent of the same host follows this one."""
        self._peers.pop(identity, None)

    def received(self, refused: Callable[[str, str], object]) -> list[tuple[bytes, FromAgent]]:
        """The messages that have come, as many as can be handled soon. refused: is told who sent an
        invalid message, and why it is invalid.
        """
        messages: list[tuple[bytes, FromAgent]] = []
        while len(messages) < _AT_ONCE and self.socket.poll(0):
            identity, *frames = self.socket.recv_multipart()
            peer, now = self._peer(identity), self._clock()
            try:
                message = peer.take(frames, now)
                if message is not None:
                    messages.append((identity, FROM_AGENT.decode(message)))
            except MessageError as error:
                refused(identity.decode(errors="backslashreplace"), str(error))
            for missing in peer.missing(now):
                self._send(identity, missing)
        return messages

    def close(self) -> None:
        """Close the socket."""
        self._listener.close()

    def _peer(self, identity: bytes) -> Numbered:
        return self._peers.setdefault(identity, Numbered(self._first_session))

    def _send(self, identity: bytes, frames: Frames) -> bool:
        try:
            self.socket.send_multipart([identity, *frames], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        return True


_LIVE_S = 3.0
"""An agent that was heard within so long is there: it gives signs of life more often."""
_CLOSED_S = 1.5
"""A host whose connection is closed for so long is lost: its agent has ended, or would have come
back."""
_SPEAKS_S = 2.0
"""Within which an agent is heard that is not cut off: less than it takes to give a connection
up."""


@dataclass
class Questions:
    """What an agent was asked: which workers it has. It hears and answers in order, but perhaps
    late; what it says of a moment before its newest process was asked for, or before its host was
    lost, is out of date.
    """

    _latest: int = 0
    """Number of the last question."""
    _outdated: int = 0
    """Number of the last question that has an answer."""

    def ask(self) -> int:
        """The number of a new question."""
        self._latest += 1
        return self._latest

    def outdate(self) -> None:
        """Ignore the answers to all questions so far."""
        self._outdated = self._latest

    def counts(self, question: int) -> bool:
        """Whether the answer to a question counts."""
        return question > self._outdated

    @property
    def is_open(self) -> bool:
        """Whether an answer that counts is on its way, or has come."""
        return self._latest > self._outdated


@dataclass
class HostAgent:
    """One host of the run, and who speaks for it."""

    join: Join
    identity: bytes
    built: Built | None = None
    questions: Questions = field(default_factory=Questions)
    arriving: dict[str, Handed] = field(default_factory=dict)
    """The workers of an answer, so far."""
    handed: dict[str, Handed] = field(default_factory=dict)
    """The workers of the last answer that counted, without those that have ended since."""
    answer: HandedOver | None = None
    is_paused: bool = False
    is_clearing: bool = False
    """Whether all of its workers are to end."""
    has_left: bool = False
    """Whether it said that it ends, or its connection is closed."""
    heard_at: float = 0.0
    closed_since: float | None = None
    """Since when messages to it cannot leave."""
    asked_at: float = 0.0
    """When it was last asked which workers it has."""

    @property
    def may_answer(self) -> bool:
        """Whether it has not ended, as far as is known."""
        return not self.has_left and self.closed_since is None

    @property
    def living(self) -> list[str]:
        """Workers that it has and that have not ended."""
        return [name for name, process in self.handed.items() if process.alive]

    def had(self, spawn: Spawn) -> bool:
        """Whether it has, or had, the requested process, and not only an earlier one."""
        process = self.handed.get(spawn.name)
        asked = Life(*spawn.settings["life"])
        return process is not None and Life(*process.settings["life"]) >= asked

    def takes(self, answer: HandedOver) -> bool:
        """Take the workers that have arrived as its own, if the answer counts."""
        handed, self.arriving = self.arriving, {}
        if self.questions.counts(answer.question):
            self.handed, self.answer = handed, answer
            return True
        return False

    def lives(self, now: float) -> bool:
        """Whether it is there, as far as is known."""
        return self.may_answer and now - self.heard_at < _LIVE_S

    def has_gone(self, now: float) -> bool:
        """Whether it has ended, as its connection is closed. One that was silent before has given
        that connection up itself, because the network was cut, and makes another.
        """
        closed = self.closed_since
        return (
            closed is not None and now - closed > _CLOSED_S and closed - self.heard_at < _SPEAKS_S
        )

    @property
    def place(self) -> dict[str, str]:
        """The settings of a worker that are particular to this host."""
        join = self.join
        return {
            "sockets": join.sockets,
            "listen": join.address,
            "folder": join.folder,
            "disk": join.host.name if join.host.own_folder else HOME,
        }


def with_addresses(begin: Begin, hosts: Mapping[str, HostAgent], now: float = 0.0) -> Begin:
    """What a host is to build, and whom it has to reach. now: where some may have died since they
    came.
    """
    reached = {
        name: host
        for name, host in hosts.items()
        if (host.lives(now) if now else not host.has_left)
    }
    return structs.replace(
        begin, reach_addresses={name: host.join.reach_address for name, host in reached.items()}
    )


def host_of(spawn: Spawn) -> str:
    """The host for which a process was requested."""
    return str(spawn.settings["host"])


def natural(name: str) -> list[tuple[int, int | str]]:
    """A key by which h2 comes before h10."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name)]


def same_name(first: Join, second: Join) -> str:
    """The refusal of two agents of one name, both there."""
    return (
        f"two hosts of the run are called '{first.host.name}', at {first.address} and"
        f" {second.address}; give each a name of its own (DATAFLOW_AGENT_HOST)"
    )


def too_few(
    hosts: Collection[Host], count: int, address: str, within_s: float, folder: Path
) -> str:
    """The refusal of a run that lacks hosts."""
    came = ", ".join(host.name for host in hosts) or "none"
    return (
        f"the run waited {within_s:.0f} s for {count} hosts at {address}, and these came: {came};"
        f" see that the others reach that address, and the logs of their agents in {folder}/logs,"
        " or raise Limits.start_s"
    )


def too_late(missing: Collection[str], within_s: float, folder: Path) -> str:
    """The refusal of hosts that have not built the graph."""
    return (
        f"the scheduler waited {within_s:.0f} s for hosts {missing} to build the graph; see the"
        f" logs of their agents in {folder}/logs, or raise Limits.start_s"
    )
