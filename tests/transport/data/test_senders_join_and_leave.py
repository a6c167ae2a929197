"""Senders join and leave a running edge, and whole replicas between two edges, on every kind of
channel.
"""

from collections import Counter

import pytest

from transport.data import Receiver, Sender

from .rig import Rig, connect, drain, firsts, make_batch, settle, take, until


def test_expected_senders_share_the_capacity_as_their_number_changes(rig: Rig) -> None:
    receiver = rig.receiver(capacity_rows=12)
    first = rig.sender(receiver, sender_id="first")
    connect(first, to=receiver)

    def room_is(rows: int) -> None:
        until(lambda: (receiver.poll(), first.poll(), first.room() == rows)[2])

    for senders, share in ((1, 12), (3, 4), (2, 6), (12, 1), (1, 12)):
        receiver.expect(senders)
        room_is(share)


def test_the_end_waits_for_as_many_senders_as_are_expected_by_then(rig: Rig) -> None:
    receiver = rig.receiver()
    senders = [rig.sender(receiver, sender_id=f"s{number}") for number in range(3)]
    receiver.expect(3)
    for number, sender in enumerate(senders[:2]):
        sender.finish()
        drain(sender, receiver)
        assert not receiver.finished, number
    receiver.expect(2)
    assert receiver.finished, "the third never came, and is expected no more"
    receiver.expect(3)
    assert not receiver.finished
    connect(senders[2], to=receiver)
    receiver.expect(1)
    assert not receiver.finished, "who came is waited for, whatever is expected"
    senders[2].finish()
    drain(senders[2], receiver)
    assert receiver.finished


def test_a_sender_that_joins_after_the_others_ended_is_served(rig: Rig) -> None:
    receiver = rig.receiver(capacity_rows=8)
    first, late = (rig.sender(receiver, sender_id=name) for name in ("first", "late"))
    connect(first, to=receiver)
    assert first.send(make_batch(0))
    take(receiver, 1, first)
    first.finish()
    drain(first, receiver)
    assert receiver.finished
    until(lambda: (receiver.poll(), late.poll(), late.room() == 8)[2])
    assert not receiver.finished
    assert late.send(make_batch(1))
    assert firsts(take(receiver, 1, late)) == [1]
    late.finish()
    drain(late, receiver)
    assert receiver.finished


def test_more_senders_than_the_capacity_has_rows_cannot_be_expected(rig: Rig) -> None:
    receiver = rig.receiver(capacity_rows=2)
    for senders in (-1, 3):
        with pytest.raises(
            ValueError, match=r"cannot expect .* senders; got room for 2 rows.*raise the capacity"
        ):
            receiver.expect(senders)
    gone = rig.sender(receiver)
    gone.finish()
    drain(gone, receiver)
    receiver.expect(3)


def test_a_forgotten_senders_last_words_are_taken_in_first(rig: Rig) -> None:
    receiver = rig.receiver()
    dies = rig.sender(receiver)
    connect(dies, to=receiver)
    assert dies.send(make_batch(0))
    until(lambda: receiver._listener.waiting())
    receiver.forget("sender")
    assert receiver.depth[0] == 1 and not receiver.finished
    assert firsts(take(receiver, 1)) == [0]
    assert receiver.finished


def test_a_generator_group_grows_and_shrinks_fifty_times_and_loses_nothing(rig: Rig) -> None:
    """Replicas between a source and a sink: each takes from one edge and sends on over the
    other.
    """
    sink = rig.receiver(capacity_rows=64)
    source: Sender | None = None
    replicas: list[tuple[Receiver, Sender]] = []
    leaving: list[tuple[Receiver, Sender]] = []
    got: Counter[int] = Counter()
    joined = sent = 0

    def join() -> None:
        nonlocal joined, source
        inlet = rig.receiver(capacity_rows=4)
        joined += 1
        sink.expect(joined)
        replicas.append((inlet, rig.sender(sink, sender_id=f"replica-{joined}")))
        if source is None:
            source = rig.sender(inlet, sender_id="source")
        else:
            source.add_receiver(inlet.address)

    def leave(which: int) -> None:
        assert source is not None
        inlet, outlet = replicas.pop(which)
        source.retire_receiver(inlet.address)
        leaving.append((inlet, outlet))

    def turn() -> None:
        nonlocal sent
        assert source is not None
        while sent < 10 * joined and source.send(make_batch(sent)):
            sent += 1
        source.poll()
        for inlet, outlet in [*replicas, *leaving]:
            outlet.poll()
            if outlet.room() and (delivery := inlet.receive()) is not None:
                assert outlet.send(delivery.batch)
                delivery.ack()
            inlet.poll()
        for pair in [pair for pair in leaving if pair[0].finished]:
            pair[1].finish()
            if pair[1].drained and pair[0].address not in source.receivers:
                leaving.remove(pair)
                pair[1].close(), pair[0].close()
        while (delivery := sink.receive()) is not None:
            got.update(firsts([delivery]))
            delivery.ack()

    join()
    while joined < 51:
        for _ in range(2):
            join()
            settle(turn, times=3)
        until(lambda: (turn(), sent == 10 * joined)[1])
        for _ in range(2):
            leave(0)
            settle(turn, times=3)
        assert source is not None and not sink.finished
    until(lambda: (turn(), source.unacknowledged == 0 and not leaving)[1])
    assert (len(replicas), len(source.receivers)) == (1, 1)
    source.finish()
    until(lambda: (turn(), source.drained and replicas[0][0].finished)[1])
    replicas[0][1].finish()
    until(lambda: (turn(), sink.finished)[1])
    assert got == Counter(range(510)) and sink.refused == 0
