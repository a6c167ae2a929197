"""Receivers join and leave a running edge, on every kind of channel."""

import time

import pytest

from transport.data import Delivery, Receiver, Sender
from transport.errors import BatchTooLarge, PeerGone, WaitTimeout

from .rig import Rig, connect, drain, firsts, make_batch, settle, take, until


def only(stays: Receiver, sender: Sender, *others: Receiver) -> None:
    """Poll all until one receiver is left and everything is acknowledged."""

    def step() -> bool:
        for one in (stays, *others, sender):
            one.poll()
        return sender.receivers == [stays.address] and sender.unacknowledged == 0

    until(step)


def test_a_receiver_that_joins_gets_batches_from_then_on(rig: Rig) -> None:
    first, second = rig.receiver(capacity_rows=2), rig.receiver(capacity_rows=2)
    sender = rig.sender(first)
    connect(sender, to=first)
    assert [sender.send(make_batch(number)) for number in range(3)] == [True, True, False]
    sender.add_receiver(second.address)
    assert sender.receivers == [first.address, second.address]
    connect(sender, to=second)
    assert [sender.send(make_batch(number)) for number in range(2, 5)] == [True, True, False]
    assert firsts(take(first, 2, sender)) == [0, 1]
    assert firsts(take(second, 2, sender)) == [2, 3]


def test_all_receivers_together_have_no_more_than_one_may_have_room_for(rig: Rig) -> None:
    first, second = rig.receiver(), rig.receiver()
    sender = rig.sender(first, second, most_rows=5)
    connect(sender, to=first)
    connect(sender, to=second)
    assert sender.room() == 5
    assert [sender.send(make_batch(number, rows=2)) for number in range(3)] == [True, True, False]
    assert sender.room() == 1 and sender.send(make_batch(3)) and sender.room() == 0
    taken: list[Delivery] = []

    def take_all() -> bool:
        sender.poll()
        taken.extend(found for one in (first, second) if (found := one.receive(0.01)) is not None)
        return len(taken) == 3

    until(take_all)
    assert not sender.send(make_batch(4)), "they have come, and are not acknowledged"
    for delivery in taken:
        delivery.ack()
    until(lambda: (first.poll(), second.poll(), sender.poll(), sender.unacknowledged == 0)[3])
    assert sender.send(make_batch(5, rows=6)), "a larger one travels alone"
    assert not sender.send(make_batch(6))


def test_sockets_follow_who_joins_and_leaves(rig: Rig) -> None:
    first, second = rig.receiver(), rig.receiver()
    sender = rig.sender(first)
    before = sender.sockets
    sender.add_receiver(second.address)
    assert (len(sender.sockets), sender.sockets[: len(before)]) == (2 * len(before), before)
    sender.retire_receiver(second.address)
    only(first, sender, second)
    assert sender.sockets == before


def test_a_retired_receiver_gets_nothing_new_and_leaves_when_all_is_acknowledged(rig: Rig) -> None:
    stays, leaves = rig.receiver(), rig.receiver()
    sender = rig.sender(leaves)
    connect(sender, to=leaves)
    assert sender.send(make_batch(0)) and sender.send(make_batch(1))
    sender.add_receiver(stays.address)
    sender.retire_receiver(leaves.address)
    connect(sender, to=stays)
    assert sender.send(make_batch(2))
    one, two = take(leaves, 2, sender, ack=False)
    until(lambda: leaves.receive(0.01) is None and leaves.finished)
    one.ack()
    until(lambda: (leaves.poll(), sender.poll(), sender.unacknowledged == 2)[2])
    assert leaves.address in sender.receivers
    two.ack()
    assert firsts(take(stays, 1, sender)) == [2]
    only(stays, sender, leaves)
    assert not stays.finished
    sender.finish()
    drain(sender, stays)
    assert stays.finished


