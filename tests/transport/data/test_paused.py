"""A consumer that stands still: nothing piles up anywhere, and it goes on as if nothing had
been.
"""

from pathlib import Path

import pytest

from transport.data import Receiver, Sender

from .rig import Rig, connect, drain, firsts, make_batch, take, until

BOUND = 50
PAUSE_S, TURN_S = 120.0, 0.05


def turns_to_move(count: int, sender: Sender, receiver: Receiver, first: int) -> int:
    """Rounds of both sides until so many batches more were sent, delivered and acknowledged."""
    taken, turns, number = 0, 0, first
    while taken < count:
        turns += 1
        sender.poll()
        number += number < first + count and sender.send(make_batch(number))
        delivery = receiver.receive()
        if delivery is not None:
            assert firsts([delivery]) == [first + taken]
            delivery.ack()
            taken += 1
    return turns


def test_a_pause_of_two_minutes_costs_no_turn_and_no_memory_afterwards(folder: Path) -> None:
    rig, now = Rig("local", folder), [0.0]
    receiver = rig.receiver(capacity_rows=BOUND)
    sender = rig.sender(receiver, clock=lambda: now[0])
    connect(sender, to=receiver)
    before = turns_to_move(200, sender, receiver, first=0)
    number = 200
    while now[0] < PAUSE_S:
        number += sender.send(make_batch(number))
        sender.poll()
        receiver.poll()
        now[0] += TURN_S
        assert sender.unacknowledged <= BOUND
        assert receiver.depth[0] <= BOUND
    assert (sender.unacknowledged, receiver.depth[0], number) == (BOUND, BOUND, 200 + BOUND)
    assert firsts(take(receiver, BOUND, sender)) == list(range(200, number))
    assert turns_to_move(200, sender, receiver, first=number) == before
    rig.close()


@pytest.mark.parametrize("polled", [True, False])
def test_what_waits_for_a_consumer_that_does_not_acknowledge_stays_within_the_bound(
    rig: Rig, polled: bool
) -> None:
    receiver = rig.receiver(capacity_rows=BOUND)
    sender = rig.sender(receiver)
    connect(sender, to=receiver)
    number = 0
    for _ in range(3000):
        number += sender.send(make_batch(number))
        sender.poll()
        if polled:
            receiver.poll()
    assert number == sender.unacknowledged == BOUND
    until(lambda: (receiver.poll(), receiver.depth[0] == BOUND)[1])
    assert firsts(take(receiver, BOUND, sender)) == list(range(BOUND))
    sender.finish()
    drain(sender, receiver)
