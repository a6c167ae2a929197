"""The promises of a data edge, kept by every kind of channel."""

import itertools

import pyarrow as pa
import pytest

from transport.data import EndCounts
from transport.data.messages import Ack, BatchEncoder, Data, Welcome
from transport.errors import (
    BatchTooLarge,
    PeerGone,
    SchemaMismatch,
    SenderRefused,
    TransportError,
    WaitTimeout,
)
from transport.life import Life, Refused

from .rig import SCHEMA, RawConnection, Rig, connect, drain, firsts, make_batch, settle, take, until

ENCODER = BatchEncoder(SCHEMA)


def test_batches_arrive_in_order_and_unchanged(rig: Rig) -> None:
    receiver = rig.receiver()
    sender = rig.sender(receiver)
    connect(sender, to=receiver)
    sent = [make_batch(number, rows=3) for number in range(50)]
    assert all(sender.send(batch) for batch in sent)
    got = take(receiver, 50, sender)
    assert [delivery.sequence for delivery in got] == list(range(50))
    assert all(delivery.batch.equals(batch) for delivery, batch in zip(got, sent, strict=True))
    assert {(delivery.sender, delivery.life) for delivery in got} == {("sender", Life(attempt=1))}


def test_a_sender_without_a_receiver_has_no_room_and_takes_nothing(rig: Rig) -> None:
    receiver = rig.receiver()
    sender = rig.sender(receiver)
    assert sender.room() == 0
    assert not sender.send(make_batch(0))
    assert sender.unacknowledged == 0


def test_a_slow_reader_bounds_the_senders_memory_and_loses_nothing(rig: Rig) -> None:
    receiver = rig.receiver(capacity_rows=16)
    sender = rig.sender(receiver)
    connect(sender, to=receiver)
    accepted = [number for number in range(10) if sender.send(make_batch(number, rows=8))]
    assert accepted == [0, 1]
    settle(sender.poll)
    assert (sender.unacknowledged, sender.room()) == (2, 0)
    assert firsts(take(receiver, 2, sender)) == [0, 1]
    connect(sender, to=receiver)
    assert sender.send(make_batch(2, rows=8))
    assert firsts(take(receiver, 1, sender)) == [2]


def test_credit_is_counted_in_bytes_too(rig: Rig) -> None:
    batch = make_batch(0, rows=1, tokens=1000)
    receiver = rig.receiver(capacity_rows=1000, capacity_bytes=2 * ENCODER.size_bytes(batch))
    sender = rig.sender(receiver)
    connect(sender, to=receiver)
    assert [sender.send(batch) for _ in range(3)] == [True, True, False]


def test_credit_returns_only_by_ack(rig: Rig) -> None:
    receiver = rig.receiver(capacity_rows=8)
    sender = rig.sender(receiver)
    connect(sender, to=receiver)
    assert sender.send(make_batch(0, rows=8))
    (held,) = take(receiver, 1, sender, ack=False)
    settle(lambda: (receiver.poll(), sender.poll()))
    assert sender.room() == 0
    assert receiver.depth == (8, ENCODER.size_bytes(held.batch))
    held.ack()
    held.ack()
    assert receiver.depth == (0, 0)
    connect(sender, to=receiver)
    assert (sender.room(), sender.unacknowledged) == (8, 0)


def test_a_batch_larger_than_the_receiver_is_refused_by_name(rig: Rig) -> None:
    receiver = rig.receiver(capacity_rows=4, capacity_bytes=50_000)
    sender = rig.sender(receiver)
    connect(sender, to=receiver)
    with pytest.raises(BatchTooLarge, match=r"'edge'.*5 rows.*raise capacity_rows"):
        sender.send(make_batch(0, rows=5))
    with pytest.raises(BatchTooLarge, match=r"80\d{3} bytes.*50000.*capacity_bytes"):
        sender.send(make_batch(0, rows=1, tokens=20_000))
    assert sender.unacknowledged == 0


def test_an_empty_batch_travels_and_takes_credit(rig: Rig) -> None:
    receiver = rig.receiver(capacity_rows=2)
    sender = rig.sender(receiver)
    connect(sender, to=receiver)
    empty = make_batch(0, rows=2).slice(0, 0)
    assert [sender.send(empty) for _ in range(3)] == [True, True, False]
    assert [delivery.batch.num_rows for delivery in take(receiver, 2, sender)] == [0, 0]


