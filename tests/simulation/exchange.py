"""The lines between the scheduler and its workers: they break when it dies, and find the next one by themselves.

As with ZeroMQ: what a worker says while nobody is there waits in its own memory; what the dead scheduler had received
is lost; and a new scheduler reaches no worker before that has found it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

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
        """The scheduler says something; nobody hears it where the worker has not found this scheduler."""
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
        """The worker is dead: of what it said the first words may still arrive, and none reaches it."""
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
            self._network.clock.after(RETURN_S * self._network.random.random(), partial(self._find, line, scheduler))

    def lose(self) -> None:
        """The scheduler is dead."""
        self._scheduler = None
        for line in self._lines.values():
            line.lose()

    def _find(self, line: Line, scheduler: Hear) -> None:
        if self._scheduler is scheduler:
            line.connect(scheduler)
