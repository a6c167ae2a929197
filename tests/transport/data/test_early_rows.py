"""Rows that are done with before the rest of their batch: the sender hears of them, the batch keeps
its credit.
"""

from msgspec import structs

from transport.data import Delivery, Receiver, Sender
from transport.data.credit import Credit
from transport.data.inbox import MOST_EARLY, Inbox
from transport.data.messages import Ack, Data, Hello, Welcome
from transport.data.outbox import Outbox, OutgoingBatch
from transport.life import Life

from .rig import Rig, connect, make_batch, settle, take, until

Told = list[list[int]]


def sent(sender: Sender, rows: int = 4) -> Told:
    told: Told = []
    assert sender.send(make_batch(0, rows=rows), lambda rows: told.append(list(rows)))
    return told


def both(receiver: Receiver, sender: Sender) -> None:
    receiver.poll()
    sender.poll()


def one(receiver: Receiver, sender: Sender) -> Delivery:
    (delivery,) = take(receiver, 1, sender, ack=False)
    return delivery


def test_a_sender_hears_of_rows_once_and_then_of_the_rest(rig: Rig) -> None:
    receiver = rig.receiver(capacity_rows=4)
    sender = rig.sender(receiver)
    connect(sender, to=receiver)
    told = sent(sender)
    delivery = one(receiver, sender)
    delivery.ack_rows(1, 2)
    until(lambda: (both(receiver, sender), told == [[1, 2]])[1])
    assert receiver.depth[0] == 2 and sender.unacknowledged == 1
    assert not sender.send(make_batch(4)), "the batch keeps its credit"
    delivery.ack()
    delivery.ack_rows(3, 1)
    until(lambda: (both(receiver, sender), sender.unacknowledged == 0)[1])
    settle(lambda: both(receiver, sender))
    assert told == [[1, 2], [0, 3]] and receiver.depth == (0, 0)


def test_rows_that_are_done_with_make_room_for_others_among_most_rows(rig: Rig) -> None:
    receiver = rig.receiver()
    sender = rig.sender(receiver, most_rows=4)
    connect(sender, to=receiver)
    told = sent(sender)
    delivery = one(receiver, sender)
    assert not sender.send(make_batch(4))
    delivery.ack_rows(0, 3)
    until(lambda: (both(receiver, sender), bool(told))[1])
    assert (
        sender.room() == 3 and sender.send(make_batch(4, rows=3)) and not sender.send(make_batch(7))
    )


def test_a_sender_whose_connection_broke_hears_of_them_all_the_same(rig: Rig) -> None:
    first = rig.receiver()
    sender = rig.sender(first)
    connect(sender, to=first)
    told = sent(sender)
    one(first, sender).ack_rows(2, 1)
    address = first.address
    first.close()
    second = rig.receiver(address)
    delivery = one(second, sender)
    assert delivery.batch.num_rows == 4, "another life gets all of it"
    delivery.ack_rows(2, 1)
    delivery.ack_rows(0, 1)
    until(lambda: (both(second, sender), [0] in told)[1])
    assert sorted(told) == [[0], [2]], "each once, whoever says it"


def test_what_goes_to_another_receiver_goes_whole_and_is_told_once(rig: Rig) -> None:
    first, second = rig.receiver(), rig.receiver()
    sender = rig.sender(first)
    connect(sender, to=first)
    told = sent(sender)
    one(first, sender).ack_rows(0, 2)
    until(lambda: (both(first, sender), told == [[0, 1]])[1])
    sender.add_receiver(second.address)
    sender.forget_receiver(first.address)
    delivery = one(second, sender)
    assert delivery.batch.num_rows == 4
    for first_row in (0, 3):
        delivery.ack_rows(first_row, 1)
    until(lambda: (both(second, sender), len(told) == 2)[1])
    delivery.ack()
    until(lambda: (both(second, sender), sender.unacknowledged == 0)[1])
    assert told == [[0, 1], [3], [2]]


HELLO = Hello(
    edge="edge",
    sender="sender",
    life=Life(attempt=1),
    schema=b"",
    base=0,
    next=0,
    gone=(),
    window_rows=0,
    window_bytes=0,
    window_number=0,
    ended=False,
    number=1,
)


