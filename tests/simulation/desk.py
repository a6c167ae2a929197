"""The scheduler's desk in a simulated world: what `control_server.Desk` is over sockets and a forkserver."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack

from dataflow.scheduler.control_server import Asker
from dataflow.scheduler.deferred_sends import Unheard

from .clock import Clock
from .exchange import Exchange
from .forks import Event, Forks

Message = tuple[str | Asker, Any]
_SOMEBODY = Asker(b"somebody")


@dataclass(frozen=True, kw_only=True)
class Room:
    """What a scheduler finds in its world, and what is there after it."""

    clock: Clock
    folder: Path
    exchange: Exchange
    forks: Forks
    step: Callable[[], None]
    """Lets the next event happen; while the scheduler waits, the world goes on."""
    point: Callable[[], None]
    """The scheduler touches the outside: it may die here."""
    kill: Callable[[str], None]
    """Ends a process."""
    told: Callable[[Mapping[str, Any]], None]
    """Hears every word to a worker."""
    asked: list[Mapping[str, Any]] = field(default_factory=list)
    """Commands that nobody answered; whoever gave them asks the next scheduler."""


class SimulatedDesk:
    """Messages and processes of one scheduler; it decides nothing."""

    commands = "commands"
    number, lives = 0, False

    def __init__(self, room: Room, handed: Sequence[Event] = (), alone_s: float = 0.0, *, keeps: bool = False) -> None:
        """handed, alone_s: as `TakenDesk` has them. keeps: whether what is decided is written before it is said."""
        self.folder, self.address, self.handed, self.alone_s = room.folder, "control", handed, alone_s
        self.ahead: Callable[[], None] = lambda: None
        self._room, self._keeps = room, keeps
        self._unheard = Unheard(event["name"] for event in handed if event["alive"])
        self._said: deque[Message] = deque()
        self._events: deque[Event] = deque()
        self._outgoing: deque[Callable[[], None]] = deque()
        """What the scheduler decided; it happens when it waits next."""
        room.exchange.open(self._said.append)
        room.forks.note = self._events.append
        for command in room.asked:
            self.ask(command)

    def ask(self, command: Mapping[str, Any]) -> None:
        """Somebody gives a command."""
        self._said.append((_SOMEBODY, dict(command)))

    def wait(self, wait_s: float) -> tuple[list[Message], list[Event]]:
        """What is said, and what the forkserver tells; the world goes on meanwhile."""
        if self._outgoing and self._keeps:
            self._room.point()
            self.ahead()
        while self._outgoing:
            self._room.point()
            self._outgoing.popleft()()
        clock = self._room.clock
        deadline = clock.now + wait_s
        clock.after(wait_s, lambda: None)
        while not self._said and not self._events and clock.now < deadline:
            self._room.step()
        said, events = list(self._said), list(self._events)
        self._said.clear()
        self._events.clear()
        for who, _ in said:
            if isinstance(who, str):
                self._unheard.spoke(who)
        return said, events

    def last_words(self, wait_s: float, pause_s: float = 0.1) -> Iterator[Message]:
        """What is said soon."""
        yield from self.wait(pause_s)[0]

    def send(self, to: str | Asker, message: Mapping[str, Any]) -> None:
        """Say something to a worker, or answer a command."""
        if message.get("kind") == "heard":
            return
        if isinstance(to, Asker):
            self._outgoing.append(self._answered)
            return
        packed = msgpack.packb(message)

        def say() -> None:
            word = msgpack.unpackb(packed)
            self._room.told(word)
            self._room.exchange.say(to, word)

        self._outgoing.append(lambda: self._unheard.reach(to, say))

    def stay(self, wait_s: float, end_s: float, silent_s: float) -> None:
        """From now on workers outlive the scheduler, where this world has another one."""
        self._outgoing.append(self._stay)

    def spawn(self, name: str, settings: Mapping[str, Any], heavy: bool, keeps: bool = False) -> None:
        """Ask for a process."""

        def ask() -> None:
            self._unheard.forget(name)
            self._room.forks.spawn(name, settings)

        self._outgoing.append(ask)

    def kill(self, name: str, number: int) -> None:
        """Send a signal to a worker: all of them end it."""
        self._outgoing.append(lambda: self._room.kill(name))

    def check(self) -> None:
        """No scheduler is replaced that lives."""

    def refuse(self, who: str) -> None:
        """Nobody is a stranger."""
        raise AssertionError(who)

    def close(self) -> None:
        """The world is closed by its owner."""

    def _stay(self) -> None:
        self._room.forks.stays = self._keeps

    def _answered(self) -> None:
        if self._room.asked:
            self._room.asked.pop(0)
