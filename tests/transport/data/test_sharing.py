"""Several senders at one receiver, and several receivers of one sender, on every kind of
channel.
"""

from .rig import Rig, connect, drain, firsts, make_batch, settle, take, until


def test_senders_share_the_capacity_and_leave_their_share_to_the_others(rig: Rig) -> None:
    receiver = rig.receiver(capacity_rows=16)
    first = rig.sender(receiver, sender_id="first")
    connect(first, to=receiver)
    assert first.room() == 16
    second = rig.sender(receiver, sender_id="second")
    connect(first, second, to=receiver)

    def rooms() -> tuple[int, int]:
        receiver.poll(), first.poll(), second.poll()
        return first.room(), second.room()

    until(lambda: rooms() == (8, 8))
    second.finish()
    drain(second, receiver)
    until(lambda: rooms()[0] == 16)


def test_a_newcomer_waits_until_the_others_gave_back_what_they_were_promised(rig: Rig) -> None:
    receiver = rig.receiver(capacity_rows=8)
    first = rig.sender(receiver, sender_id="first")
    connect(first, to=receiver)
    assert all(first.send(make_batch(number)) for number in range(8))
    held = take(receiver, 8, first, ack=False)
    second = rig.sender(receiver, sender_id="second")
    settle(lambda: (receiver.poll(), first.poll(), second.poll()))
    assert second.room() == 0
    for delivery in held:
        delivery.ack()
    connect(first, second, to=receiver)
    assert receiver.depth == (0, 0)


def test_a_forgotten_sender_counts_as_ended_and_frees_its_share(rig: Rig) -> None:
    receiver = rig.receiver(capacity_rows=16, senders=2)
    stays, dies = (rig.sender(receiver, sender_id=name) for name in ("stays", "dies"))
    connect(stays, dies, to=receiver)
    dies.close()
    receiver.forget("dies")
    until(lambda: (receiver.poll(), stays.poll(), stays.room() == 16)[2])
    stays.finish()
    drain(stays, receiver)
    assert receiver.finished


def test_balanced_batches_go_where_the_most_credit_is(rig: Rig) -> None:
    wide, narrow = rig.receiver(capacity_rows=8), rig.receiver(capacity_rows=4)
    sender = rig.sender(narrow)
    connect(sender, to=narrow)
    sender.add_receiver(wide.address)
    until(lambda: (wide.poll(), narrow.poll(), sender.poll(), sender.room() == 8)[3])
    assert [sender.send(make_batch(number, rows=2)) for number in range(7)] == [True] * 6 + [False]
    got_wide, got_narrow = take(wide, 4, sender), take(narrow, 2, sender)
    assert firsts(got_wide)[:2] == [0, 1]
    assert sorted(firsts(got_wide) + firsts(got_narrow)) == list(range(6))


def test_one_that_has_given_all_back_does_not_take_the_others_turn(rig: Rig) -> None:
    busy, idle = rig.receiver(capacity_rows=32), rig.receiver(capacity_rows=40)
    sender = rig.sender(busy, slack_rows=16)
    connect(sender, to=busy)
    sender.add_receiver(idle.address)
    until(lambda: (idle.poll(), busy.poll(), sender.poll(), sender.room() == 40)[3])
    assert all(sender.send(make_batch(number)) for number in range(16))
    held, done = take(busy, 8, sender, ack=False), take(idle, 8, sender)
    until(lambda: (idle.poll(), sender.poll(), sender.unacknowledged == 8)[2])
    assert all(sender.send(make_batch(number)) for number in range(16, 32))
    more_busy, more_idle = take(busy, 8, sender), take(idle, 8, sender)
    assert sorted(firsts(held) + firsts(done) + firsts(more_busy) + firsts(more_idle)) == list(
        range(32)
    )
    assert set(firsts(more_idle)) in ({*range(16, 32, 2)}, {*range(17, 32, 2)})


def test_a_sender_whose_end_an_earlier_life_had_need_not_come_again(rig: Rig) -> None:
    receiver = rig.receiver(senders=2)
    sender = rig.sender(receiver, sender_id="second")
    connect(sender, to=receiver)
    sender.finish()
    drain(sender, receiver)
    assert not receiver.finished
    receiver.over("second")
    assert not receiver.finished, "it has come itself"
    receiver.over("first")
    assert receiver.finished
