"""The forkserver of a simulated world, and the agents of its hosts: they start workers, tell of their ends, and outlive
schedulers. As with the product's, an agent takes its workers with it, and says which it has when it joins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

from dataflow.agent.forkserver_messages import Handed
from dataflow.planning.hosts import Host
from dataflow.scheduler.host_agent import Questions

from .clock import Clock
from .network import SCHEDULER, Pipe, SimulatedNetwork

Event = dict[str, Any]
KILLED = -9


@dataclass
class _Child:
    """The last process of one worker."""

    settings: Mapping[str, Any]
    has_ended: bool = False
    is_told: bool = False
    """Whether some scheduler knows of its end."""


class Forks:
    """The processes of one machine room."""

    def __init__(self, clock: Clock, random: Random, fork: Callable[[str, Mapping[str, Any]], None]) -> None:
        """fork: a process begins."""
        self._clock, self._random, self._fork = clock, random, fork
        self._children: dict[str, _Child] = {}
        self._waiting: list[tuple[str, Mapping[str, Any]]] = []
        """Requests that were not carried out yet."""
        self.note: Callable[[Event], None] = lambda event: None
        """Tells the scheduler of the moment."""
        self.stays = False
        """Whether workers outlive the scheduler."""
        self.closed = False

    def spawn(self, name: str, settings: Mapping[str, Any]) -> None:
        """A scheduler asks for a process."""
        request = (name, settings)
        self._waiting.append(request)
        self._clock.after(0.02 * self._random.random(), lambda: self._start(request))

    def ended(self, name: str, host: str) -> None:
        """A process has ended; it is told soon, but for those that are handed over before."""
        child = self._children[name]
        child.has_ended = True
        self._clock.after(0.1 * self._random.random(), lambda: self._tell(name, child))

    def hand_over(self) -> list[Event]:
        """Every worker, as it is, for a scheduler that takes them over; what was asked for before is done first."""
        for request in list(self._waiting):
            self._start(request)
        handed = []
        for name, child in self._children.items():
            child.is_told |= child.has_ended
            status = KILLED if child.has_ended else None
            facts = {"name": name, "pid": 1, "settings": child.settings, "status": status}
            handed.append({"event": "handed", "alive": not child.has_ended, **facts})
        return handed

    def lose(self) -> None:
        """The scheduler is dead."""
        self.note = lambda event: None

    def _start(self, request: tuple[str, Mapping[str, Any]]) -> None:
        if self.closed or request not in self._waiting:
            return
        self._waiting.remove(request)
        name, settings = request
        self._children[name] = _Child(settings)
        self.note({"event": "started", "name": name, "pid": 1, "status": None})
        self._fork(name, settings)

    def _tell(self, name: str, child: _Child) -> None:
        if not child.is_told:
            self.note({"event": "exited", "name": name, "pid": 1, "status": KILLED})


BEAT_S, SEEK_S = 1.0, 2.0


@dataclass
class _HostChild:
    """The last process of one worker on one host."""

    settings: Mapping[str, Any]
    has_ended: bool = False


@dataclass
class _Agent:
    """One incarnation."""

    up: Pipe = field(init=False)
    down: Pipe = field(init=False)
    questions: Questions = field(default_factory=Questions)
    """Of the scheduler."""
    children: dict[str, _HostChild] = field(default_factory=dict)
    alive: bool = True
    clears: int | None = None
    """The question that it answers once all that it had has ended."""


class Agents:
    """All of them, and the end that the scheduler has of their lines; in the place of `Forks`."""

    def __init__(
        self, clock: Clock, random: Random, network: SimulatedNetwork, hosts: Mapping[str, Host],
        fork: Callable[[str, Mapping[str, Any]], None], kill: Callable[[str, str], None],
    ) -> None:  # fmt: skip
        """fork: a process begins. kill: one ends, by name and host."""
        self._clock, self._random, self._network, self._fork, self._kill = clock, random, network, fork, kill
        self._hosts = hosts
        self._agents: dict[str, _Agent] = {}
        self.attempts: dict[str, int] = {}
        """By worker, the newest."""
        self._handed: dict[str, dict[str, int]] = {}
        """By host, the attempts that its agent has last said it has."""
        self._sought: dict[str, float] = {}
        self.note: Callable[[Event], None] = lambda event: None
        """Tells the scheduler of the moment."""
        self.stays = self.closed = False
        self.is_led = True
        """Whether there is a scheduler, and with it the ledger's service."""
        for host in hosts:
            self._agents[host] = self._made(host)

    # For the scheduler

    def spawn(self, name: str, settings: Mapping[str, Any]) -> None:
        """A scheduler asks for a process."""
        host = settings["host"]
        self.attempts[name] = settings["attempt"]
        self._agents[host].questions.outdate()
        self._agents[host].down.send(lambda agent: self._start(host, agent, name, settings))

    def kill(self, name: str, host: str) -> None:
        """A scheduler kills a worker."""
        self._agents[host].down.send(lambda agent: self._end(host, agent, name))

    def clear(self, host: str) -> None:
        """A scheduler wants all to end that a host has."""
        told, number = self._handed.get(host, {}), self._agents[host].questions.ask()
        self._agents[host].down.send(lambda agent: self._clear(host, agent, told, number))

    def seek(self, host: str) -> None:
        """A scheduler looks for a host that it gave up."""
        if self._sought.get(host, 0.0) + SEEK_S < self._clock.now:
            self._sought[host] = self._clock.now
            self._ask(host, self._agents[host])

    def _ask(self, host: str, agent: _Agent) -> None:
        number = agent.questions.ask()
        agent.down.send(lambda agent: self._join(host, agent, number))

    def hand_over(self) -> list[Event]:
        """Another scheduler is there: each agent looks into the folder now and then, and joins with what it has."""
        self.is_led = True
        self._handed, self._sought = {}, {}
        for host, agent in self._agents.items():
            self._clock.after(SEEK_S * self._random.random(), partial(self._find, host, agent))
        return []

    # For the world

    def lose(self) -> None:
        """The scheduler is dead, and what was on its way to it or from it is lost."""
        self.is_led = False
        self.note = lambda event: None
        for agent in self._agents.values():
            agent.up.take_back()
            agent.down.cut()  # what it had said may still arrive

    def _find(self, host: str, agent: _Agent) -> None:
        """An agent turns to another scheduler, where it reaches it; else it tries again."""
        if not agent.alive or self.closed or not self.is_led or agent.up.whole:
            return
        if self._network.machines.apart(host, SCHEDULER):
            self._clock.after(SEEK_S, partial(self._find, host, agent))
            return
        agent.up, agent.down = self._pipes(host, agent)
        agent.clears = None
        self._join(host, agent)

    def ended(self, name: str, host: str) -> None:
        """A process has ended; its agent tells it soon."""
        agent = self._agents[host]
        if not agent.alive:
            return
        child = agent.children[name]
        event = {"event": "exited", "name": name, "pid": 1, "status": KILLED, "host": host}
        self._clock.after(0.1 * self._random.random(), lambda: self._tell(host, agent, child, event))

    def die(self, host: str, back_s: float, *, is_told: bool) -> None:
        """A host dies with all that it has; another agent is there so much later. is_told: the scheduler's end sees
        that the connection is closed."""
        agent = self._agents[host]
        if not agent.alive:
            return
        agent.alive = False
        for name in [name for name, child in agent.children.items() if not child.has_ended]:
            self._kill(name, host)
        agent.up.cut()
        agent.down.cut()
        if is_told:
            event = {"event": "lost", "name": host, "cause": "has ended its agent"}
            self._clock.after(0.1 * self._random.random(), lambda: self._heard(host, agent, event))
        self._clock.after(back_s, lambda: self._come(host))

    @property
    def names(self) -> list[str]:
        """Of all hosts."""
        return list(self._hosts)

    def _come(self, host: str) -> None:
        """A new agent of a host asks to join."""
        if self.closed:
            return
        agent = self._agents[host] = self._made(host)
        agent.up.send({"event": "lost", "name": host, "cause": "has another agent"})
        self._join(host, agent)

    def _made(self, host: str) -> _Agent:
        agent = _Agent()
        agent.up, agent.down = self._pipes(host, agent)
        self._clock.after(BEAT_S * self._random.random(), lambda: self._beat(host, agent))
        return agent

    def _pipes(self, host: str, agent: _Agent) -> tuple[Pipe, Pipe]:
        """A connection to the scheduler, both ways; broken where there is none."""

        def hear(order: Callable[[_Agent], None]) -> None:
            if agent.alive and not self.closed and agent.down is down:  # not of one that it gave up
                order(agent)

        up = Pipe(self._network, lambda event: self._heard(host, agent, event), host, SCHEDULER)
        down = Pipe(self._network, hear, SCHEDULER, host)
        if not self.is_led:
            up.cut()
            down.cut()
        return up, down

    def _beat(self, host: str, agent: _Agent) -> None:
        if agent.alive and not self.closed:
            agent.up.send({"event": "heard", "name": host})
            self._clock.after(BEAT_S, lambda: self._beat(host, agent))

    def _start(self, host: str, agent: _Agent, name: str, settings: Mapping[str, Any]) -> None:
        agent.children[name] = _HostChild(settings)
        agent.up.send({"event": "started", "name": name, "pid": 1, "status": None, "host": host})
        self._fork(name, settings)

    def _end(self, host: str, agent: _Agent, name: str) -> None:
        if name in agent.children and not agent.children[name].has_ended:
            self._kill(name, host)

    def _clear(self, host: str, agent: _Agent, told: Mapping[str, int], question: int) -> None:
        """told: the attempts that it has said it has; others were started since."""
        agent.clears = question
        for name, child in list(agent.children.items()):
            if told.get(name) == child.settings["attempt"]:
                self._end(host, agent, name)
        self._cleared(host, agent)

    def _tell(self, host: str, agent: _Agent, child: _HostChild, event: Event) -> None:
        child.has_ended = True
        agent.up.send(event)
        self._cleared(host, agent)

    def _cleared(self, host: str, agent: _Agent) -> None:
        if agent.clears is not None and all(child.has_ended for child in agent.children.values()):
            question, agent.clears, agent.children = agent.clears, None, {}
            self._join(host, agent, question)

    def _join(self, host: str, agent: _Agent, question: int | None = None) -> None:
        """question: what it answers; None: it is there anew, and has been asked for nothing."""
        kept = {
            name: Handed(name, 1, child.settings, KILLED if child.has_ended else None, not child.has_ended)
            for name, child in agent.children.items()
        }
        agent.up.send(
            {"event": "joined", "name": host, "host": self._hosts[host], "processes": kept, "question": question}
        )

    def _heard(self, host: str, agent: _Agent, event: Event) -> None:
        """What arrives at the scheduler's end; of an agent that was replaced nothing does."""
        if not self.closed and agent is self._agents[host]:
            if event["event"] == "joined":
                question = event.pop("question")
                if question is not None and not agent.questions.counts(question):
                    if not agent.questions.is_open:
                        self._ask(host, agent)
                    return
                self._handed[host] = {each.name: each.settings["attempt"] for each in event["processes"].values()}
            self.note(event)