def test_the_end_comes_after_the_last_batch(rig: Rig) -> None:
    receiver = rig.receiver()
    sender = rig.sender(receiver)
    connect(sender, to=receiver)
    assert sender.send(make_batch(0)) and sender.send(make_batch(1))
    sender.finish()
    with pytest.raises(TransportError, match="ended"):
        sender.send(make_batch(2))
    first, second = take(receiver, 2, sender, ack=False)
    until(lambda: receiver.receive(0.01) is None and receiver.finished)
    settle(sender.poll)
    assert not sender.drained
    first.ack(), second.ack()
    drain(sender, receiver)
    sender.close(linger_s=1.0)


def test_a_sender_that_ends_before_it_is_connected_still_ends(rig: Rig) -> None:
    receiver = rig.receiver()
    sender = rig.sender(receiver)
    sender.finish()
    drain(sender, receiver)
    assert receiver.finished


def test_the_end_waits_for_every_expected_sender(rig: Rig) -> None:
    receiver = rig.receiver(senders=2)
    one, two = (rig.sender(receiver, sender_id=name) for name in ("one", "two"))
    one.finish()
    drain(one, receiver)
    assert not receiver.finished
    two.finish()
    drain(two, receiver)
    assert receiver.finished


def test_unacknowledged_batches_come_again_at_a_restarted_receiver(rig: Rig) -> None:
    first = rig.receiver()
    sender = rig.sender(first)
    connect(sender, to=first)
    for number in range(4):
        assert sender.send(make_batch(number))
    held = take(first, 4, sender, ack=False)
    held[1].ack()
    until(lambda: (first.poll(), sender.poll(), sender.unacknowledged == 3)[2])
    first.close()
    held[2].ack()
    second = rig.receiver(first.address)
    assert firsts(take(second, 3, sender)) == [0, 2, 3]
    connect(sender, to=second)
    assert sender.send(make_batch(4))
    assert firsts(take(second, 1, sender)) == [4]
    sender.finish()
    drain(sender, second)
    assert second.finished and second.duplicates == 0


def test_a_smaller_receiver_after_a_restart_is_not_overrun(rig: Rig) -> None:
    first = rig.receiver(capacity_rows=8)
    sender = rig.sender(first)
    connect(sender, to=first)
    for number in range(8):
        assert sender.send(make_batch(number))
    take(first, 8, sender, ack=False)
    first.close()
    second = rig.receiver(first.address, capacity_rows=2)
    held = take(second, 2, sender, ack=False)
    settle(lambda: (sender.poll(), second.poll()))
    assert second.depth[0] == 2
    for delivery in held:
        delivery.ack()
    assert firsts(take(second, 6, sender)) == [2, 3, 4, 5, 6, 7]
    assert second.refused == 0


def test_a_duplicate_is_acknowledged_and_not_delivered_again(rig: Rig) -> None:
    receiver = rig.receiver()
    raw = rig.raw(receiver)
    raw.up()
    assert isinstance(raw.hello(), Welcome)
    header, payload = _data(raw, 0)
    assert raw.connection.put(header, payload)
    (delivery,) = take(receiver, 1, ack=False)
    assert raw.connection.put(header, payload)
    until(lambda: (receiver.poll(), receiver.duplicates == 1)[1])
    delivery.ack()
    assert raw.hear().sequences == (0,)
    answer = raw.ask(header, payload)
    assert isinstance(answer, Ack) and answer.sequences == (0,)
    assert receiver.receive() is None
    assert (receiver.duplicates, receiver.depth) == (2, (0, 0))


def test_a_missing_batch_is_asked_for_again(rig: Rig) -> None:
    receiver = rig.receiver()
    raw = rig.raw(receiver)
    raw.up()
    raw.hello()
    answer = raw.ask(*_data(raw, 1))
    assert isinstance(answer, Welcome) and answer.expected == 0
    assert receiver.receive() is None
    for number in (0, 1):
        assert raw.connection.put(*_data(raw, number))
    assert [delivery.sequence for delivery in take(receiver, 2)] == [0, 1]


def test_sending_without_credit_is_refused_and_not_taken(rig: Rig) -> None:
    receiver = rig.receiver(capacity_rows=1)
    raw = rig.raw(receiver)
    raw.up()
    raw.hello()
    assert raw.connection.put(*_data(raw, 0))
    answer = raw.ask(*_data(raw, 1))
    assert isinstance(answer, Refused) and "without credit" in answer.error
    assert (receiver.depth[0], receiver.refused) == (1, 1)