def test_what_never_left_for_a_retired_receiver_goes_to_the_others(rig: Rig) -> None:
    stays, leaves = rig.receiver(), rig.receiver(capacity_rows=4)
    sender = rig.sender(leaves)
    connect(sender, to=leaves)
    assert all(sender.send(make_batch(number)) for number in range(4))
    leaves.close()
    small = rig.receiver(leaves.address, capacity_rows=1)
    until(lambda: (sender.poll(), small.poll(), small.depth[0] == 1)[2])
    sender.add_receiver(stays.address)
    sender.retire_receiver(small.address)
    assert sender.unacknowledged == 4
    assert not sender.room() and not sender.send(make_batch(9)), "what is taken goes first"
    assert firsts(take(stays, 3, sender)) == [1, 2, 3]
    assert firsts(take(small, 1, sender)) == [0]
    only(stays, sender, small)
    assert small.finished


def test_a_retired_receiver_that_restarts_gets_its_batches_again(rig: Rig) -> None:
    stays, leaves = rig.receiver(), rig.receiver()
    sender = rig.sender(leaves)
    connect(sender, to=leaves)
    assert sender.send(make_batch(0)) and sender.send(make_batch(1))
    take(leaves, 2, sender, ack=False)
    sender.add_receiver(stays.address)
    sender.retire_receiver(leaves.address)
    leaves.close()
    again = rig.receiver(leaves.address)
    assert firsts(take(again, 2, sender)) == [0, 1]
    only(stays, sender, again)
    assert again.finished and stays.receive() is None


def test_a_retired_receiver_that_stays_away_leaves_its_batches_to_the_others(rig: Rig) -> None:
    now = [0.0]
    stays, leaves = rig.receiver(), rig.receiver()
    sender = rig.sender(leaves, clock=lambda: now[0], peer_timeout_s=5.0)
    connect(sender, to=leaves)
    assert sender.send(make_batch(0)) and sender.send(make_batch(1))
    sender.add_receiver(stays.address)
    connect(sender, to=stays)
    sender.retire_receiver(leaves.address)
    leaves.close()
    before = sender.sockets

    def given_up() -> bool:
        now[0] += 0.5
        stays.poll()
        # the sender's clock runs ahead of the one that stays: let its signs of life arrive
        time.sleep(0.02)
        sender.poll()
        return sender.receivers == [stays.address]

    until(given_up)
    assert not before or sender.sockets != before
    assert firsts(take(stays, 2, sender)) == [0, 1]


def test_what_a_dead_receiver_has_goes_to_the_others_oldest_first_and_before_new_batches(
    rig: Rig,
) -> None:
    stays, dies = rig.receiver(capacity_rows=2), rig.receiver(capacity_rows=4)
    sender = rig.sender(dies)
    connect(sender, to=dies)
    assert all(sender.send(make_batch(number)) for number in range(4))
    taken = take(dies, 4, sender, ack=False)
    taken[1].ack()
    until(lambda: (dies.poll(), sender.poll(), sender.unacknowledged == 3)[2])
    sender.add_receiver(stays.address)
    connect(sender, to=stays)
    dies.close()
    sender.forget_receiver(dies.address)
    assert (sender.receivers, sender.unacknowledged, sender.room()) == ([stays.address], 3, 0)
    until(lambda: (sender.poll(), stays.poll(), stays.depth[0] == 2)[2])
    assert not sender.send(make_batch(9))
    assert firsts(take(stays, 3, sender)) == [0, 2, 3]
    only(stays, sender)


def test_a_small_new_batch_does_not_overtake_a_large_one_of_a_dead_receiver(rig: Rig) -> None:
    stays, dies = rig.receiver(capacity_rows=4), rig.receiver(capacity_rows=8)
    sender = rig.sender(dies)
    connect(sender, to=dies)
    assert sender.send(make_batch(0, rows=3)) and sender.send(make_batch(3, rows=3))
    sender.add_receiver(stays.address)
    connect(sender, to=[stays, dies])
    until(lambda: (stays.poll(), sender.poll(), sender.room() == 4)[2])
    dies.close()
    sender.forget_receiver(dies.address)
    assert sender.room() == 0 and not sender.send(make_batch(6))
    assert firsts(take(stays, 2, sender)) == [0, 3]
    connect(sender, to=stays)
    assert sender.send(make_batch(6))


def test_the_only_receiver_is_replaced_even_after_the_end(rig: Rig) -> None:
    dies, comes = rig.receiver(), rig.receiver()
    sender = rig.sender(dies)
    connect(sender, to=dies)
    assert sender.send(make_batch(0)) and sender.send(make_batch(1))
    sender.finish()
    dies.close()
    sender.add_receiver(comes.address)
    sender.forget_receiver(dies.address)
    assert firsts(take(comes, 2, sender)) == [0, 1]
    drain(sender, comes)
    assert comes.finished
    sender.close(linger_s=1.0)


