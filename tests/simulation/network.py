"""A seeded network for `transport.data`: delays, connections that break and lose what was under
way.

Within one connection nothing is reordered, as with TCP and ipc. Like a ZeroMQ socket, an end keeps
what it is given while there is no connection, and what was read from a connection before it broke
may be heard after that news.
"""

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, cast

import pyarrow as pa
import zmq

from transport.data import messages
from transport.data.messages import Data, Message
from transport.data.sockets import Arrival, ConnectionEvent, Junk, Packed
from transport.errors import AddressError, FrameError

from .clock import Clock
from .process import Process

RETRY_S = 1.0
"""Within which a connection sends again what a cut link has held up."""
SCHEDULER = ""
"""Where the scheduler sits, and the ledger's service beside it: no host of workers."""
DAMAGED = "the bytes are not those that were sent"


@dataclass(frozen=True, kw_only=True)
class Weather:
    """How bad the network is."""

    delay_s: float = 0.001
    """About as long as a message takes."""
    slow: float = 0.02
    """Share of messages that take up to 100 times as long."""
    notice_s: float = 0.05
    """About as long as it takes to see that a connection broke."""
    damage: float = 0.01
    """Share of batches that arrive damaged; none does so twice in a row."""


class Machines:
    """Who reaches whom."""

    def __init__(self, clock: Clock, random: Random) -> None:
        self._clock, self._random = clock, random
        self._cut: dict[tuple[str, str], float] = {}
        """By link, from and to: until when nothing passes."""
        self._slow: dict[str, float] = {}
        """By host: how many times as long its messages take."""
        self.on_cut: list[Callable[[], None]] = []
        """Called when a link was cut: long connections may break."""

    def cut(self, from_: str, to: str, until: float) -> None:
        """Nothing passes from one to the other until then."""
        self._cut[from_, to] = max(until, self._cut.get((from_, to), 0.0))

    def mend(self, host: str) -> None:
        """Whatever was cut of a host's links passes again."""
        self._cut = {link: until for link, until in self._cut.items() if host not in link}

    def slow(self, host: str, times: float) -> None:
        """Whatever this host says or hears takes so many times as long."""
        self._slow[host] = times

    def opens(self, from_: str, to: str) -> float:
        """When something can pass from one to the other; now, where nothing is cut."""
        return (
            max(self._clock.now, self._cut.get((from_, to), 0.0))
            if from_ != to
            else self._clock.now
        )

    def apart(self, one: str, other: str) -> float:
        """Seconds until both can speak to each other again; 0 where they can."""
        return max(self.opens(one, other), self.opens(other, one)) - self._clock.now

    def times(self, one: str, other: str) -> float:
        """How many times as long a message takes between two."""
        return max(self._slow.get(one, 1.0), self._slow.get(other, 1.0)) if one != other else 1.0


class Pipe:
    """One direction of one connection: messages arrive in order, each after a delay, until it
    breaks.
    """

    def __init__(
        self,
        network: "SimulatedNetwork",
        deliver: Callable[[Any], None],
        from_: str = "",
        to: str = "",
    ) -> None:
        """from_, to: hosts."""
        self._network, self._deliver, self._from, self._to = network, deliver, from_, to
        self._under_way: deque[Any] = deque()
        self._last = 0.0
        self.whole = True

    def send(self, item: Any) -> None:
        """Put a message on its way; into a broken pipe it is lost."""
        if not self.whole:
            return
        clock = self._network.clock
        delay_s = self._network.delay_s() * self._network.machines.times(self._from, self._to)
        self._last = max(self._last, clock.now + delay_s)
        self._under_way.append(item)
        clock.after(self._last - clock.now, self._arrive)

    def cut(self) -> None:
        """Break: of what is under way a few messages still arrive, the first ones."""
        self.whole = False
        for _ in range(self._network.random.randint(0, len(self._under_way))):
            self._under_way.pop()

    def take_back(self) -> list[Any]:
        """Break, and give back all that was under way."""
        self.whole = False
        found, self._under_way = list(self._under_way), deque()
        return found

    def _arrive(self) -> None:
        wait_s = self._network.machines.opens(self._from, self._to) - self._network.clock.now
        if wait_s > 0:  # and until it is tried again, which other connections do sooner or later
            self._network.clock.after(
                min(wait_s, RETRY_S) + RETRY_S * self._network.random.random(), self._arrive
            )
        elif self._under_way:
            self._deliver(self._under_way.popleft())


