"""Connections that break and processes that restart, in any order: the laws hold all the same."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from rigs.examples import examples

from transport.data import Delivery, EndCounts, Receiver, Sender
from transport.data.sockets import ConnectionEvent
from transport.life import Life

from .local_network import LocalConnection, LocalNetwork
from .rig import SCHEMA, firsts, make_batch

CAPACITY_ROWS = 6
PART_BYTES = 400
"""Of these batches two or three parts, so that connections break between them."""


class FragileConnection(LocalConnection):
    """A connection that can break, and then loses some of what was under way in both directions."""

    broke = False

    def cut(self, arrive: int) -> None:
        """Break; of what is under way to the receiver the first `arrive` messages still get
        there.
        """
        if self._listener is None:
            return
        mine = [arrival for arrival in self._listener.arrivals if arrival.connection == self._token]
        for lost in mine[arrive:]:
            self._listener.arrivals.remove(lost)
        while len(self._replies) > arrive:
            self._replies.pop()
        self._listener.connections.pop(self._token, None)
        self._listener, self.broke = None, True

    def get(self) -> Any:
        """As before, with the news that the connection broke."""
        if not self._replies and self.broke:
            self.broke = False
            return ConnectionEvent.LOST
        return super().get()


class FragileNetwork(LocalNetwork):
    """Hands out connections that can break."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[FragileConnection] = []

    def connect(self, address: str) -> FragileConnection:
        """A connection that can break."""
        self.made.append(FragileConnection(self, address))
        return self.made[-1]


class World:
    """One receiver, its senders, and what was delivered of each life of the receiver."""

    def __init__(self, senders: int) -> None:
        self.network = FragileNetwork()
        self.lives = 0
        self.arrived = EndCounts()
        """Over all lives of the receiver."""
        self.start_receiver()
        self.senders = [
            Sender(
                edge="edge",
                sender_id=f"s{index}",
                life=Life(attempt=1),
                schema=SCHEMA,
                receivers=["inbox"],
                network=self.network,
            )
            for index in range(senders)
        ]
        self.sent = [0] * senders
        self.acked: set[tuple[str, int]] = set()

    def start_receiver(self) -> None:
        """A new life."""
        self.lives += 1
        self.receiver = Receiver(
            edge="edge",
            schema=SCHEMA,
            address="inbox",
            capacity_rows=CAPACITY_ROWS,
            max_message_bytes=PART_BYTES,
            network=self.network,
            life=Life(attempt=self.lives),
            counts=self.arrived,
        )
        self.held: list[Delivery] = []
        self.seen: dict[str, list[int]] = {}

    def step(self, action: str, who: int, amount: int) -> None:
        """One event of the world, and the laws after it."""
        sender = self.senders[who % len(self.senders)]
        if action == "send" and sender.send(make_batch(self.sent[who % len(self.senders)])):
            self.sent[who % len(self.senders)] += 1
        elif action == "poll":
            sender.poll()
        elif action == "take":
            self.take()
        elif action == "ack" and self.held:
            self.ack(amount % len(self.held))
        elif action == "cut":
            self.network.made[who % len(self.senders)].cut(amount)
        elif action == "restart":
            self.receiver.close()
            self.start_receiver()
        assert self.receiver.depth[0] <= CAPACITY_ROWS
        assert self.receiver.refused == 0
        assert all(
            least <= count <= most for least, count, most in zip(*self.counted(), strict=True)
        )

    def counted(self) -> list[list[int]]:
        """Batches, rows and bytes: acknowledged, received and sent."""
        ends = [[sender.counts.acknowledged, sender.counts.sent] for sender in self.senders]
        acknowledged, sent = (
            [sum(each) for each in zip(*(end.read() for end in of), strict=True)]
            for of in zip(*ends, strict=True)
        )
        return [acknowledged, list(self.arrived.received.read()), sent]

    def take(self) -> None:
        """Deliver one batch: in order, never one that was delivered or acknowledged."""
        delivery = self.receiver.receive()
        if delivery is None:
            return
        seen = self.seen.setdefault(delivery.sender, [])
        assert firsts([delivery]) == [delivery.sequence]
        assert not seen or delivery.sequence > seen[-1]
        assert not seen or all(
            (delivery.sender, gap) in self.acked for gap in range(seen[-1] + 1, delivery.sequence)
        )
        seen.append(delivery.sequence)
        self.held.append(delivery)

    def ack(self, index: int) -> None:
        """The consumer is done with one of those it holds."""
        delivery = self.held.pop(index)
        delivery.ack()
        self.acked.add((delivery.sender, delivery.sequence))


ACTIONS = st.tuples(
    st.sampled_from(["send"] * 4 + ["poll"] * 4 + ["take"] * 3 + ["ack"] * 2 + ["cut", "restart"]),
    st.integers(0, 2),
    st.integers(0, 4),
)


@given(st.integers(1, 3), st.lists(ACTIONS, max_size=120))
@examples(300)
def test_everything_sent_is_acknowledged_in_the_end_whatever_breaks(
    senders: int, events: list[tuple[str, int, int]]
) -> None:
    world = World(senders)
    for action, who, amount in events:
        world.step(action, who, amount)
    for sender in world.senders:
        sender.finish()
    for _ in range(2000):
        for sender in world.senders:
            sender.poll()
        world.take()
        while world.held:
            world.ack(0)
        if all(sender.drained for sender in world.senders):
            break
    assert all(sender.drained for sender in world.senders)
    assert world.acked == {
        (f"s{i}", number) for i in range(senders) for number in range(world.sent[i])
    }
    assert world.receiver.depth == (0, 0)
    acknowledged, received, sent = world.counted()
    assert acknowledged[0] == sum(world.sent)
    # Where another sender joins, credit is taken back, and the answer to who confirms that may come
    # behind what it has sent meanwhile, which leaves again.
    if senders == 1 and not {"cut", "restart"} & {action for action, _, _ in events}:
        assert acknowledged == received == sent, "nothing was sent twice"
