"""The scheduler's control server in a simulated world, where there are no sockets and no
forkserver.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dataflow.scheduler.agents import Agents
from dataflow.scheduler.control_server import Client
from dataflow.scheduler.events import Received
from dataflow.scheduler.requests import Reply, Scale, SwapNode
from dataflow.worker import swapped
from dataflow.worker.messages import TO_SCHEDULER, TO_WORKER, FromWorker, Heard, ToWorker
from transport.life import Life

from .clock import Clock
from .exchange import Event, Exchange, Forks
from .guests import Swappers
from .hosts import Hosts
from .laws import Broken
from .network import SCHEDULER, Machines
from .process import Crash, Process

_SOMEBODY, _SWAPPER = Client(b"somebody"), Client(b"swapper")
_LOOK_S = 0.1
"""Between two looks whether the ledger's service is there again."""


class Fenced(Exception):
    """The ledger's service refuses an older attempt."""


@dataclass(frozen=True, kw_only=True)
class Room:
    """What a scheduler finds in its world, and what is there after it."""

    clock: Clock
    folder: Path
    exchange: Exchange | Hosts
    forks: Forks | Hosts
    step: Callable[[], None]
    """Lets the next event happen; while the scheduler waits, the world goes on."""
    point: Callable[[], None]
    """The scheduler touches the outside: it may die here."""
    kill: Callable[[str, str], None]
    """Ends a process, by name and host."""
    host_of: Callable[[str], str]
    """Where a worker runs."""
    machines: Machines
    told: Callable[[ToWorker], None]
    """Hears every message to a worker."""
    swappers: Callable[[], Swappers | None]
    """Who asks for swaps."""
    asked: list[Scale] = field(default_factory=list)
    """Requests that nobody answered; whoever made them asks the next scheduler."""

    def is_fenced(self, process: Process) -> bool:
        """Whether the scheduler has started another attempt of its worker, so that it can commit
        nothing.
        """
        return isinstance(self.forks, Hosts) and process.attempt < self.forks.attempts.get(
            process.name, 0
        )

    def waits(self, process: Process) -> bool:
        """Whether a process stands still until the ledger's service can be reached, as some do;
        without a scheduler, with which the service ends, all do.
        """
        if isinstance(self.forks, Hosts) and not self.forks.is_led:
            process.stopped_until = self.clock.now + _LOOK_S
        apart_s = self.machines.apart(process.host, SCHEDULER)
        if apart_s and process.is_patient:
            process.stopped_until = self.clock.now + apart_s
        return process.stopped_until > self.clock.now

    def may_write(self, process: Process) -> None:
        """The ledger's service takes words of the newest attempts alone. Raises Crash where it is
        out of reach for too long.
        """
        if self.machines.apart(process.host, SCHEDULER):
            process.die()
            raise Crash(process.name)
        if self.is_fenced(process):
            raise Fenced(f"'{process.name}' was started again since its attempt {process.attempt}")