def data(sequence: int, rows: int) -> Data:
    return Data(
        edge="edge",
        sender="sender",
        life=Life(attempt=1),
        sequence=sequence,
        rows=rows,
        bytes=1,
        checksum=0,
    )


def inbox_with(*rows: int) -> Inbox:
    """One that holds batches of so many rows."""
    inbox = Inbox(
        edge="edge",
        life=Life(attempt=7),
        capacity=Credit(rows=1 << 20, bytes=1 << 20),
        max_message_bytes=1 << 10,
    )
    inbox.hello("connection", HELLO)
    for sequence, count in enumerate(rows):
        inbox.take(data(sequence, count))
    return inbox


def test_a_welcome_repeats_them_of_what_is_held_and_of_nothing_else() -> None:
    inbox = inbox_with(4, 4)
    inbox.acknowledge_rows("sender", Life(attempt=1), 0, 1, 1)
    inbox.acknowledge_rows("sender", Life(attempt=1), 1, 2, 1)
    inbox.acknowledge_rows("sender", Life(attempt=1), 2, 0, 1)
    inbox.acknowledge_rows("sender", Life(attempt=2), 1, 0, 1)
    ((_, said),) = inbox.flush()
    assert isinstance(said, Ack) and said.early == (0, 1, 1, 1, 2, 1) and inbox.flush() == []
    inbox.acknowledge("sender", Life(attempt=1), 0)
    for _ in range(2):
        welcome = inbox.hello("connection", structs.replace(HELLO, next=2))[-1][1]
        assert isinstance(welcome, Welcome) and (welcome.held, welcome.early) == ((1,), (1, 2, 1))
    assert inbox.early_rows == 1 and inbox.flush() == []


def test_one_message_tells_of_so_many_and_the_next_of_the_rest() -> None:
    rows = MOST_EARLY + 10
    inbox = inbox_with(rows + 1)
    for row in range(rows):
        inbox.acknowledge_rows("sender", Life(attempt=1), 0, row, 1)
    for say in (inbox.flush, lambda: inbox.hello("connection", structs.replace(HELLO, next=1))):
        told = [say()[-1][1].early, *(message.early for _, message in inbox.flush())]  # type: ignore[union-attr]
        assert [len(each) for each in told] == [3 * MOST_EARLY, 3 * 10]
        assert [*told[0][1::3], *told[1][1::3]] == list(range(rows))


def test_a_batch_that_its_sender_took_back_says_nothing_more() -> None:
    inbox = inbox_with(4)
    inbox.acknowledge_rows("sender", Life(attempt=1), 0, 1, 1)
    inbox.hello("connection", structs.replace(HELLO, base=1, next=1))
    assert inbox.early_rows == 0 and inbox.flush() == []


def test_rows_that_a_batch_does_not_have_are_nobodys() -> None:
    told: Told = []
    outbox = Outbox(edge="edge", sender="sender", life=Life(attempt=1), schema=b"")
    window = {"window_rows": 99, "window_bytes": 99, "window_number": 8}
    limits = {"capacity_rows": 99, "capacity_bytes": 99, "max_message_bytes": 99}
    outbox.welcome(
        Welcome(
            edge="edge", life=Life(attempt=7), expected=0, held=(), ended=False, **limits, **window
        )
    )
    outbox.add(
        OutgoingBatch(
            rows=4,
            cost=Credit(rows=4, bytes=4),
            payload=None,
            acked=lambda rows: told.append(list(rows)),
        )
    )
    assert [outgoing.sequence for outgoing in outbox.due()] == [0]
    for early in ((0, 2, 3), (0, 4, 1), (9, 0, 1), (0, 0, 1 << 60), (0, 1, 2, 0, 2, 2), (0, 3)):
        outbox.ack(Ack(edge="edge", life=Life(attempt=7), sequences=(), early=early, **window))
    assert told == [[1, 2]] and outbox.rows == 2
    welcome = Welcome(
        edge="edge",
        life=Life(attempt=7),
        expected=1,
        held=(0,),
        ended=False,
        early=(0, 1, 2, 0, 0, 1),
        **limits,
        **window,
    )
    outbox.welcome(structs.replace(welcome, answers=outbox.hello().number))
    assert told == [[1, 2], [0]] and outbox.rows == 1, (
        "what got lost on the way is heard with the next Welcome"
    )