def test_a_stream_that_ended_begins_again_for_what_a_dead_receiver_leaves(rig: Rig) -> None:
    stays, dies = rig.receiver(), rig.receiver()
    sender = rig.sender(dies)
    connect(sender, to=dies)
    assert sender.send(make_batch(0)) and sender.send(make_batch(1))
    sender.add_receiver(stays.address)
    connect(sender, to=stays)
    sender.finish()
    until(lambda: (stays.poll(), sender.poll(), stays.finished)[2])
    settle(lambda: (stays.poll(), sender.poll()), times=5)
    dies.close()
    sender.forget_receiver(dies.address)
    assert firsts(take(stays, 2, sender)) == [0, 1]
    drain(sender, stays)
    assert stays.finished


def test_a_finished_receiver_that_went_away_is_not_missed_while_another_takes_the_batches(
    rig: Rig,
) -> None:
    now = [0.0]
    stays, done, dies = rig.receiver(), rig.receiver(), rig.receiver()
    sender = rig.sender(dies, clock=lambda: now[0], peer_timeout_s=5.0)
    connect(sender, to=dies)
    assert sender.send(make_batch(0))
    for receiver in (done, stays):
        sender.add_receiver(receiver.address)
    sender.finish()
    ends = [peer.outbox for peer in sender._peers[1:]]
    until(lambda: (stays.poll(), done.poll(), sender.poll(), all(end.finished for end in ends))[3])
    done.close(), dies.close()
    until(
        lambda: (sender.poll(), sum(peer.away_since is not None for peer in sender._peers) == 2)[1]
    )
    sender.forget_receiver(dies.address)
    now[0] = 100.0
    assert firsts(take(stays, 1, sender)) == [0]


def test_closing_names_batches_that_nobody_took(rig: Rig) -> None:
    ticks = iter(range(10_000))
    dies = rig.receiver()
    sender = rig.sender(dies, clock=lambda: float(next(ticks)), peer_timeout_s=1e9)
    connect(sender, to=dies)
    assert sender.send(make_batch(0))
    sender.add_receiver(rig.new_address() if rig.kind != "tcp" else "tcp://127.0.0.1:9")
    sender.forget_receiver(dies.address)
    with pytest.raises(WaitTimeout, match="1 batches without a receiver"):
        sender.close(linger_s=3.0)


def test_a_dead_receivers_batch_that_fits_no_other_is_refused_aloud_and_kept(rig: Rig) -> None:
    dies, narrow = rig.receiver(capacity_rows=8), rig.receiver(capacity_rows=2)
    sender = rig.sender(dies)
    connect(sender, to=dies)
    assert sender.send(make_batch(0, rows=5))
    sender.add_receiver(narrow.address)
    sender.retire_receiver(dies.address)
    dies.close()
    sender.poll()
    with pytest.raises(BatchTooLarge, match="5 rows"):
        until(lambda: forget_if_known(sender, dies.address) or bool(sender.poll() or narrow.poll()))
    assert (sender.receivers, sender.unacknowledged) == ([narrow.address], 1)


def forget_if_known(sender: Sender, address: str) -> None:
    """Once."""
    if address in sender.receivers:
        sender.forget_receiver(address)


@pytest.mark.parametrize("restarted", [False, True])
def test_a_receiver_that_left_comes_back(rig: Rig, restarted: bool) -> None:
    stays, leaves = rig.receiver(capacity_rows=1), rig.receiver()
    sender = rig.sender(leaves)
    connect(sender, to=leaves)
    assert sender.send(make_batch(0))
    take(leaves, 1, sender)
    sender.add_receiver(stays.address)
    sender.retire_receiver(leaves.address)
    only(stays, sender, leaves)
    assert leaves.finished
    if restarted:
        leaves.close()
        leaves = rig.receiver(leaves.address)
    sender.add_receiver(leaves.address)
    until(lambda: (leaves.poll(), sender.poll(), sender.room() > 1)[2])
    assert sender.send(make_batch(1, rows=2)) and sender.send(make_batch(3))
    assert firsts(take(leaves, 2, sender)) == [1, 3]
    assert not leaves.finished
    sender.finish()
    drain(sender, leaves, stays)
    assert leaves.finished and leaves.refused == 0