class Wire:
    """What lies between a connection and a listener while both are there."""

    def __init__(
        self,
        network: "SimulatedNetwork",
        connection: "SimulatedConnection",
        listener: "SimulatedListener",
        token: int,
    ) -> None:
        self.connection, self.listener, self.token = connection, listener, token
        self.hosts = (connection.host, listener.host)
        self.forth = Pipe(network, listener.arrive, *self.hosts)
        self.back = Pipe(network, connection.hear, *reversed(self.hosts))
        self.swallows = network.random.randrange(3)
        """After it broke, and before the connection notices, so many messages go nowhere; later
        ones are kept."""

    @property
    def whole(self) -> bool:
        """Whether it is not broken."""
        return self.forth.whole

    def cut(self) -> None:
        """Break it in both directions."""
        self.forth.cut()
        self.back.cut()


class SimulatedNetwork:
    """All addresses and all connections of a simulated machine room."""

    def __init__(self, clock: Clock, random: Random, weather: Weather) -> None:
        self.clock, self.random, self.weather = clock, random, weather
        self.machines = Machines(clock, random)
        self.listeners: dict[str, SimulatedListener] = {}
        self.wires: list[Wire] = []
        self._tokens = 0

    def of(self, process: Process) -> "NetworkOf":
        """The network as one process sees it."""
        return NetworkOf(self, process)

    def delay_s(self) -> float:
        """How long the next message takes."""
        weather, random = self.weather, self.random
        slow = 100.0 if random.random() < weather.slow else 2.0
        return weather.delay_s * slow * random.random()

    def connect(self, connection: "SimulatedConnection", listener: "SimulatedListener") -> Wire:
        """A new wire."""
        self._tokens += 1
        made = Wire(self, connection, listener, self._tokens)
        listener.wires[made.token] = made
        self.wires = [one for one in self.wires if one.whole]
        self.wires.append(made)
        return made

    def cut(self, wire: Wire) -> None:
        """A wire breaks; its connection notices later."""
        if wire.whole:
            wire.cut()
            self.clock.after(
                self.weather.notice_s * 2 * self.random.random(),
                lambda: wire.connection.noticed(wire),
            )


class NetworkOf:
    """`transport.data.Network` for one life of one process."""

    def __init__(self, network: SimulatedNetwork, process: Process) -> None:
        self._network, self._process = network, process

    def connect(self, address: str) -> "SimulatedConnection":
        """Connect to a receiver, which may appear later."""
        self._process.point()
        return SimulatedConnection(self._network, self._process, address)

    def listen(
        self, address: str, *, max_message_bytes: int, queue_messages: int
    ) -> "SimulatedListener":
        """Listen at an address."""
        self._process.point()
        return SimulatedListener(
            self._network, self._process, address.replace("ipc://", f"ipc://{self._process.host}")
        )


