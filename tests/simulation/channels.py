"""Senders and receivers of `transport.data` alone, in processes that crash over a network that
breaks.
"""

from collections import deque
from random import Random

import pyarrow as pa

from transport.data import Delivery, Receiver, Sender
from transport.life import Life

from .clock import Clock
from .laws import Broken, check
from .nemesis import Nemesis, Trouble
from .network import DAMAGED, SimulatedNetwork, Weather
from .process import Process

SCHEMA = pa.schema([("item", pa.int64())])
LONGEST_S = 200.0
"""Virtual seconds within which all must be done."""
MOST_EVENTS = 100_000


class ChannelWorld:
    """Some senders with items of their own, some receivers, and what has been done for good.

    A sender that restarts sends again whatever is not done; a receiver does an item for good before
    it acknowledges.
    """

    def __init__(self, seed: int, *, keep_log: bool = False) -> None:
        random = Random(seed)
        self.seed, self.random, self.clock = seed, random, Clock()
        self.log: list[str] | None = [] if keep_log else None
        weather = Weather(
            delay_s=random.choice((1e-4, 1e-3, 2e-2)), slow=random.choice((0.0, 0.02, 0.2))
        )
        self.network = SimulatedNetwork(self.clock, random, weather)
        senders, receivers = random.randint(1, 3), random.choice((1, 1, 1, 2))
        self.expected = random.randint(1, senders)
        """Senders that a receiver keeps room for before they come."""
        self.capacity = random.randint(2 * senders, 8 * senders)
        most = max(1, self.capacity // senders // 2)
        self.beyond = senders * (most - 1)
        """Rows above the capacity: a batch that is larger than its sender's window travels
        alone."""
        self.sizes = {
            sender: [random.randint(1, most) for _ in range(random.randint(1, 12))]
            for sender in range(senders)
        }
        self.message_bytes = (64 << 20, 200)[seed % 2]
        """Every other room's batches go in parts."""
        self.done: set[tuple[int, int]] = set()
        """(sender, item): for good, as if it stood in a ledger."""
        self.in_order = receivers == 1
        self.ways = [f"way-{index}" for index in range(receivers)]
        self.sending = [SendingProcess(self, index) for index in self.sizes]
        self.receiving = [ReceivingProcess(self, way) for way in self.ways]
        self.processes = [
            *(one.process for one in self.sending),
            *(one.process for one in self.receiving),
        ]
        self._begin()
        Nemesis(
            self.clock,
            random,
            lambda: self.network,
            lambda: self.processes,
            Trouble(points=20),
            self.say,
        )

    def say(self, who: str, what: str) -> None:
        """A line of the log."""
        if self.log is not None:
            self.log.append(f"{self.clock.now:10.5f}  {who}: {what}")

    def _begin(self) -> None:
        for one in (*self.receiving, *self.sending):
            self._watch(one)

    def _watch(self, one: "SendingProcess | ReceivingProcess") -> None:
        """Start it; when it dies, start it again after a while."""
        one.start()

        def again() -> None:
            self.say(one.process.name, f"died as attempt {one.process.attempt}")
            self.clock.after(self.random.random() * 3.0, lambda: self._watch(one))

        one.process.on_death.append(again)

    def run(self) -> None:
        """Until all is done; raises Broken."""
        while not self.over:
            check(self._step(), "the world stands still", self.who_waits)
            check(
                self.clock.events < MOST_EVENTS,
                "messages go back and forth without end",
                self.who_waits,
            )
            check(self.clock.now < LONGEST_S, f"not done after {LONGEST_S:.0f} s", self.who_waits)
            for one in self.receiving:
                one.laws()

    def _step(self) -> bool:
        try:
            return self.clock.step()
        except Exception as error:  # nothing in this world should fail
            raise Broken(f"a process failed: {type(error).__name__}: {error}") from error

    @property
    def over(self) -> bool:
        """Whether every item is done, and every sender knows it."""
        total = sum(len(sizes) for sizes in self.sizes.values())
        return len(self.done) == total and all(one.drained for one in self.sending)

    def who_waits(self) -> str:
        """Who waits for whom."""
        return "; ".join(one.waits() for one in (*self.sending, *self.receiving))


class SendingProcess:
    """Sends its items, in order; after a restart those that are not done."""

    def __init__(self, world: ChannelWorld, index: int) -> None:
        self.world, self.index = world, index
        self.process = Process(
            f"sender-{index}", world.clock, world.random, pace_s=world.random.choice((1e-3, 1e-2))
        )
        self.sender: Sender | None = None
        self.orders: dict[int, list[int]] = {}
        """By attempt, the items that were taken, in order."""

    def start(self) -> None:
        """A new life, or none yet where the old world has it."""
        self.sender, self._ended = None, False
        self.process.start(self.turn)

    def turn(self) -> bool:
        """Send what is left, one at a time."""
        world, process = self.world, self.process
        if self.sender is None:
            self.left = deque(
                item
                for item in range(len(world.sizes[self.index]))
                if (self.index, item) not in world.done
            )
            self.order = self.orders[process.attempt] = []
            self.sender = Sender(
                edge="edge",
                sender_id=process.name,
                life=Life(attempt=process.attempt),
                schema=SCHEMA,
                receivers=world.ways,
                network=world.network.of(process),
                clock=world.clock,
            )
        self.sender.poll()
        process.point()
        if self.left:
            item = self.left[0]
            batch = pa.RecordBatch.from_arrays(
                [pa.array([item] * world.sizes[self.index][item])], schema=SCHEMA
            )
            self.order.append(item)
            if not self.sender.send(batch):
                self.order.pop()
                return False
            self.left.popleft()
            return True
        if not self._ended:
            self.sender.finish()
            self._ended = True
        return False

    @property
    def drained(self) -> bool:
        """Whether all is acknowledged."""
        return (
            self.process.alive and self.sender is not None and not self.left and self.sender.drained
        )

    def waits(self) -> str:
        """What it waits for."""
        if self.sender is None or not self.process.alive:
            return f"{self.process.name} is not there"
        unacknowledged = self.sender.unacknowledged
        return (
            f"{self.process.name} has {len(self.left)} items to send, {unacknowledged} batches"
            " unacknowledged"
        )


class ReceivingProcess:
    """Takes batches, holds some, does them for good in any order, then acknowledges."""

    def __init__(self, world: ChannelWorld, way: str) -> None:
        self.world, self.way = world, way
        self.process = Process(
            f"receiver-{way}", world.clock, world.random, pace_s=world.random.choice((1e-3, 2e-2))
        )
        self.receiver: Receiver | None = None
        self.held: list[tuple[int, int, Delivery]] = []

    def start(self) -> None:
        """A new life."""
        self.receiver, self.held, self.last = None, [], {}
        self.process.start(self.turn)

    def turn(self) -> bool:
        """Take what is there; do some of what is held."""
        world, random = self.world, self.world.random
        if self.receiver is None:
            self.last: dict[tuple[int, int], int] = {}
            self.seen: set[tuple[int, int, int]] = set()
            self.receiver = Receiver(
                edge="edge",
                schema=SCHEMA,
                address=self.way,
                capacity_rows=world.capacity,
                senders=world.expected,
                max_message_bytes=world.message_bytes,
                network=world.network.of(self.process),
                life=Life(attempt=self.process.attempt),
                on_refused=self.refused,
            )
        moved = False
        for _ in range(random.randint(0, 3)):
            delivery = self.receiver.receive()
            if delivery is None:
                break
            moved = True
            self.take(delivery)
        self.receiver.poll()
        while self.held and random.random() < 0.6:
            sender, item, delivery = self.held.pop(random.randrange(len(self.held)))
            self.process.point()
            world.done.add((sender, item))
            self.process.point()
            delivery.ack()
            moved = True
        return moved

    def take(self, delivery: Delivery) -> None:
        """A batch is here: in order, for the first time, and whole."""
        world = self.world
        sender, item = int(delivery.sender.split("-")[1]), delivery.batch["item"][0].as_py()
        stream = sender, delivery.life
        world.say(
            self.process.name,
            f"takes item {item} of {delivery.sender} as"
            f" {delivery.life.attempt}:{delivery.sequence}",
        )
        check(
            delivery.batch.num_rows == world.sizes[sender][item],
            f"item {item} of sender-{sender} has lost rows",
        )
        check(
            (*stream, item) not in self.seen, f"item {item} of sender-{sender} is delivered twice"
        )
        self.seen.add((*stream, item))
        last = self.last.get(stream, -1)
        check(
            delivery.sequence > last,
            f"batch {delivery.sequence} of sender-{sender} comes after {last}",
        )
        self.last[stream] = delivery.sequence
        if world.in_order:
            order = world.sending[sender].orders[delivery.life.attempt]
            check(
                order[delivery.sequence] == item,
                f"batch {delivery.sequence} of sender-{sender} is another item",
            )
            left_out = [
                one
                for one in order[last + 1 : delivery.sequence]
                if (sender, one) not in world.done
            ]
            check(not left_out, f"items {left_out} of sender-{sender} are left out")
        self.held.append((sender, item, delivery))

    def refused(self, edge: str, peer: str, reason: str) -> None:
        """A message of a sender was none, or came without credit."""
        if reason != DAMAGED:
            raise Broken(f"{self.process.name} refuses a message of a sound sender: {reason}")

    def laws(self) -> None:
        """What holds after every event."""
        if self.receiver is not None and self.process.alive:
            depth = self.receiver.depth[0]
            most = self.world.capacity + self.world.beyond
            check(depth <= most, f"{self.process.name} holds {depth} of {most} rows")

    def waits(self) -> str:
        """What it waits for."""
        return f"{self.process.name} holds {len(self.held)} batches"