def test_a_receiver_that_was_forgotten_by_mistake_comes_back_and_is_not_overrun(rig: Rig) -> None:
    stays, slow = rig.receiver(capacity_rows=1), rig.receiver(capacity_rows=4)
    sender = rig.sender(slow)
    connect(sender, to=slow)
    assert all(sender.send(make_batch(number)) for number in range(3))
    held = take(slow, 3, sender, ack=False)
    sender.add_receiver(stays.address)
    sender.forget_receiver(slow.address)
    sender.add_receiver(slow.address)
    again = take(stays, 1, sender) + take(slow, 1, sender, ack=False)
    settle(lambda: (slow.poll(), stays.poll(), sender.poll()))
    assert slow.depth[0] == 4
    for delivery in [*held, again[1]]:
        delivery.ack()
    got: list[int] = []

    def step() -> bool:
        for receiver in (slow, stays):
            got.extend(firsts(take(receiver, 1, sender)) if receiver.depth[0] else [])
            receiver.poll()
        sender.poll()
        return sender.unacknowledged == 0

    until(step)
    assert set(firsts(again) + got) == {0, 1, 2}
    assert slow.depth == (0, 0) and slow.refused == 0


def test_a_receiver_that_is_gone_and_not_forgotten_is_still_missed(rig: Rig) -> None:
    now = [0.0]
    receiver, other = rig.receiver(), rig.receiver()
    sender = rig.sender(receiver, clock=lambda: now[0], peer_timeout_s=5.0)
    sender.add_receiver(other.address)
    connect(sender, to=[receiver, other])
    receiver.close()

    def step() -> bool:
        now[0] += 0.5
        return bool(sender.poll() or other.poll())

    with pytest.raises(PeerGone):
        until(step)


def test_changes_that_cannot_be_are_refused_in_three_parts(rig: Rig) -> None:
    one, two = rig.receiver(), rig.receiver()
    sender = rig.sender(one)
    with pytest.raises(
        ValueError, match=r"has the receiver .* already; got it again; .*add each once"
    ):
        sender.add_receiver(one.address)
    for change in (sender.retire_receiver, sender.forget_receiver):
        with pytest.raises(
            ValueError, match=r"has no receiver nowhere; it has .*; name one of those"
        ):
            change("nowhere")
        with pytest.raises(ValueError, match=r"nobody would take.*its last receiver; add_receiver"):
            change(one.address)
    sender.add_receiver(two.address)
    sender.retire_receiver(two.address)
    with pytest.raises(ValueError, match="retires and is not through"):
        sender.add_receiver(two.address)
    with pytest.raises(ValueError, match="go already"):
        sender.retire_receiver(two.address)
    with pytest.raises(ValueError, match="its last receiver"):
        sender.forget_receiver(one.address)
    sender.forget_receiver(two.address)
    assert sender.receivers == [one.address]


def test_what_a_receiver_owed_goes_to_where_it_was_started_again(rig: Rig) -> None:
    before = rig.receiver()
    sender = rig.sender(before)
    connect(sender, to=before)
    assert sender.send(make_batch(0)) and sender.send(make_batch(1))
    (first,) = take(before, 1, sender, ack=False)
    assert firsts([first]) == [0]
    before.close()
    after = rig.receiver()
    sender.move_receiver(before.address, after.address)
    assert sender.receivers == [after.address]
    connect(sender, to=after)
    assert firsts(take(after, 2, sender)) == [0, 1]
    assert sender.send(make_batch(2))
    sender.finish()
    assert firsts(take(after, 1, sender)) == [2]
    drain(sender, after)


def test_no_receiver_moves_to_where_another_one_is(rig: Rig) -> None:
    first, second = rig.receiver(), rig.receiver()
    sender = rig.sender(first, second)
    with pytest.raises(ValueError, match="each has its own"):
        sender.move_receiver(first.address, second.address)
    with pytest.raises(ValueError, match="has no receiver"):
        sender.move_receiver("elsewhere", second.address)
