"""The scheduler's desk in a simulated world: what `dataflow.desk.Desk` is over sockets and a forkserver."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgpack

from .network import Pipe, SimulatedNetwork

Message = tuple[str, Any]


class SimulatedDesk:
    """Messages and processes of one world; while the scheduler waits, the world goes on.

    step: lets the next event of the world happen. point: called wherever the scheduler touches the outside; it may die
    there. spawn, kill: what the world does when the scheduler asks for a process, or ends one. told: hears every word
    to a worker.
    """

    commands = "commands"

    def __init__(
        self, network: SimulatedNetwork, folder: Path, step: Callable[[], None], point: Callable[[], None],
        spawn: Callable[[str, Mapping[str, Any]], None], kill: Callable[[str], None],
        told: Callable[[Mapping[str, Any]], None] = lambda word: None,
    ) -> None:  # fmt: skip
        self.folder, self.address = folder, "control"
        self._network, self._step, self._point, self._told = network, step, point, told
        self._spawn, self._kill = spawn, kill
        self._said: deque[Message] = deque()
        self._events: deque[dict[str, Any]] = deque()
        self._words: dict[str, Pipe] = {}
        self._outgoing: deque[Callable[[], None]] = deque()
        """What the scheduler decided; it happens when it waits next."""

    def connect(self, name: str, hear: Callable[[Any], None]) -> Pipe:
        """An incarnation of a worker takes the name over; what it says goes into the pipe."""
        if name in self._words:
            self._words[name].cut()
        self._words[name] = Pipe(self._network, hear)
        return Pipe(self._network, self._said.append)

    def hang_up(self, name: str) -> None:
        """The worker is gone: no word reaches it."""
        if name in self._words:
            self._words[name].cut()

    def note(self, event: Mapping[str, Any]) -> None:
        """The forkserver has something to tell."""
        self._events.append(dict(event))

    def ask(self, command: Mapping[str, Any]) -> None:
        """Somebody gives a command; the answer goes nowhere."""
        self._said.append(("?somebody", dict(command)))

    def wait(self, wait_s: float) -> tuple[list[Message], list[dict[str, Any]]]:
        """What is said, and what the forkserver tells; the world goes on meanwhile."""
        while self._outgoing:
            self._point()
            self._outgoing.popleft()()
        deadline = self._network.clock.now + wait_s
        while not self._said and not self._events and self._network.clock.now < deadline:
            self._step()
        said, events = list(self._said), list(self._events)
        self._said.clear()
        self._events.clear()
        return said, events

    def last_words(self, wait_s: float, pause_s: float = 0.1) -> Iterator[Message]:
        """What is said soon."""
        yield from self.wait(pause_s)[0]

    def send(self, name: str, message: Mapping[str, Any]) -> None:
        """Say something to a worker."""
        packed = msgpack.packb(message)
        self._outgoing.append(lambda: self._pass_on(name, msgpack.unpackb(packed)))

    def stay(self, wait_s: float, end_s: float) -> None:
        """Workers outlive the scheduler; this world's end with it."""

    def spawn(self, name: str, settings: Mapping[str, Any], heavy: bool, keeps: bool = False) -> None:
        """Ask for a process."""
        self._outgoing.append(lambda: self._spawn(name, settings))

    def kill(self, name: str, number: int) -> None:
        """Send a signal to a worker: all of them end it."""
        self._outgoing.append(lambda: self._kill(name))

    def close(self) -> None:
        """The world is closed by its owner."""

    def _pass_on(self, name: str, message: Mapping[str, Any]) -> None:
        self._told(message)
        if name in self._words:
            self._words[name].send(message)
