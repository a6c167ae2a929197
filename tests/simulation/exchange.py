"""What a scheduler has of its workers on one machine: lines, which break when it dies and find the
next one by themselves, and the forkserver, which outlives it.

As with ZeroMQ: what a worker says while nobody is there waits in its own memory; what the dead
scheduler had received is lost; and a new scheduler reaches no worker before that has found it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

from .clock import Clock
from .network import SCHEDULER, Pipe, SimulatedNetwork

RETURN_S = 0.2
"""Within which a worker finds the next scheduler."""

Hear = Callable[[Any], None]


class Line:
    """One incarnation of a worker, and what it says and hears."""

    def __init__(self, network: SimulatedNetwork, hear: Hear, host: str) -> None:
        self._network, self._hear, self._host = network, hear, host
        self._up: Pipe | None = None
        self._down: Pipe | None = None
        self._kept: deque[Any] = deque()
        self._swallows = 0
        """So many messages more go to the one that has died."""
        self.cut_off = False
        """The worker is dead."""

    def send(self, item: Any) -> None:
        """The worker says something."""
        if self._up is not None:
            self._up.send(item)
        elif self._swallows:
            self._swallows -= 1
        elif not self.cut_off:
            self._kept.append(item)

    def say(self, item: Any) -> None:
        """The scheduler says something; nobody hears it where the worker has not found this
        scheduler.
        """
        if self._down is not None:
            self._down.send(item)

    def connect(self, scheduler: Hear) -> None:
        """A scheduler is found."""
        if self.cut_off:
            return
        self._up = Pipe(self._network, scheduler, self._host, SCHEDULER)
        self._down = Pipe(self._network, self._hear, SCHEDULER, self._host)
        while self._kept:
            self._up.send(self._kept.popleft())

    def lose(self) -> None:
        """The scheduler is dead: of what is under way to it the first ones are lost."""
        if self._up is None or self._down is None:
            return
        self._down.cut()
        waiting = self._up.take_back()
        lost = self._network.random.randrange(len(waiting) + 3)
        self._swallows = max(0, lost - len(waiting))
        self._kept = deque(waiting[lost:])
        self._up = self._down = None

    def cut(self) -> None:
        """The worker is dead: of what it said the first words may still arrive, and none reaches
        it.
        """
        self.cut_off = True
        self._kept.clear()
        for pipe in (self._up, self._down):
            if pipe is not None:
                pipe.cut()


class Exchange:
    """The lines of all workers of one machine room, over all of its schedulers."""

    def __init__(self, network: SimulatedNetwork) -> None:
        self._network = network
        self._lines: dict[tuple[str, str], Line] = {}
        """By worker and host."""
        self._scheduler: Hear | None = None

    def connect(self, name: str, host: str, hear: Hear) -> Line:
        """An incarnation of a worker takes the name over on its host."""
        self.hang_up(name, host)
        line = self._lines[name, host] = Line(self._network, hear, host)
        if self._scheduler is not None:
            line.connect(self._scheduler)
        return line

    def hang_up(self, name: str, host: str) -> None:
        """The worker is gone."""
        if (name, host) in self._lines:
            self._lines.pop((name, host)).cut()

    def say(self, name: str, host: str, item: Any) -> None:
        """The scheduler says something to a worker."""
        if (name, host) in self._lines:
            self._lines[name, host].say(item)

    def open(self, scheduler: Hear) -> None:
        """A scheduler is there; the lines that wait for one find it, one after the other."""
        self._scheduler = scheduler
        for line in self._lines.values():
            self._network.clock.after(
                RETURN_S * self._network.random.random(), partial(self._find, line, scheduler)
            )

    def lose(self) -> None:
        """The scheduler is dead."""
        self._scheduler = None
        for line in self._lines.values():
            line.lose()

    def _find(self, line: Line, scheduler: Hear) -> None:
        if self._scheduler is scheduler:
            line.connect(scheduler)


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

    def __init__(
        self, clock: Clock, random: Random, fork: Callable[[str, Mapping[str, Any]], None]
    ) -> None:
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
        """Every worker, as it is, for a scheduler that takes them over; what was asked for before
        is done first.
        """
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
