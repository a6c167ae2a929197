"""Receivers and senders that join, leave, die, restart and are cut off, in any order: no batch is
ever lost.
"""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st
from rigs.examples import examples

from transport.data import Delivery, Receiver, Sender
from transport.life import Life

from .rig import SCHEMA, firsts, make_batch
from .test_failures_in_any_order import FragileNetwork

CAPACITY_ROWS = 6
ADDRESSES = ("a", "b", "c", "d")
MOST_SENDERS = 4
PER_SENDER = 10_000


@dataclass
class Place:
    """What is at one address: a receiver, what its consumer holds, and what it saw."""

    receiver: Receiver
    held: list[Delivery] = field(default_factory=list)
    seen: dict[str, list[int]] = field(default_factory=dict)
    last: dict[str, int] = field(default_factory=dict)
    doubted: set[str] = field(default_factory=set)
    """Senders that gave this receiver up while it may have had batches of theirs."""


class World:
    """Some senders, some receivers, and what became of every batch."""

    def __init__(self, senders: int) -> None:
        self.network = FragileNetwork()
        self.lives = 0
        self.places: dict[str, Place] = {}
        self.start(ADDRESSES[0])
        self.senders: list[Sender] = []
        self.sent: list[int] = []
        self.finished: set[int] = set()
        self.retired: dict[int, set[str]] = {}
        self.acked: set[int] = set()
        self.taken_for_sure: set[int] = set()
        for _ in range(senders):
            self.add_sender()

    def start(self, address: str) -> None:
        """A new receiver at an address where none is."""
        self.lives += 1
        receiver = Receiver(
            edge="edge",
            schema=SCHEMA,
            address=address,
            capacity_rows=CAPACITY_ROWS,
            network=self.network,
            life=Life(attempt=self.lives),
        )
        self.places[address] = Place(receiver)

    def stop(self, address: str) -> None:
        """The receiver there dies, with what its consumer held."""
        place = self.places.pop(address)
        self.taken_for_sure -= {value for values in place.seen.values() for value in values}
        place.receiver.close()

    def add_sender(self) -> None:
        """One more, towards one receiver that is there."""
        if len(self.senders) < MOST_SENDERS:
            self.senders.append(
                Sender(
                    edge="edge",
                    sender_id=f"s{len(self.senders)}",
                    life=Life(attempt=1),
                    schema=SCHEMA,
                    receivers=[min(self.places)],
                    network=self.network,
                    clock=lambda: 0.0,
                )
            )
            self.retired[len(self.sent)] = set()
            self.sent.append(0)

    def step(self, action: str, who: int, where: int, amount: int) -> None:
        """One event of the world, and the laws after it."""
        who %= len(self.senders)
        sender, address = self.senders[who], ADDRESSES[where]
        place = self.places.get(address)
        if action == "send" and who not in self.finished:
            if sender.send(make_batch(who * PER_SENDER + self.sent[who])):
                self.sent[who] += 1
        elif action == "poll":
            sender.poll()
        elif action == "finish":
            self.finished.add(who)
            sender.finish()
        elif action == "new sender":
            self.add_sender()
        elif action == "cut":
            self.network.made[amount % len(self.network.made)].cut(where)
        elif action == "join" and address not in sender.receivers:
            if place is None:
                self.start(address)
            sender.add_receiver(address)
        elif action == "retire" and len(self.staying(who)) > 1 and address in self.staying(who):
            sender.retire_receiver(address)
            self.retired[who].add(address)
        elif place is not None:
            self.at(action, place, address, who, amount)
        self.check()

    def at(self, action: str, place: Place, address: str, who: int, amount: int) -> None:
        """What may happen at one receiver."""
        if action == "take":
            self.take(place)
        elif action == "ack" and place.held:
            self.ack(place, amount % len(place.held))
        elif action == "expect":
            place.receiver.expect(1 + amount % CAPACITY_ROWS)
        elif action == "restart":
            self.stop(address)
            self.start(address)
        elif action == "die" and all(
            set(self.staying(one)) != {address} for one in range(len(self.senders))
        ):
            self.stop(address)
            for one in range(len(self.senders)):
                self.forget(one, address)
        elif (
            action == "doubt"
            and set(self.staying(who)) != {address}
            and address in self.senders[who].receivers
        ):
            place.doubted.add(self.senders[who].sender_id)
            self.taken_for_sure -= set(place.seen.get(self.senders[who].sender_id, ()))
            self.forget(who, address)

    def staying(self, who: int) -> list[str]:
        """The receivers of a sender that do not retire."""
        return [
            address for address in self.senders[who].receivers if address not in self.retired[who]
        ]

    def forget(self, who: int, address: str) -> None:
        """A sender hears that a receiver is dead."""
        if address in self.senders[who].receivers:
            self.senders[who].forget_receiver(address)

    def take(self, place: Place) -> None:
        """Deliver one batch: in order, and none twice unless a receiver of it was given up or
        died.
        """
        delivery = place.receiver.receive()
        if delivery is None:
            return
        (value,) = firsts([delivery])
        assert delivery.sender == f"s{value // PER_SENDER}"
        assert delivery.sequence > place.last.get(delivery.sender, -1)
        place.last[delivery.sender] = delivery.sequence
        seen = place.seen.setdefault(delivery.sender, [])
        if delivery.sender not in place.doubted:
            assert value not in seen
            assert value not in self.taken_for_sure
            self.taken_for_sure.add(value)
        seen.append(value)
        place.held.append(delivery)

    def ack(self, place: Place, index: int) -> None:
        """The consumer is done with one of those it holds."""
        delivery = place.held.pop(index)
        delivery.ack()
        self.acked.update(firsts([delivery]))

    def check(self) -> None:
        """The laws that hold at any time."""
        for who, sender in enumerate(self.senders):
            self.retired[who] &= set(sender.receivers)
            todo = {who * PER_SENDER + number for number in range(self.sent[who])} - self.acked
            assert sender.unacknowledged >= len(todo)
        for place in self.places.values():
            assert place.receiver.depth[0] <= CAPACITY_ROWS
            assert place.receiver.refused == 0

    def calm_down(self, rounds: int) -> None:
        """Nothing happens any more but that everybody does its work."""
        for _ in range(rounds):
            for sender in self.senders:
                sender.poll()
            for place in self.places.values():
                self.take(place)
                while place.held:
                    self.ack(place, 0)
            self.check()


