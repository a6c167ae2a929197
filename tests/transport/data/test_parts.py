"""A batch that is larger than a message travels in parts, and is one batch all the same."""

import pyarrow as pa
import pytest
from msgspec import structs

from transport.data.messages import Ack, BatchEncoder, Data, Welcome
from transport.life import Life, Refused

from .rig import SCHEMA, RawConnection, Rig, connect, drain, firsts, make_batch, settle, take, until

MESSAGE_BYTES = 1 << 12


ENCODER = BatchEncoder(SCHEMA)


LARGE = make_batch(7, rows=4, tokens=5_000)


LARGE_BYTES = ENCODER.size_bytes(LARGE)


def parts_of(
    raw: RawConnection, batch: pa.RecordBatch = LARGE, sequence: int = 0
) -> list[tuple[Data, object]]:
    """The messages of a batch in parts of a third of it, by hand."""
    packed = raw.connection.pack(batch, ENCODER, ENCODER.size_bytes(batch))
    size, part = packed.size_bytes, packed.size_bytes // 3 + 1
    whole = Data(
        edge="edge",
        sender="raw",
        life=Life(attempt=1),
        sequence=sequence,
        rows=batch.num_rows,
        bytes=size,
        checksum=packed.checksum,
    )
    return [
        (
            structs.replace(whole, offset=offset, left=max(0, size - offset - part)),
            packed.content,
        )
        for offset in range(0, size, part)
    ]


def introduced(rig: Rig, **knobs: int) -> tuple[RawConnection, object]:
    receiver = rig.receiver(**knobs)
    raw = rig.raw(receiver)
    raw.up()
    raw.hello()
    return raw, receiver


def test_a_batch_above_the_cap_arrives_whole_and_in_order_between_small_ones(rig: Rig) -> None:
    receiver = rig.receiver(max_message_bytes=MESSAGE_BYTES)
    sender = rig.sender(receiver)
    connect(sender, to=receiver)
    sent = [make_batch(0), LARGE, make_batch(1), LARGE, make_batch(2)]
    assert all(sender.send(batch) for batch in sent)
    got = take(receiver, 5, sender)
    assert [delivery.sequence for delivery in got] == [0, 1, 2, 3, 4]
    assert all(delivery.batch.equals(batch) for delivery, batch in zip(got, sent, strict=True))
    sender.finish()
    drain(sender, receiver)
    assert receiver.refused == receiver.duplicates == 0


