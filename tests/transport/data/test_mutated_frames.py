"""Mutated frames into a live receiver: no crash, nothing taken that was not sent, memory flat."""

from collections import defaultdict
from pathlib import Path

import pytest

from transport.data import Receiver

from .rig import until
from .siege import HONEST, Siege, digest_of, receiver_at


class Tally:
    """What a receiver delivered: (sequence, digest) by sender."""

    def __init__(self) -> None:
        self.by_sender: dict[str, list[tuple[int, str]]] = defaultdict(list)

    def add(self, sender: str, sequence: int, digest: str) -> None:
        self.by_sender[sender].append((sequence, digest))

    def check(self, siege: Siege) -> None:
        assert [digest for _, digest in self.by_sender[HONEST]] == siege.sent
        for sender, deliveries in self.by_sender.items():
            numbers = [sequence for sequence, _ in deliveries]
            assert numbers == sorted(set(numbers)), sender
            assert sender == HONEST or all(
                digest in siege.lies[sender, number] for number, digest in deliveries
            )


def take(receiver: Receiver, tally: Tally) -> None:
    while (delivery := receiver.receive()) is not None:
        delivery.batch.validate(full=True)
        tally.add(delivery.sender, delivery.sequence, digest_of(delivery.batch))
        delivery.ack()


@pytest.mark.parametrize("seed", [0, 1])
def test_mutated_frames_change_nothing_of_what_an_honest_sender_sends(
    folder: Path, seed: int
) -> None:
    receiver = receiver_at(f"ipc://{folder}/edge")
    siege, tally = Siege(receiver.address, seed), Tally()
    until(lambda: (receiver.poll(), siege.sender.poll(), siege.sender.room() > 0)[2])
    while siege.fired < 750:
        siege.volley(len(tally.by_sender[siege.liar]))
        take(receiver, tally)
    siege.sender.finish()
    until(lambda: (take(receiver, tally), siege.sender.poll(), siege.sender.drained)[2])
    tally.check(siege)
    assert len(siege.sent) > 50
    assert receiver.refused > siege.fired // 3
    siege.close()
    receiver.close()
