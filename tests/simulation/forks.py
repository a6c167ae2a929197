"""The forkserver of a simulated world: it starts workers, tells of their ends, and outlives schedulers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from .clock import Clock

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
