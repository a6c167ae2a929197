"""Answers go to the replica that asked, in order; one that is away holds up nobody else."""

from collections.abc import Callable, Iterable
from typing import Any

import pyarrow as pa

from transport.data import AnswerSender

Acked = Callable[[Iterable[int]], None]


class FakeSender:
    """Takes batches while it has credit; the test acknowledges their rows."""

    def __init__(self, address: str) -> None:
        self.receivers, self.sockets = [address], [f"socket of {address}"]
        self.has_credit, self.is_finished = True, False
        self.sent: list[tuple[list[int], Acked]] = []

    @property
    def drained(self) -> bool:
        return not self.sent

    def send(self, batch: pa.RecordBatch, acked: Acked) -> bool:
        assert not self.is_finished, "nothing is sent behind the end"
        if self.has_credit:
            self.sent.append((batch.column("number").to_pylist(), acked))
        return self.has_credit

    def poll(self) -> None:
        """Nothing comes back by itself."""

    def finish(self) -> None:
        self.is_finished = True

    def move_receiver(self, before: str, now: str) -> None:
        self.receivers = [now if each == before else each for each in self.receivers]

    def acknowledge(self) -> None:
        groups, acked = self.sent.pop(0)
        acked(range(len(groups)))


def made(askers: dict[int, list[int]], replicas: int = 2) -> tuple[AnswerSender, list[FakeSender]]:
    senders = [FakeSender(f"at {number}") for number in range(replicas)]
    whole: list[Any] = senders
    return (
        AnswerSender(whole, "number", lambda numbers: [askers[number] for number in numbers]),
        senders,
    )


def answers(*numbers: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"number": pa.array(numbers, pa.int64())})


def groups(sender: FakeSender) -> list[list[int]]:
    return [sent for sent, _ in sender.sent]


def test_each_answer_goes_to_who_asked_and_is_acknowledged_by_its_row() -> None:
    outlet, (first, second) = made({7: [1], 8: [0], 9: [1]})
    told: list[int] = []
    assert outlet.send(answers(7, 8, 9), told.extend)
    assert (groups(first), groups(second)) == ([[8]], [[7, 9]])
    second.acknowledge()
    first.acknowledge()
    assert told == [0, 2, 1] and outlet.drained


def test_an_answer_that_several_asked_for_is_acknowledged_when_all_have_it() -> None:
    outlet, (first, second) = made({7: [0, 1], 8: []})
    told: list[int] = []
    assert outlet.send(answers(7, 8), told.extend)
    assert groups(first) == groups(second) == [[7, 8]], "of whom nobody knows who asked all get it"
    first.acknowledge()
    assert not told
    second.acknowledge()
    assert told == [0, 1]


def test_who_asks_for_what_is_on_its_way_to_another_gets_it_too() -> None:
    """A rollout goes on with another replica while the answer waits for the first to come back."""
    outlet, (first, second) = made({7: [0]})
    told: list[int] = []
    outlet.send(answers(7), told.extend)
    outlet.send_again(7, 1)
    outlet.send_again(8, 1)  # not answered yet: it finds its askers when it is
    assert groups(first) == groups(second) == [[7]]
    first.acknowledge()
    assert not told, "the second has not got it"
    second.acknowledge()
    assert told == [0]
    outlet.send_again(7, 1)
    assert outlet.drained, "what all have is forgotten"


def test_a_replica_that_is_away_holds_up_nobody_and_has_its_answers_in_order_once_back() -> None:
    outlet, (first, second) = made({number: [number % 2] for number in range(6)})
    first.has_credit = False
    for number in range(6):
        assert outlet.send(answers(number), lambda rows: None), "requests are the bound"
    outlet.finish()
    assert groups(second) == [[1], [3], [5]] and second.is_finished and not first.is_finished
    assert not groups(first) and not outlet.drained
    first.has_credit = True
    outlet.poll()
    assert groups(first) == [[0], [2], [4]] and first.is_finished


def test_a_replica_that_was_started_again_elsewhere_keeps_its_place() -> None:
    outlet, (first, second) = made({1: [1]})
    outlet.move_receiver("at 1", "elsewhere")
    outlet.add_receiver("elsewhere")
    assert outlet.receivers == ["at 0", "elsewhere"] and len(outlet.sockets) == 2
    outlet.send(answers(1), lambda rows: None)
    assert (groups(first), groups(second)) == ([], [[1]])
