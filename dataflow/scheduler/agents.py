"""The agents of a run in the hands of its scheduler: what `ForkserverClient` is to one machine, for
several hosts.
"""

import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from dataflow.agent.digest import other_program, other_versions, versions
from dataflow.agent.forkserver_client import Event
from dataflow.agent.messages import (
    Alive,
    Begin,
    Built,
    Bye,
    End,
    Failed,
    FromAgent,
    FromWorkers,
    Handed,
    HandedOver,
    HandOver,
    Join,
    Leaves,
    Notice,
    Pace,
    Pause,
    Paused,
    SendSignal,
    Spawn,
    Stay,
    ToAgent,
    ToWorkers,
)
from dataflow.agent.rendezvous import Rendezvous
from dataflow.errors import DeadlineError, RunError
from dataflow.planning.hosts import Host
from dataflow.scheduler.host_agent import (
    AgentsSocket,
    HostAgent,
    host_of,
    natural,
    same_name,
    too_few,
    too_late,
    with_addresses,
)
from dataflow.system.messages import Refused
from dataflow.system.security import RunKeys

# What passes between a scheduler and the workers on its hosts, on its way through their agents:
# one message each.

_A_SECOND = 1024
"""The most heartbeats a second that a scheduler takes in, so that they cost it a fraction of a
core."""
_SLOWER = 1.25
"""An interval that grows by this factor is worth a message to all agents."""
_MISSED = 3
"""So many heartbeats may get lost before a worker counts as hanging."""


class HostMessages:
    """Of all hosts.

    consumes: what agents pass on; messages for workers
    produces: who said what; a message for each host that has a worker which is to hear something
    waits for: nothing
    unblocked by: -
    """

    def __init__(self, hang_s: float) -> None:
        """hang_s: after so much silence a worker is taken to hang."""
        self.beat_s = 0.2
        """Seconds between two heartbeats of a worker that agents pass on."""
        self._most_s = hang_s / _MISSED
        self._heard: list[tuple[str, str, bytes]] = []
        self._tells: dict[str, tuple[list[str], list[bytes]]] = {}

    def slows(self, workers: int) -> bool:
        """Whether there are now so many workers that they must be heard less often."""
        beat_s = min(workers / _A_SECOND, self._most_s)
        if beat_s > self.beat_s * _SLOWER:
            self.beat_s = beat_s
            return True
        return False

    def take(self, host: str, said: FromWorkers) -> None:
        """Take in what the agent of a host passes on."""
        self._heard += zip([host] * len(said.names), said.names, said.messages, strict=True)

    def heard(self) -> list[tuple[str, str, bytes]]:
        """The heartbeats since the last call, each with its worker and host."""
        heartbeats, self._heard = self._heard, []
        return heartbeats

    def say(self, name: str, host: str, message: bytes) -> None:
        """Queue a message for a worker on a host; it is lost where no such worker runs."""
        names, messages = self._tells.setdefault(host, ([], []))
        names.append(name)
        messages.append(message)

    def tells(self) -> Iterator[tuple[str, ToWorkers]]:
        """The messages that leave now, by host."""
        tells, self._tells = self._tells, {}
        for host, (names, messages) in tells.items():
            yield host, ToWorkers(names=names, messages=messages)


_LIVES_S = 0.5
"""Seconds between two signs of life to the agents."""
_PAUSE_S = 2.0
"""Seconds for agents to report that their workers stand still."""
_LOOK_S = 2.0
"""Seconds between two questions to one agent which workers it has."""
_END_S = 10.0
"""Seconds for agents to end all workers when told to."""