ACTIONS = st.tuples(
    st.sampled_from(
        ["send"] * 6
        + ["poll"] * 6
        + ["take"] * 4
        + ["ack"] * 3
        + ["join"] * 3
        + ["retire"] * 2
        + ["die", "doubt", "restart", "cut", "cut", "expect", "new sender", "finish"]
    ),
    st.integers(0, MOST_SENDERS - 1),
    st.integers(0, len(ADDRESSES) - 1),
    st.integers(0, 20),
)


@given(st.integers(1, 2), st.lists(ACTIONS, max_size=200))
@examples(300)
def test_no_batch_is_lost_whoever_joins_leaves_or_dies(
    senders: int, events: list[tuple[str, int, int, int]]
) -> None:
    world = World(senders)
    for event in events:
        world.step(*event)

    for place in world.places.values():
        place.receiver.expect(1)
        for sender in world.senders:
            if sender.sender_id in place.doubted and place.receiver.address not in sender.receivers:
                place.receiver.forget(sender.sender_id)
    world.calm_down(200)
    for who, sender in enumerate(world.senders):
        assert sender.unacknowledged == 0
        assert sender.receivers == world.staying(who)
        assert who in world.finished or sender.room() >= CAPACITY_ROWS // len(world.senders)

    for sender in world.senders:
        sender.finish()
    world.calm_down(50)
    assert all(sender.drained for sender in world.senders)
    assert world.acked == {
        who * PER_SENDER + number for who, sent in enumerate(world.sent) for number in range(sent)
    }
    for address, place in world.places.items():
        assert place.receiver.depth == (0, 0)
        if any(address in sender.receivers for sender in world.senders):
            assert place.receiver.finished
