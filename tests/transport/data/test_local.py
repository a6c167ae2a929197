"""An edge within one process takes, delivers, acknowledges and refuses what one between processes
does.
"""

from collections import deque
from collections.abc import Iterable

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rigs.examples import examples

from transport.data import Delivery, LocalInlet, LocalOutlet, Receiver, Sender
from transport.data.messages import BatchEncoder
from transport.errors import BatchTooLarge, FrameError, SchemaMismatch, TransportError
from transport.life import Life

from .local_network import LocalNetwork
from .rig import SCHEMA, firsts, make_batch

CAPACITY = {"capacity_rows": 8, "capacity_bytes": 900}
"""Some of these batches are too many rows together, others too many bytes."""


class Edge:
    """Both ends, of either kind, and what came of it."""

    def __init__(self, *, local: bool, most_rows: int | None) -> None:
        self.outlet: LocalOutlet | Sender
        self.inlet: LocalInlet | Receiver
        if local:
            self.inlet = LocalInlet(edge="edge", schema=SCHEMA, sender="sender", **CAPACITY)
            self.outlet = LocalOutlet(self.inlet, most_rows=most_rows)
        else:
            network = LocalNetwork()
            self.inlet = Receiver(
                edge="edge",
                schema=SCHEMA,
                address="inbox",
                life=Life(),
                network=network,
                **CAPACITY,
            )
            self.outlet = Sender(
                edge="edge",
                sender_id="sender",
                life=Life(attempt=1),
                schema=SCHEMA,
                receivers=["inbox"],
                network=network,
                most_rows=most_rows,
            )
        self.told: list[int] = []
        """Rows that were acknowledged, by their value."""
        self.held: deque[tuple[Delivery, list[int]]] = deque()
        """Deliveries, and which of their rows the consumer is not done with."""
        self.settle()

    def settle(self) -> None:
        """Both sides hear all that was said."""
        for _ in range(4):
            self.inlet.poll()
            self.outlet.poll()

    def send(self, first: int, rows: int) -> bool:
        def acked(numbers: Iterable[int]) -> None:
            self.told += [first + number for number in numbers]

        return self.outlet.send(make_batch(first, rows=rows), acked)

    def receive(self) -> list[int]:
        delivery = self.inlet.receive()
        if delivery is None:
            return []
        self.held.append((delivery, list(range(delivery.batch.num_rows))))
        return firsts([delivery])

    def ack(self, at: int, row: int | None) -> None:
        """Be done with one row of a delivery, or with all that are left."""
        delivery, left = self.held[at % len(self.held)]
        if row is None:
            delivery.ack()
            left.clear()
        else:
            delivery.ack_rows(left.pop(row % len(left)), 1)
        if not left:
            self.held.remove((delivery, left))

    @property
    def state(self) -> object:
        """All that can be seen from outside."""
        return (
            sorted(self.told),
            self.inlet.depth,
            self.inlet.finished,
            self.outlet.unacknowledged,
            self.outlet.drained,
        )


ACTIONS = st.tuples(
    st.sampled_from(["send"] * 4 + ["receive"] * 3 + ["ack row"] * 3 + ["ack", "finish"]),
    st.integers(0, 5),
    st.integers(0, 5),
)


@given(st.lists(ACTIONS, max_size=60), st.sampled_from([None, 5]))
@examples(200)
def test_credit_and_acknowledgements_follow_the_rules_that_hold_between_processes(
    actions: list[tuple[str, int, int]], most_rows: int | None
) -> None:
    edges = [Edge(local=True, most_rows=most_rows), Edge(local=False, most_rows=most_rows)]
    ended = False
    for step, (action, one, other) in enumerate(actions):
        came: list[object] = []
        for edge in edges:
            if action == "send" and not ended:
                came.append(edge.send(100 * step, 1 + one))
            elif action == "receive":
                came.append(edge.receive())
            elif action.startswith("ack") and edge.held:
                edge.ack(one, other if action == "ack row" else None)
            elif action == "finish":
                edge.outlet.finish()
            edge.settle()
        ended = ended or action == "finish"
        assert not came or came[0] == came[1]
        assert edges[0].state == edges[1].state


def made(**capacity: int) -> tuple[LocalInlet, LocalOutlet]:
    inlet = LocalInlet(edge="edge", schema=SCHEMA, sender="sender", **(CAPACITY | capacity))
    return inlet, LocalOutlet(inlet)


def test_a_batch_is_handed_on_as_it_is_and_heard_of_once_with_the_next_poll() -> None:
    inlet, outlet = made()
    batch, told = make_batch(0, rows=3), list[list[int]]()
    assert outlet.send(batch, lambda rows: told.append(list(rows)))
    delivery = inlet.receive()
    assert delivery is not None and delivery.batch is batch and delivery.sender == "sender"
    delivery.ack_rows(1, 1)
    delivery.ack()
    delivery.ack()
    assert told == [] and not outlet.drained
    outlet.poll()
    assert told == [[1], [0, 2]] and outlet.drained


def test_what_cannot_be_taken_is_refused_by_name() -> None:
    _, outlet = made(capacity_bytes=5000)
    with pytest.raises(BatchTooLarge, match=r"'edge'.*9 rows.*raise capacity_rows"):
        outlet.send(make_batch(0, rows=9))
    with pytest.raises(
        BatchTooLarge,
        match=rf"{BatchEncoder(SCHEMA).size_bytes(make_batch(0, tokens=9000))} bytes.*5000",
    ):
        outlet.send(make_batch(0, tokens=9000))
    with pytest.raises(SchemaMismatch, match=r"missing \['tokens'\], not expected \['other'\]"):
        outlet.send(make_batch(0).rename_columns(["value", "other"]))
    offsets = pa.array([0, 5, 3], pa.int32())
    unsound = pa.RecordBatch.from_arrays(
        [pa.array([1, 2]), pa.ListArray.from_arrays(offsets, pa.array([1, 2, 3], pa.int32()))],
        schema=SCHEMA,
    )
    with pytest.raises(FrameError, match="a batch of 'sender' is not valid"):
        outlet.send(unsound)
    assert outlet.drained
    outlet.finish()
    with pytest.raises(TransportError, match="ended"):
        outlet.send(make_batch(0))


def test_batches_that_are_handed_on_within_a_process_count_as_they_would_on_a_wire() -> None:
    inlet = LocalInlet(
        edge="edge", schema=SCHEMA, sender="sender", capacity_rows=100, capacity_bytes=1 << 20
    )
    outlet = LocalOutlet(inlet)
    batches = [make_batch(0, rows=3), make_batch(3, rows=0), make_batch(3, rows=5, tokens=9)]
    for batch in batches:
        assert outlet.send(batch)
    wanted = (3, 8, sum(map(BatchEncoder(SCHEMA).size_bytes, batches)))
    assert inlet.counts.sent.read() == inlet.counts.received.read() == wanted
    assert inlet.counts.acknowledged.read() == (0, 0, 0)
    while (delivery := inlet.receive()) is not None:
        if delivery.batch.num_rows > 1:
            delivery.ack_rows(0, 1)
        delivery.ack()
    assert inlet.counts.acknowledged.read() == wanted