def test_its_credit_is_that_of_the_whole_until_it_is_acknowledged(rig: Rig) -> None:
    receiver = rig.receiver(max_message_bytes=MESSAGE_BYTES, capacity_bytes=LARGE_BYTES * 3 // 2)
    sender = rig.sender(receiver)
    connect(sender, to=receiver)
    told: list[list[int]] = []
    assert sender.send(LARGE, lambda rows: told.append(list(rows)))
    assert not sender.send(LARGE), "two would be more bytes than the receiver holds"
    (delivery,) = take(receiver, 1, sender, ack=False)
    assert receiver.depth == (4, LARGE_BYTES)
    delivery.ack_rows(1, 2)
    until(lambda: (receiver.poll(), sender.poll(), bool(told))[2])
    assert not sender.send(LARGE)
    delivery.ack()
    until(lambda: (receiver.poll(), sender.poll(), sender.unacknowledged == 0)[2])
    assert told == [[1, 2], [0, 3]] and receiver.depth == (0, 0)
    assert sender.send(LARGE)


def test_unacknowledged_it_comes_again_at_a_restarted_receiver(rig: Rig) -> None:
    first = rig.receiver(max_message_bytes=MESSAGE_BYTES)
    sender = rig.sender(first)
    connect(sender, to=first)
    assert sender.send(LARGE) and sender.send(make_batch(1))
    take(first, 2, sender, ack=False)
    address = first.address
    first.close()
    second = rig.receiver(address, max_message_bytes=2 * MESSAGE_BYTES)
    got = take(second, 2, sender)
    assert got[0].batch.equals(LARGE) and firsts(got) == [7, 1], "in parts of another size"


def test_a_sender_that_dies_between_parts_leaves_nothing_and_its_successor_sends_all(
    rig: Rig,
) -> None:
    raw, receiver = introduced(rig)
    first, second, _ = parts_of(raw)
    assert raw.connection.put(*first) and raw.connection.put(*second)
    settle(receiver.poll)
    successor = rig.sender(receiver, sender_id="raw", life=Life(attempt=2))
    connect(successor, to=receiver)
    assert successor.send(make_batch(3))
    assert firsts(take(receiver, 1, successor)) == [3]
    assert receiver.depth == (0, 0) and receiver.refused == 0


def test_a_receiver_that_restarts_between_parts_asks_for_all_of_them(rig: Rig) -> None:
    raw, first = introduced(rig)
    parts = parts_of(raw)
    assert raw.connection.put(*parts[0]) and raw.connection.put(*parts[1])
    settle(first.poll)
    address = first.address
    first.close()
    receiver = rig.receiver(address)
    again = rig.raw(receiver)
    again.up()
    welcome = again.hello(next=1)
    assert isinstance(welcome, Welcome) and welcome.expected == 0
    assert isinstance(again.ask(*parts_of(again)[2]), Welcome), "the last part alone is not taken"
    for part in parts_of(again):
        assert again.connection.put(*part)
    (delivery,) = take(receiver, 1)
    assert delivery.batch.equals(LARGE)


def test_a_part_that_is_missing_has_the_whole_batch_asked_for_once(rig: Rig) -> None:
    raw, receiver = introduced(rig)
    parts = parts_of(raw)
    assert raw.connection.put(*parts[0])
    welcome = raw.ask(*parts[2])
    assert isinstance(welcome, Welcome) and welcome.expected == 0
    for part in [*parts_of(raw, make_batch(8, rows=2, tokens=5_000), 1), *parts]:
        assert raw.connection.put(*part)
    (delivery,) = take(receiver, 1)
    assert delivery.batch.equals(LARGE) and delivery.sequence == 0
    for part in parts_of(raw, make_batch(8, rows=2, tokens=5_000), 1):
        assert raw.connection.put(*part)
    assert firsts(take(receiver, 1)) == [8]
    assert isinstance(answer := raw.hear(), Ack) and answer.sequences == (0,), (
        "and no other question in between"
    )


def test_a_new_greeting_in_the_midst_begins_the_batch_anew(rig: Rig) -> None:
    raw, receiver = introduced(rig)
    parts = parts_of(raw)
    assert raw.connection.put(*parts[0])
    welcome = raw.hello(next=1, number=1)
    assert isinstance(welcome, Welcome) and welcome.expected == 0
    for part in parts:
        assert raw.connection.put(*part)
    (delivery,) = take(receiver, 1)
    assert delivery.batch.equals(LARGE)


@pytest.mark.parametrize("claim", [1 << 40, 0])
def test_a_claim_that_no_batch_can_meet_is_refused_before_it_takes_memory(
    rig: Rig, claim: int
) -> None:
    raw, receiver = introduced(rig)
    header, content = parts_of(raw)[0]
    before = pa.total_allocated_bytes()
    lie = structs.replace(header, bytes=claim, left=max(0, claim - header.part_bytes))
    for _ in range(3):
        assert raw.connection.put(lie, content)
    heard = [raw.hear() for _ in range(3)]
    assert isinstance(heard[-1], Refused)
    assert pa.total_allocated_bytes() == before and receiver.depth == (0, 0)


def test_parts_of_unlike_batches_are_never_put_together(rig: Rig) -> None:
    raw, receiver = introduced(rig)
    (first, content), (second, _), _ = parts_of(raw)
    assert raw.connection.put(first, content)
    other = structs.replace(second, bytes=second.bytes + 8, left=second.left + 8)
    answer = raw.ask(other, content)
    assert isinstance(answer, Welcome) and answer.expected == 0
    for part in parts_of(raw):
        assert raw.connection.put(*part)
    (delivery,) = take(receiver, 1)
    assert delivery.batch.equals(LARGE)