class Agents:
    """The hosts of a run, over one socket.

    consumes: spawn, kill and pause requests, each for a host; what agents say
    produces: events of the workers, each from the host that it was last started on; of hosts:
        joined, alive, lost
    waits for: in `assemble`, `build`, `take_over`, `pause` and `close` for agents, up to a
        deadline; else for nothing
    unblocked by: their messages; the end of one of them, which ends the first three
    """

    def __init__(
        self,
        listen: str,
        keys: RunKeys,
        folder: Path,
        number: int = 0,
        *,
        hang_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """listen: an address of this machine that the hosts reach. folder: of the run. number: of
        this scheduler. hang_s: as `Limits` has it. Errors: RunError where it cannot listen there.
        """
        self.keys, self.number, self._clock = keys, number, clock
        self.watch: Callable[[], list[str]] = list
        """Sentences about agents that have ended."""
        self.told: Callable[[str], object] = lambda text: None
        """Hears what a user should know."""
        self.alone_s = 0.0
        """As `TakenOverForkserver` has it."""
        self._folder, self._ours = folder, versions()
        self._hosts: dict[str, HostAgent] = {}
        self._spawns: dict[str, Spawn] = {}
        """By worker, the process that was asked for last."""
        self._events: list[Event] = []
        self.messages = HostMessages(hang_s)
        self._begin: Begin | None = None
        self._built: Built | None = None
        self._stay: Stay | None = None
        self._trouble: list[str] = []
        self._lived = float("-inf")
        self._socket = AgentsSocket(listen, keys, number)
        self.address = self._socket.address
        """Where agents join."""
        self.host = listen.partition(":")[0] if listen.count(":") == 1 else listen
        """The address of this machine that the hosts reach."""
        self._is_over = False

    @property
    def pollable(self) -> Any:
        """Readable when an agent has sent something."""
        return self._socket.socket

    @property
    def hosts(self) -> list[Host]:
        """The hosts that are there, by name."""
        return [
            self._hosts[name].join.host
            for name in sorted(self._hosts, key=natural)
            if not self._hosts[name].has_left
        ]

    def place(self, host: str) -> dict[str, str]:
        """The settings of a worker that are particular to a host."""
        return self._hosts[host].place

    @property
    def digests(self) -> set[str]:
        """Digests of what the hosts had built for an earlier scheduler."""
        return {agent.join.digest for agent in self._hosts.values()}

    # Before the run

    def announce(self, hosts: Collection[Host] = ()) -> None:
        """Say in the run folder where agents find this scheduler, and that it leads the run.
        Errors: RunFolderError.
        """
        rendezvous = Rendezvous(address=self.address, hosts=tuple(hosts))
        rendezvous.write(self._folder, self.keys)

    def assemble(self, count: int, within_s: float) -> None:
        """Wait for so many hosts. Errors: RunError for one that cannot take part; DeadlineError
        with who came.
        """
        self._await(
            lambda: len(self.hosts) >= count,
            within_s,
            lambda: too_few(self.hosts, count, self.address, within_s, self._folder),
        )

    def build(self, begin: Begin, ours: Built, within_s: float) -> None:
        """Have every host build the program's graph, and see that it is the same as here. Errors:
        RunError for one that cannot, or has another; DeadlineError with who is late.
        """
        self._begin, self._built = begin, ours
        for agent in self._hosts.values():
            self._send(agent, with_addresses(begin, self._hosts))

        def missing() -> list[str]:
            return [name for name, agent in self._hosts.items() if agent.built is None]

        self._await(
            lambda: not missing(), within_s, lambda: too_late(missing(), within_s, self._folder)
        )
        self._events.clear()  # the plan knows these hosts

    def take_over(
        self, begin: Begin, ours: Built | None, hosts: Collection[str], within_s: float
    ) -> bool:
        """Have the agents of the scheduler before come to this one, and wait for those on these
        hosts; whether any came. What they have is told as they come. begin, ours: for hosts that
        join later; None: none may.
        """
        self._begin, self._built = begin, ours
        deadline = self._clock() + within_s
        while self._clock() < deadline:
            came = [agent.answer for agent in self._hosts.values() if agent.answer is not None]
            self.alone_s = max([answer.alone_s for answer in came], default=0.0)
            if len(came) >= len(hosts):
                break
            self._wait(0.05)
        return any(agent.answer is not None for agent in self._hosts.values())

    # As a forkserver has it

    def spawn(
        self, name: str, settings: Mapping[str, Any], heavy: bool, keeps: bool = False
    ) -> None:
        """As `ForkserverClient.spawn`, on the host that the settings name."""
        self._spawns[name] = message = Spawn(name, settings, heavy, keeps)
        self._start(self._hosts[settings["host"]], message)

    def kill(self, name: str, number: int = signal.SIGKILL, *, forget: bool = False) -> None:
        """Send a signal to a worker. forget: it is nobody's wish any more, should its host not have
        heard that.
        """
        for host, agent in self._hosts.items():
            if name in agent.handed or (
                name in self._spawns and host_of(self._spawns[name]) == host
            ):
                self._send(agent, SendSignal(name, int(number)))
        if forget:
            self._spawns.pop(name, None)

    def flush(self) -> None:
        """Send what is queued, in one message to each host."""
        for host, tell in self.messages.tells():
            if host in self._hosts:
                self._send(self._hosts[host], tell)

    def pause(self, is_paused: bool) -> None:
        """Let all workers stand still, or go on; returns when they do, as this process may be
        stopped next.
        """
        self._to_all(Pause(is_paused))
        deadline = self._clock() + _PAUSE_S
        present = [agent for agent in self._hosts.values() if agent.may_answer]
        while any(agent.is_paused != is_paused for agent in present) and self._clock() < deadline:
            self._wait(0.05)

    def stay(self, wait_s: float, end_s: float, silent_s: float) -> None:
        """From now on workers outlive a scheduler that dies: so long their agents wait for another,
        then to end.
        """
        self._stay = Stay(wait_s, end_s, silent_s)
        self._to_all(self._stay)

    def live(self) -> None:
        """Give a sign of life; find out who is not connected any more."""
        now = self._clock()
        if now - self._lived < _LIVES_S:
            return
        self._lived = now
        if self.messages.slows(
            max(len(self._spawns), sum(len(agent.handed) for agent in self._hosts.values()))
        ):
            self._to_all(Pace(self.messages.beat_s))
        for name, agent in self._hosts.items():
            if agent.has_left:
                continue
            if self._send(agent, Alive()):
                agent.closed_since = None
            else:
                agent.closed_since = agent.closed_since or now
                if agent.has_gone(now):
                    self._left(name, agent, "has lost the connection of its agent")

    def events(self) -> list[Event]:
        """What has happened since the last call."""
        self._receive()
        for text in self.watch():
            self.told(text)
        queued, self._events = self._events, []
        return queued

    def clear(self, host: str) -> None:
        """End all workers that a host has; when they have ended, it is told as joined."""
        agent = self._hosts[host]
        agent.is_clearing = True
        self._clear(agent)

    def seek(self, host: str) -> None:
        """Should there be an agent of a host that was given up, have it say which workers it
        has.
        """
        agent, now = self._hosts.get(host), self._clock()
        if (
            agent is not None
            and not agent.has_left
            and not agent.is_clearing
            and now - agent.asked_at > _LOOK_S
        ):
            self._forget(host)
            self._go_on(agent)

    def leave(self) -> None:
        """Leave them to another scheduler."""
        if not self._is_over:
            self._is_over = True
            self._socket.close()

    def close(self, timeout_s: float = _END_S) -> None:
        """End all agents and their workers, unless they are another's; returns within the
        time-out.
        """
        if self._is_over:
            return
        self._to_all(End())
        deadline = self._clock() + timeout_s
        self._lived = float("-inf")
        while self._clock() < deadline and any(agent.may_answer for agent in self._hosts.values()):
            self.live()
            self._wait(0.05)
        Rendezvous.remove(self._folder)
        self.leave()

    # What agents say

    def _receive(self) -> None:
        for identity, message in self._socket.received(self._refuse):
            name = identity.decode(errors="backslashreplace").rpartition("/")[0]
            if isinstance(message, Join):
                self._join(name, identity, message)
            elif (agent := self._hosts.get(name)) is not None and agent.identity == identity:
                agent.heard_at = self._clock()
                self._take_in(name, agent, message)

    def _join(self, name: str, identity: bytes, join: Join) -> None:
        agent = self._hosts.get(name)
        if name != join.host.name:
            self._socket.send(identity, Refused(f"it calls itself '{name}' and '{join.host.name}'"))
            return
        if agent is not None and agent.identity == identity:
            self._go_on(agent)
            return
        if agent is not None and agent.lives(self._clock()):
            if self._begin is not None:
                return  # it asks again; the one before it may have just ended
            self._turn_away(identity, same_name(agent.join, join))
            return
        if wrong := other_versions(name, join.versions, self._ours):
            self._turn_away(identity, wrong)
            return
        if agent is not None:
            self._left(name, agent, "has another agent")
            self._socket.remove(agent.identity)
        self._hosts[name] = agent = HostAgent(join, identity, heard_at=self._clock())
        self._go_on(agent)

    def _go_on(self, agent: HostAgent) -> None:
        """Repeat to an agent that asks to join what it may have missed."""
        agent.has_left, agent.closed_since = False, None
        if self._begin is None:
            return
        if not agent.join.digest and self._built is None:
            self._send(agent, End())  # it has nothing that could be taken over
        elif agent.join.digest or agent.built is not None:
            self._ask(agent, self._begin)
        else:
            self._send(agent, with_addresses(self._begin, self._hosts, self._clock()))
        self._send(agent, Pace(self.messages.beat_s))
        if self._stay is not None:
            self._send(agent, self._stay)

    def _ask(self, agent: HostAgent, begin: Begin) -> None:
        """Ask which workers a host has; the answer decides anew what it is cleared of."""
        agent.is_clearing, agent.asked_at = False, self._clock()
        self._send(agent, HandOver(question=agent.questions.ask(), whereabouts=begin.whereabouts))

    def _take_in(self, name: str, agent: HostAgent, message: FromAgent) -> None:
        match message:
            case Built():
                agent.built = message
                assert self._built is not None, "it was asked for"
                if wrong := other_program(name, message, self._built):
                    self._turn_away(agent.identity, wrong)
                else:
                    self._joined(name, agent)
            case Failed():
                self._trouble.append(message.error)
                self._left(name, agent, f"has ended its agent: {message.error}")
            case Leaves():
                self._events.append({"event": "leaves", "name": name})
            case Bye():
                self._left(name, agent, "has ended its agent")
            case Paused():
                agent.is_paused = message.is_paused
            case Alive() | FromWorkers():
                self._events.append({"event": "heard", "name": name})
                if isinstance(message, FromWorkers):
                    self.messages.take(name, message)
            case Notice():
                self._events.append(asdict(message) | {"host": name})
                if message.event == "exited":
                    agent.handed.pop(message.name, None)
                    if agent.is_clearing:
                        self._clear(agent)
            case Handed():
                agent.arriving[message.name] = message
            case HandedOver():
                if agent.takes(message):
                    self._handed_over(name, agent)
                elif not agent.questions.is_open and not agent.has_left and self._begin is not None:
                    self._ask(agent, self._begin)

    def _handed_over(self, name: str, agent: HostAgent) -> None:
        """Take in which workers an agent has."""
        self._joined(name, agent)
        for spawn in self._spawns.values():
            if host_of(spawn) == name and not agent.had(spawn):
                self._start(agent, spawn)  # it was lost on its way

    def _start(self, agent: HostAgent, spawn: Spawn) -> None:
        agent.questions.outdate()
        self._send(agent, spawn)

    def _clear(self, agent: HostAgent) -> None:
        for name in agent.living:
            self._send(agent, SendSignal(name, int(signal.SIGKILL)))
        if not agent.living:
            agent.is_clearing = False
            self._joined(agent.join.host.name, agent)

    def _joined(self, name: str, agent: HostAgent) -> None:
        self._events.append(
            {
                "event": "joined",
                "name": name,
                "host": agent.join.host,
                "processes": dict(agent.handed),
            }
        )

    def _left(self, name: str, agent: HostAgent, cause: str) -> None:
        """A host is gone, or nobody reaches it."""
        if agent.has_left:
            return
        agent.has_left, agent.is_clearing = True, False
        agent.questions.outdate()
        self._forget(name)
        self._events.append({"event": "lost", "name": name, "cause": cause})

    def _forget(self, host: str) -> None:
        """Drop all requests to a host."""
        self._socket.forget(self._hosts[host].identity)
        self._spawns = {
            worker: spawn for worker, spawn in self._spawns.items() if host_of(spawn) != host
        }

    # Messages

    def _turn_away(self, identity: bytes, why: str) -> None:
        """Refuse an agent that the run cannot use; without it, the run does not begin."""
        self._socket.send(identity, Refused(why))
        self._trouble.append(why)
        self.told(why)

    def _refuse(self, name: str, why: str) -> None:
        self.told(f"refused a message of {name} at the socket for agents: {why}")

    def _send(self, agent: HostAgent, message: ToAgent) -> bool:
        return self._socket.send(agent.identity, message)

    def _to_all(self, message: ToAgent) -> None:
        for agent in self._hosts.values():
            self._send(agent, message)

    def _wait(self, seconds: float) -> None:
        self.live()
        self.pollable.poll(int(seconds * 1000))
        self._receive()

    def _await(self, is_done: Callable[[], bool], within_s: float, late: Callable[[], str]) -> None:
        """Wait until something is there, or somebody reports that it cannot be."""
        deadline = self._clock() + within_s
        while not is_done():
            self._wait(0.05)
            if trouble := self._trouble or self.watch():
                raise RunError("; ".join(trouble))
            if self._clock() > deadline:
                raise DeadlineError(late())