def test_a_stranger_that_never_said_hello_changes_nothing(rig: Rig) -> None:
    receiver = rig.receiver()
    sender = rig.sender(receiver)
    connect(sender, to=receiver)
    raw = rig.raw(receiver)
    raw.up()
    header, payload = _data(raw, 0, sender="sender")
    assert raw.connection.put(header, payload)
    assert sender.send(make_batch(7))
    assert firsts(take(receiver, 1, sender)) == [7]


def test_a_batch_that_stays_unsound_ends_its_sender_and_is_never_delivered(rig: Rig) -> None:
    receiver = rig.receiver()
    sender = rig.sender(receiver)
    connect(sender, to=receiver)
    offsets = pa.array([0, 5, 3], pa.int32())
    unsound = pa.RecordBatch.from_arrays(
        [pa.array([1, 2]), pa.ListArray.from_arrays(offsets, pa.array([1, 2, 3], pa.int32()))],
        schema=SCHEMA,
    )
    assert sender.send(unsound)
    with pytest.raises(SenderRefused, match=r"not valid|no Arrow stream"):
        until(lambda: bool(receiver.poll() or sender.poll()))
    assert receiver.receive() is None
    assert receiver.refused == 3


def test_a_restarted_sender_is_heard_and_its_former_self_is_refused(rig: Rig) -> None:
    receiver = rig.receiver(capacity_rows=4)
    old = rig.sender(receiver, life=Life(attempt=1))
    connect(old, to=receiver)
    assert old.send(make_batch(1, rows=3))
    (held,) = take(receiver, 1, old, ack=False)
    new = rig.sender(receiver, life=Life(attempt=2))
    connect(new, to=receiver)
    assert new.room() == 1
    assert new.send(make_batch(20))
    assert firsts(take(receiver, 1, new)) == [20]
    held.ack()
    until(lambda: (receiver.poll(), new.poll(), new.room() == 4)[2])
    zombie = rig.sender(receiver, life=Life(attempt=1))
    with pytest.raises(SenderRefused, match="was replaced"):
        until(lambda: bool(receiver.poll() or zombie.poll()))


def test_a_sender_that_restarts_as_its_old_life_is_refused_before_anything_is_lost(
    rig: Rig,
) -> None:
    receiver = rig.receiver()
    first = rig.sender(receiver)
    connect(first, to=receiver)
    assert first.send(make_batch(1))
    take(receiver, 1, first)
    again = rig.sender(receiver)
    with pytest.raises(SenderRefused, match="larger life"):
        until(lambda: bool(receiver.poll() or again.poll()))
    assert again.room() == 0


@pytest.mark.parametrize(
    "knobs", [{"schema": pa.schema([("value", pa.int32())])}, {"edge": "another"}]
)
def test_a_sender_of_another_edge_or_schema_is_refused_by_name(
    rig: Rig, knobs: dict[str, object]
) -> None:
    told: list[str] = []
    receiver = rig.receiver(on_refused=lambda edge, peer, reason: told.append(reason))
    sender = rig.sender(receiver, **knobs)
    with pytest.raises(SenderRefused, match="edge"):
        until(lambda: bool(receiver.poll() or sender.poll()))
    assert receiver.refused == len(told) == 1
    assert not receiver.finished


def test_a_batch_of_another_schema_is_not_taken(rig: Rig) -> None:
    receiver = rig.receiver()
    sender = rig.sender(receiver)
    connect(sender, to=receiver)
    with pytest.raises(SchemaMismatch, match=r"missing \['tokens'\], not expected \['other'\]"):
        sender.send(make_batch(0).rename_columns(["value", "other"]))


def test_a_receiver_that_stays_away_is_gone_at_the_deadline_and_named(rig: Rig) -> None:
    now = [0.0]
    receiver = rig.receiver()
    sender = rig.sender(receiver, clock=lambda: now[0], peer_timeout_s=5.0)
    connect(sender, to=receiver)
    now[0] = 100.0
    assert sender.send(make_batch(0))
    sender.poll()
    receiver.close()
    until(lambda: (sender.poll(), sender.room() == 0)[1])
    now[0] = 104.0
    sender.poll()
    now[0] = 106.0
    with pytest.raises(
        PeerGone, match=r"'sender' waited for the receiver of edge 'edge'.*1 batches"
    ):
        sender.poll()


