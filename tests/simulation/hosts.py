"""The hosts of a simulated world: an agent on each, which plays the product's, and speaks to the
product's `Agents`.

Connections are those of the simulated network: what is under way over a cut link waits, and is lost
with the connection where the cut lasts; both ends number what they say, as the product does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import zmq

from dataflow.agent.digest import versions
from dataflow.agent.messages import (
    FROM_AGENT,
    TO_AGENT,
    Alive,
    Begin,
    Built,
    FromAgent,
    FromWorkers,
    Handed,
    HandedOver,
    HandOver,
    Join,
    Notice,
    SendSignal,
    Spawn,
    ToAgent,
    ToWorkers,
    is_repeated,
)
from dataflow.planning.hosts import Host
from dataflow.scheduler.events import Received
from dataflow.scheduler.host_agent import AgentsSocket
from dataflow.system.messages import Frames, Numbered
from dataflow.worker.messages import TO_SCHEDULER, TO_WORKER, Heartbeat, ToWorker
from transport.life import Life

from .clock import Clock
from .network import SCHEDULER, Pipe, SimulatedNetwork

KILLED = -9
BEAT_S, SEEK_S, PROMPT_S = 0.5, 2.0, 0.02
GIVEN_UP_S = 3.0
"""After which a connection breaks over which nothing passes."""
BUILT = Built(digest="same")
BEGIN = Begin(launch={"module": "m"}, inputs={}, whereabouts={})


class Router:
    """The scheduler's end of all connections, in the place of a socket of ZeroMQ."""

    def __init__(self, clock: Clock, step: Callable[[], None]) -> None:
        """step: lets the next event happen."""
        self._clock, self._step = clock, step
        self.lines: dict[bytes, Pipe] = {}
        """By the identity of each agent, what leads to it."""
        self.arrived: deque[list[bytes]] = deque()

    def poll(self, timeout_ms: int) -> int:
        """Whether something has arrived within that time; the world goes on meanwhile."""
        deadline = self._clock.now + timeout_ms / 1000
        if timeout_ms:
            self._clock.after(timeout_ms / 1000, lambda: None)
        while not self.arrived and self._clock.now < deadline:
            self._step()
        return len(self.arrived)

    def recv_multipart(self) -> list[bytes]:
        """What has arrived next."""
        return self.arrived.popleft()

    def send_multipart(self, frames: Sequence[bytes], flags: int) -> None:
        """Speak to an agent; ZMQError where there is no connection."""
        if frames[0] not in self.lines:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        self.lines[frames[0]].send(frames[1:])

    def close(self, linger: int) -> None:
        """Nobody listens any more."""


class SimulatedAgentsSocket(AgentsSocket):
    """The product's, over simulated connections."""

    def __init__(self, hosts: Hosts, number: int) -> None:
        self._clock, self._first_session, self._peers = hosts.clock, Life(number).first_number, {}
        self.socket, self.address = hosts.opened(), "simulated"  # type: ignore[assignment]


@dataclass
class _Child:
    """The last process of one worker on one host."""

    settings: Mapping[str, Any]
    has_ended: bool = False


class Line:
    """What one incarnation of a worker says to its agent, and hears from it."""

    def __init__(self, agent: _Agent, name: str, hear: Callable[[ToWorker], None]) -> None:
        self._agent, self._name, self.hear = agent, name, hear

    def send(self, item: Received) -> None:
        """The worker says something."""
        self._agent.passes_on(self._name, item.message)


