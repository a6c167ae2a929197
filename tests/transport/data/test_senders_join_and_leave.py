"""Senders join and leave a running edge, and whole replicas between two edges, on every kind of
channel.
"""

import pytest

from .rig import Rig, connect, drain


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