def test_closing_names_who_did_not_acknowledge(rig: Rig) -> None:
    ticks = itertools.count()
    receiver = rig.receiver()
    sender = rig.sender(receiver, clock=lambda: float(next(ticks)), peer_timeout_s=1e9)
    connect(sender, to=receiver)
    assert sender.send(make_batch(0))
    with pytest.raises(WaitTimeout, match=r"'sender' closed edge 'edge'.*1 batches"):
        sender.close(linger_s=3.0)


def test_acknowledgements_are_gathered_only_while_more_has_arrived(rig: Rig) -> None:
    receiver = rig.receiver(capacity_rows=100)
    raw = rig.raw(receiver)
    raw.up()
    raw.hello()
    assert all(raw.connection.put(*_data(raw, number)) for number in range(3))
    until(lambda: (receiver.poll(), receiver.depth[0] == 3)[1])
    for _ in range(3):
        delivery = receiver.receive()
        assert delivery is not None
        delivery.ack()
    assert raw.hear().sequences == (0, 1, 2)


def _data(raw: RawConnection, sequence: int, sender: str = "raw") -> tuple[Data, object]:
    batch = make_batch(sequence)
    packed = raw.connection.pack(batch, ENCODER, ENCODER.size_bytes(batch))
    header = Data(
        edge="edge",
        sender=sender,
        life=Life(attempt=1),
        sequence=sequence,
        rows=1,
        bytes=packed.size_bytes,
        checksum=packed.checksum,
    )
    return header, packed.content


def test_batches_that_wait_to_be_delivered_leave_in_order(rig: Rig) -> None:
    receiver = rig.receiver()
    sender = rig.sender(receiver)
    connect(sender, to=receiver)
    assert all(sender.send(make_batch(number)) for number in range(5))

    def all_came() -> bool:
        sender.poll()
        receiver.poll()
        return receiver.depth[0] == 5

    until(all_came)
    assert firsts(take(receiver, 5, sender)) == [0, 1, 2, 3, 4]


def test_both_ends_count_the_same_batches_rows_and_bytes_also_of_what_comes_in_parts(
    rig: Rig,
) -> None:
    receiver = rig.receiver(max_message_bytes=500)
    sender = rig.sender(receiver)
    batches = [
        make_batch(first, rows=1 + first % 3, tokens=40 * (first % 5)) for first in range(20)
    ]
    assert max(map(ENCODER.size_bytes, batches)) > 2 * 500
    left = list(batches)

    def step() -> bool:
        if left and sender.send(left[0]):
            left.pop(0)
        sender.poll()
        if (delivery := receiver.receive()) is not None:
            delivery.ack()
        return not left and sender.drained

    until(step)
    wanted = (
        len(batches),
        sum(batch.num_rows for batch in batches),
        sum(map(ENCODER.size_bytes, batches)),
    )
    counts = sender.counts.sent, receiver.counts.received, sender.counts.acknowledged
    assert [each.read() for each in counts] == [wanted] * 3


def test_what_a_receiver_that_starts_again_is_sent_again_is_counted_again(rig: Rig) -> None:
    address = rig.new_address()
    arrived = EndCounts()
    receiver = rig.receiver(address, life=Life(attempt=1), counts=arrived)
    sender = rig.sender(receiver)
    until(lambda: sender.poll() or receiver.poll() or sender.room() > 0)
    for first in range(4):
        assert sender.send(make_batch(first))
    until(lambda: sender.poll() or receiver.poll() or arrived.received.read()[0] == 4)
    first, second = receiver.receive(), receiver.receive()
    assert first is not None and second is not None
    first.ack()
    receiver.flush()
    until(lambda: sender.poll() or receiver.poll() or sender.counts.acknowledged.read()[0] == 1)
    receiver.close()
    again = rig.receiver(receiver.address, life=Life(attempt=2), counts=arrived)

    def step() -> bool:
        sender.poll()
        if (delivery := again.receive()) is not None:
            delivery.ack()
        return sender.drained

    until(step)
    size = ENCODER.size_bytes(make_batch(0))
    assert sender.counts.acknowledged.read() == (4, 4, 4 * size)
    assert arrived.received.read() == sender.counts.sent.read() == (7, 7, 7 * size), (
        "three of them twice"
    )