class _Agent:
    """One incarnation of a host's agent."""

    def __init__(self, hosts: Hosts, host: Host, number: int) -> None:
        self.host, self.identity = host, f"{host.name}/{number}".encode()
        self.children: dict[str, _Child] = {}
        self.lines: dict[str, Line] = {}
        self.alive = True
        self._hosts, self._numbered = hosts, Numbered()
        self._built = ""
        self._router: Router | None = None
        self._up: Pipe | None = None
        self._apart_since: float | None = None
        self._heard = self._sought = float("-inf")
        self._messages: list[tuple[str, bytes]] = []
        self._beats: dict[str, bytes] = {}
        hosts.clock.after(BEAT_S * hosts.random.random(), self._beat)

    def passes_on(self, name: str, message: Any) -> None:
        """A worker says something."""
        encoded = TO_SCHEDULER.encode(message)
        if isinstance(message, Heartbeat):
            self._beats[name] = encoded
            return
        self._flush_beat(name)
        self._messages.append((name, encoded))
        self._hosts.clock.after(PROMPT_S * self._hosts.random.random(), self._flush)

    def exited(self, name: str) -> None:
        """The process of a worker has ended, and this is noticed."""
        if self.alive:
            self.children[name].has_ended = True
            self._beaten()
            self._say(Notice("exited", name, 1, KILLED))

    def ends(self, name: str) -> None:
        """A signal for a worker: all of them end it."""
        if name in self.children and not self.children[name].has_ended:
            self._hosts.end(name, self.host.name)

    def lose(self) -> None:
        """The connection is broken."""
        if self._up is not None:
            self._up.cut()
            self._up = None
        if (
            self._router is not None
            and (down := self._router.lines.pop(self.identity, None)) is not None
        ):
            down.cut()

    def _beat(self) -> None:
        hosts = self._hosts
        if not self.alive or hosts.closed:
            return
        now = hosts.clock.now
        apart = hosts.network.machines.apart(self.host.name, SCHEDULER) > 0
        self._apart_since = (
            (now if self._apart_since is None else self._apart_since) if apart else None
        )
        if self._apart_since is not None and now - self._apart_since >= GIVEN_UP_S:
            self.lose()
        if now - max(self._heard, self._sought) > SEEK_S:
            self._sought = now
            if hosts.router is not self._router:
                self.lose()
                self._router = hosts.router
                self._numbered.begin_anew(with_another=True)
            self._connect(apart)
            self._join()
        self._connect(apart)
        self._beaten()
        self._say(Alive())
        hosts.clock.after(BEAT_S, self._beat)

    def _connect(self, apart: bool) -> None:
        hosts, router, name = self._hosts, self._router, self.host.name
        if (
            self._up is not None
            or apart
            or router is None
            or not hosts.is_led
            or router is not hosts.router
        ):
            return

        def arrive(frames: Frames) -> None:
            router.arrived.append([self.identity, *frames])

        self._up = Pipe(hosts.network, arrive, name, SCHEDULER)
        router.lines[self.identity] = down = Pipe(
            hosts.network, lambda frames: self._hear(down, frames), SCHEDULER, name
        )

    def _hear(self, down: Pipe, frames: Frames) -> None:
        router, now = self._router, self._hosts.clock.now
        if (
            not self.alive
            or self._hosts.closed
            or router is None
            or router.lines.get(self.identity) is not down
        ):
            return
        self._heard = now
        message = self._numbered.take(frames, now)
        if message is not None:
            self._apply(TO_AGENT.decode(message))
        for missing in self._numbered.missing(now):
            self._send(missing)

    def _apply(self, message: ToAgent) -> None:
        match message:
            case Begin() if not self._built:
                self._built = BUILT.digest
                self._say(BUILT)
            case HandOver():
                for name, child in self.children.items():
                    status = KILLED if child.has_ended else None
                    self._say(Handed(name, 1, child.settings, status, not child.has_ended))
                self._say(HandedOver(question=message.question, alone_s=0.0))
            case Spawn():
                self.children[message.name] = _Child(message.settings)
                self._say(Notice("started", message.name, 1, None))
                self._hosts.fork(message.name, message.settings)
            case SendSignal():
                self.ends(message.name)
            case ToWorkers():
                for name, encoded in zip(message.names, message.messages, strict=True):
                    if name in self.lines:
                        self.lines[name].hear(TO_WORKER.decode(encoded))

    def _join(self) -> None:
        self._say(
            Join(
                host=self.host,
                address=self.host.name,
                sockets="",
                folder="",
                pid=1,
                versions=versions(),
                digest=self._built,
            )
        )

    def _beaten(self) -> None:
        for name in list(self._beats):
            self._flush_beat(name)
        self._flush()

    def _flush_beat(self, name: str) -> None:
        if name in self._beats:
            self._messages.append((name, self._beats.pop(name)))

    def _flush(self) -> None:
        """Without a scheduler it waits for the next one."""
        if self._messages and self.alive and self._hosts.clock.now - self._heard < SEEK_S:
            messages, self._messages = self._messages, []
            self._say(
                FromWorkers(
                    names=[name for name, _ in messages], messages=[said for _, said in messages]
                )
            )

    def _say(self, message: FromAgent) -> None:
        now = self._hosts.clock.now
        self._send(
            self._numbered.frames(FROM_AGENT.encode(message), now, is_kept=not is_repeated(message))
        )

    def _send(self, frames: Frames) -> None:
        if self._up is not None:
            self._up.send(frames)