class SimulatedControlServer:
    """Messages and processes of one scheduler; it decides nothing."""

    requests = "requests"
    number, lives, keys = 0, False, None
    sockets: Sequence[Path] = ()

    def __init__(
        self, room: Room, handed: Sequence[Event] = (), alone_s: float = 0.0, *, keeps: bool = False
    ) -> None:
        """handed, alone_s: of workers that are taken over. keeps: whether decisions are written
        down first.
        """
        self.folder = self.left = room.folder
        self.handed, self.alone_s = handed, alone_s
        self.ahead: Callable[[], None] = lambda: None
        self._room, self._keeps = room, keeps
        self._received: deque[Received] = deque()
        self._requested: deque[tuple[Client, Scale | SwapNode]] = deque()
        self._events: deque[Event] = deque()
        self._outgoing: deque[Callable[[], None]] = deque()
        """What the scheduler decided; it happens when it waits next."""
        self._open()
        for request in room.asked:
            self.ask(request)

    def _open(self) -> None:
        exchange, forks = self._room.exchange, self._room.forks
        assert isinstance(exchange, Exchange) and isinstance(forks, Forks), "those of this machine"
        exchange.open(self._received.append)
        forks.note = self._events.append

    def ask(self, request: Scale | SwapNode) -> None:
        """Somebody makes a request."""
        self._requested.append((_SOMEBODY if isinstance(request, Scale) else _SWAPPER, request))

    def hear(self, name: str, message: FromWorker) -> None:
        """A process that is no worker says something."""
        self._received.append(Received(name, message))

    def note(self, event: Event) -> None:
        """The forkserver tells something of such a one."""
        self._events.append(event)

    def wait(
        self, wait_s: float
    ) -> tuple[list[Received], list[tuple[Client, Scale | SwapNode]], list[Event]]:
        """What is sent, and what the forkserver tells; the world goes on meanwhile."""
        if self._outgoing and self._keeps:
            self._room.point()
            self.ahead()
        while self._outgoing:
            self._room.point()
            self._outgoing.popleft()()
        self._pass()
        clock = self._room.clock
        deadline = clock.now + wait_s
        clock.after(wait_s, lambda: None)
        while not (self._received or self._requested or self._events) and clock.now < deadline:
            self._room.step()
            self._hear()
        received, requested, events = (
            list(self._received),
            list(self._requested),
            list(self._events),
        )
        for queue in (self._received, self._requested, self._events):
            queue.clear()
        return received, requested, events

    def drain(self, wait_s: float, pause_s: float = 0.1) -> Iterator[Received]:
        """What is sent soon."""
        messages, requests, events = self.wait(pause_s)
        self._requested.extend(requests)
        self._events.extend(events)
        yield from messages

    def send(self, to: str, message: ToWorker, host: str) -> None:
        """Send a message to a worker on a host."""
        if isinstance(message, Heard):
            return
        packed = TO_WORKER.encode(message)

        def send() -> None:
            sent = TO_WORKER.decode(packed)
            self._room.told(sent)
            self._say(to, host, packed)

        self._outgoing.append(send)

    def place(self, host: str) -> dict[str, str]:
        """What is particular in the settings of a worker on a host."""
        return {"control": "control", "sockets": str(self.folder)}

    def reply(self, to: Client, reply: Reply) -> None:
        """Answer a request."""
        if to == _SWAPPER:
            self._swappers.hear(reply)
        else:
            self._outgoing.append(self._answered)

    def stay(self, wait_s: float, end_s: float, silent_s: float) -> None:
        """From now on workers outlive the scheduler, where this world has another one."""
        self._outgoing.append(self._stay)

    def spawn(
        self, name: str, settings: Mapping[str, Any], heavy: bool, keeps: bool = False
    ) -> None:
        """Ask for a process."""
        if name.startswith(f"{swapped.NAME}-"):
            self._outgoing.append(lambda: self._swappers.try_(name, settings))
        else:
            self._outgoing.append(lambda: self._fork(name, settings))

    @property
    def _swappers(self) -> Swappers:
        found = self._room.swappers()
        assert found is not None, "nobody else asks for a swap"
        return found

    def dismiss(self, name: str) -> None:
        """A trial's word may still come."""

    def kill(self, name: str, number: int) -> None:
        """Send a signal to a worker: all of them end it."""
        host = self._room.host_of(name)
        self._outgoing.append(lambda: self._room.kill(name, host))

    def check(self) -> None:
        """No scheduler is replaced that lives."""

    def refuse(self, who: str, why: str) -> None:
        """Nobody is a stranger."""
        raise Broken(f"the scheduler refuses a message of {who}: {why}")

    def close(self) -> None:
        """The world is closed by its owner."""

    def _stay(self) -> None:
        self._room.forks.stays = self._keeps

    def _say(self, to: str, host: str, packed: bytes) -> None:
        exchange = self._room.exchange
        assert isinstance(exchange, Exchange)
        exchange.say(to, host, TO_WORKER.decode(packed))

    def _fork(self, name: str, settings: Mapping[str, Any]) -> None:
        forks = self._room.forks
        assert isinstance(forks, Forks)
        forks.spawn(name, settings)

    def _pass(self) -> None:
        """What was said to agents leaves."""

    def _hear(self) -> None:
        """What has come from agents is taken in."""

    def _answered(self) -> None:
        if self._room.asked:
            self._room.asked.pop(0)


class SimulatedHostsControlServer(SimulatedControlServer):
    """Over the product's `Agents`."""

    def __init__(
        self, room: Room, agents: Agents, alone_s: float = 0.0, *, keeps: bool = False
    ) -> None:
        self._agents = agents
        super().__init__(room, (), alone_s, keeps=keeps)

    def kill(self, name: str, number: int) -> None:
        """Send a signal to a worker."""
        self._outgoing.append(lambda: self._agents.kill(name, number))

    def clear(self, host: str) -> None:
        """As `Agents.clear`."""
        self._outgoing.append(lambda: self._agents.clear(host))

    def seek(self, host: str) -> None:
        """As `Agents.seek`."""
        self._agents.seek(host)

    def _open(self) -> None:
        """Its agents speak to it already."""

    def _say(self, to: str, host: str, packed: bytes) -> None:
        self._agents.messages.say(to, host, packed)

    def _fork(self, name: str, settings: Mapping[str, Any]) -> None:
        forks = self._room.forks
        assert isinstance(forks, Hosts)
        forks.attempts[name] = Life(*settings["life"]).attempt
        self._agents.spawn(name, settings, heavy=False)

    def _pass(self) -> None:
        self._agents.live()
        self._agents.flush()
        self._hear()

    def _hear(self) -> None:
        self._events.extend(self._agents.events())
        for host, name, encoded in self._agents.messages.heard():
            self._received.append(Received(name, TO_SCHEDULER.decode(encoded), host))