class SimulatedConnection:
    """A sender's end of its wires to one address, one after the other."""

    sockets: "Sequence[zmq.Socket[bytes]]" = ()

    def __init__(self, network: SimulatedNetwork, process: Process, address: str) -> None:
        self.address, self.host = address, process.host
        self._network, self._process = network, process
        self._news: deque[ConnectionEvent] = deque()
        self._replies: deque[Message] = deque()
        self._kept: deque[tuple[Message, Any]] = deque()
        self._wire: Wire | None = None
        self._open = True
        process.on_death.append(self.close)
        network.clock.after(network.delay_s(), self._connect)

    def pack(
        self, batch: pa.RecordBatch, encoder: messages.BatchEncoder, size_bytes: int
    ) -> Packed:
        """The batch itself: it is immutable."""
        return Packed(content=batch, size_bytes=size_bytes, checksum=0)

    def put(self, message: Message, payload: Any = None) -> bool:
        """Send, or keep for the next wire."""
        self._process.point()
        wire = self._wire
        if wire is not None and wire.whole:
            self._send(message, payload)
        elif wire is not None and wire.swallows:
            wire.swallows -= 1
        else:
            self._kept.append((message, payload))
        return True

    def get(self) -> Message | ConnectionEvent | Junk | None:
        """What happened to the connection, before what came over it."""
        if self._news:
            return self._news.popleft()
        return self._replies.popleft() if self._replies else None

    def hear(self, message: Message) -> None:
        """A reply arrives."""
        if self._open:
            self._replies.append(message)
            self._process.wake()

    def noticed(self, wire: Wire) -> None:
        """The wire turns out to be broken; look for another one."""
        if self._open and self._wire is wire:
            self._wire = None
            self._news.append(ConnectionEvent.LOST)
            self._process.wake()
            self._network.clock.after(
                self._network.weather.notice_s * self._network.random.random(), self._connect
            )

    def wait(self, timeout_s: float) -> None:
        """Nobody waits here: time passes between events."""

    def close(self) -> None:
        """Let go of the connection."""
        self._open = False
        if self._wire is not None:
            self._wire.cut()

    def _connect(self) -> None:
        if not self._open:
            return
        listener = self._network.listeners.get(self.address)
        if listener is None or self._network.machines.apart(self.host, listener.host):
            self._network.clock.after(
                self._network.weather.notice_s * (0.5 + self._network.random.random()),
                self._connect,
            )
            return
        self._wire = self._network.connect(self, listener)
        self._news.append(ConnectionEvent.UP)
        while self._kept:
            self._send(*self._kept.popleft())
        self._process.wake()

    def _send(self, message: Message, payload: Any) -> None:
        assert self._wire is not None
        self._wire.forth.send(
            Arrival(connection=self._wire.token, message=message, payload=payload)
        )


class SimulatedListener:
    """A receiver's end of its connections."""

    sockets: "Sequence[zmq.Socket[bytes]]" = ()

    def __init__(self, network: SimulatedNetwork, process: Process, address: str) -> None:
        if address in network.listeners:
            raise AddressError(f"'{address}' is taken; got a second receiver; close the first one")
        self.address, self.host = address, process.host
        self.wires: dict[Hashable, Wire] = {}
        self._network, self._process = network, process
        self._arrivals: deque[Arrival] = deque()
        self._spared: set[tuple[str, int, int]] = set()
        """Batches that were damaged once."""
        network.listeners[address] = self
        process.on_death.append(self.close)

    def arrive(self, arrival: Arrival) -> None:
        """A message is here."""
        self._arrivals.append(arrival)
        self._process.wake()

    def get(self, timeout_s: float) -> Arrival | Junk | None:
        """The next arrival; time does not pass here."""
        return self._arrivals.popleft() if self._arrivals else None

    def waiting(self) -> bool:
        """Whether something arrived that `get` did not return yet."""
        return bool(self._arrivals)

    def put(self, connection: Hashable, message: Message) -> None:
        """Answer; over a broken connection it is lost."""
        self._process.point()
        self.wires[connection].back.send(message)

    def assemble(self, begun: Any, payload: Any, message: Data) -> Any:
        """The batch itself, which comes with each of its parts."""
        return payload

    def open(self, body: Any, message: Data, schema: pa.Schema) -> pa.RecordBatch:
        """The batch, checked as if it had come from elsewhere."""
        which = (message.sender, message.life, message.sequence)
        if (
            which not in self._spared
            and self._network.random.random() < self._network.weather.damage
        ):
            self._spared.add(which)
            raise FrameError(DAMAGED)
        batch = cast(pa.RecordBatch, body)
        messages.check_schema(batch.schema, schema, edge=message.edge)
        messages.check_batch(batch, message)
        return batch

    def close(self) -> None:
        """Stop listening."""
        if self._network.listeners.get(self.address) is self:
            del self._network.listeners[self.address]
            for wire in self.wires.values():
                self._network.cut(wire)