class Hosts:
    """All of them; in the place of `Forks` and of `Exchange`."""

    def __init__(
        self,
        clock: Clock,
        random: Random,
        network: SimulatedNetwork,
        hosts: Sequence[Host],
        fork: Callable[[str, Mapping[str, Any]], None],
        end: Callable[[str, str], None],
        step: Callable[[], None],
    ) -> None:
        """fork: a process begins. end: one ends, by name and host. step: lets the next event
        happen.
        """
        self.clock, self.random, self.network, self.fork, self.end, self._step = (
            clock,
            random,
            network,
            fork,
            end,
            step,
        )
        self.attempts: dict[str, int] = {}
        """By worker, the newest."""
        self.stays = self.closed = self.is_led = False
        """is_led: whether there is a scheduler, and with it the ledger's service."""
        self.router: Router | None = None
        """Of the scheduler that leads the run."""
        self._made = 0
        self._agents: dict[str, _Agent] = {}
        for host in hosts:
            self._come(host)

    @property
    def names(self) -> list[str]:
        """Of all hosts."""
        return list(self._agents)

    def opened(self) -> Router:
        """A scheduler listens."""
        self.router, self.is_led = Router(self.clock, self._step), True
        return self.router

    def lose(self) -> None:
        """The scheduler is dead, and what was on its way to it or from it is lost."""
        self.is_led = False
        for agent in self._agents.values():
            agent.lose()

    def connect(self, name: str, host: str, hear: Callable[[ToWorker], None]) -> Line:
        """An incarnation of a worker takes the name over on its host."""
        agent = self._agents[host]
        line = agent.lines[name] = Line(agent, name, hear)
        return line

    def hang_up(self, name: str, host: str) -> None:
        """The worker is gone."""
        self._agents[host].lines.pop(name, None)

    def ended(self, name: str, host: str) -> None:
        """A process has ended; its agent tells it soon."""
        agent = self._agents[host]
        if agent.alive:
            self.clock.after(0.1 * self.random.random(), lambda: agent.exited(name))

    def die(self, host: str, back_s: float, *, is_told: bool) -> None:
        """A host dies with all that it has; another agent is there so much later. is_told: the
        scheduler's end sees that the connection is closed.
        """
        agent = self._agents[host]
        if not agent.alive:
            return
        agent.alive = False
        for name in list(agent.children):
            agent.ends(name)
        self.clock.after(0.1 * self.random.random() if is_told else GIVEN_UP_S, agent.lose)
        self.clock.after(back_s, lambda: self._come(agent.host))

    def _come(self, host: Host) -> None:
        """A new agent of a host asks to join."""
        if not self.closed:
            self._made += 1
            self._agents[host.name] = _Agent(self, host, self._made)
