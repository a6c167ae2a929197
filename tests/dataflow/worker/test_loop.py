"""The loop around a runtime: rows in by credit, rows out by credit, and acknowledgements only after
both.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest

from dataflow.errors import OperatorError
from dataflow.folder.finished import Finished
from dataflow.folder.ledger import Ledger
from dataflow.runtime import Batch, Runtime
from dataflow.worker.host import settled_since
from dataflow.worker.loop import Acked, NodeLoop


def rows(*groups: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array(groups, pa.int64())], names=["group_id"])


def ids(batch: pa.RecordBatch) -> list[int]:
    return batch.column("group_id").to_pylist()


class Events(list[tuple[Any, ...]]):
    """What happened, in order."""

    def of(self, *kinds: str) -> list[tuple[Any, ...]]:
        return [event for event in self if event[0] in kinds]


@dataclass(frozen=True)
class Delivery:
    batch: pa.RecordBatch
    ack: Callable[[], None]
    ack_rows: Callable[[int, int], None]
    sender: str = "before-0"


class FakeInlet:
    """Gives what it was filled with."""

    def __init__(self, events: Events, *batches: pa.RecordBatch) -> None:
        self.events, self.waiting, self.polls, self.ended = events, deque(batches), 0, True

    def receive(self, timeout_s: float = 0.0) -> Delivery | None:
        if not self.waiting:
            return None
        batch = self.waiting.popleft()
        self.events.append(("received", *ids(batch)))

        left = [batch.num_rows]

        def ack() -> None:
            self.events.append(("acked", *ids(batch)))

        def ack_rows(first: int, count: int) -> None:
            left[0] -= count
            if left[0]:
                self.events.append(("acked early", *ids(batch.slice(first, count))))
            else:
                ack()

        return Delivery(batch, ack, ack_rows)

    def poll(self) -> None:
        self.polls += 1

    def flush(self) -> None:
        pass

    @property
    def finished(self) -> bool:
        return self.ended and not self.waiting


class FakeOutlet:
    """Takes as many batches as it has credit for; with `keeps`, acknowledges none before
    `acknowledge`.
    """

    def __init__(
        self, events: Events, credit: int = 1_000, name: str = "sent", keeps: bool = False
    ) -> None:
        self.events, self.credit, self.polls, self.name, self.finishes = events, credit, 0, name, 0
        self.keeps, self.owed = keeps, deque[tuple[Acked, set[int]]]()

    def send(self, batch: pa.RecordBatch, acked: Acked) -> bool:
        if not self.credit:
            return False
        self.credit -= 1
        self.events.append((self.name, *ids(batch)))
        self.owed.append((acked, set(range(batch.num_rows))))
        if not self.keeps:
            self.acknowledge()
        return True

    def acknowledge(self) -> None:
        acked, left = self.owed.popleft()
        acked(sorted(left))

    def acknowledge_rows(self, first: int, count: int) -> None:
        """Of the oldest batch some rows before the rest."""
        acked, left = self.owed[0]
        acked(range(first, first + count))
        left.difference_update(range(first, first + count))

    def poll(self) -> None:
        self.polls += 1

    def finish(self) -> None:
        self.finishes += 1
        self.events.append(("finished",))


class Script(Runtime):
    """Passes each batch on in a slice of work of its own; `holds` batches may be inside."""

    def __init__(self, events: Events, holds: int = 1_000, keeps_last: bool = False) -> None:
        self.events, self.holds, self.keeps_last = events, holds, keeps_last
        self.inside: deque[Batch] = deque()
        self.told: list[Mapping[str, Any]] = []
        self.done = False

    def room(self) -> int:
        return self.holds - len(self.inside)

    def push(self, batch: Batch) -> None:
        self.events.append(("pushed", *ids(batch.records)))
        self.inside.append(batch)

    def work(self) -> list[Batch] | None:
        self.events.append(("worked",))
        if not self.inside or (self.keeps_last and len(self.inside) == 1):
            return None
        batch = self.inside.popleft()
        batch.ack()
        return [Batch(batch.source, batch.records)]

    def pending(self) -> int:
        return len(self.inside)

    def tell(self, message: Mapping[str, Any]) -> None:
        self.told.append(message)

    def status(self) -> dict[str, float | int | str]:
        return {"done": int(self.done)}


class Swallow(Script):
    """A sink that is done with a batch only when the next has come, and returns nothing."""

    def work(self) -> list[Batch] | None:
        self.events.append(("worked",))
        if len(self.inside) < 2:
            return None
        self.inside.popleft().ack()
        return []


def loop_of(
    runtime: Runtime, inlet: FakeInlet | None, *outlets: FakeOutlet, marks: Any = None
) -> NodeLoop:
    inlets = [] if inlet is None else [("prompts", "before", inlet)]
    return NodeLoop("node", runtime, inlets, {"prompts": list(outlets)}, marks=marks)


def turn_until_still(loop: NodeLoop) -> None:
    for _ in range(100):
        if not loop.turn():
            return
    raise AssertionError("the loop says for ever that something moves")


def test_an_acknowledgement_leaves_after_what_its_rows_led_to() -> None:
    events = Events()
    turn_until_still(
        loop_of(Script(events), FakeInlet(events, rows(0), rows(1)), FakeOutlet(events))
    )
    assert events.of("sent", "acked") == [("sent", 0), ("acked", 0), ("sent", 1), ("acked", 1)]


def test_without_credit_nothing_is_acknowledged() -> None:
    events = Events()
    outlet = FakeOutlet(events, credit=0)
    loop = loop_of(Script(events), FakeInlet(events, rows(0)), outlet)
    turn_until_still(loop)
    assert events.of("sent", "acked") == [] and loop.blocked
    outlet.credit = 1
    turn_until_still(loop)
    assert events.of("sent", "acked") == [("sent", 0), ("acked", 0)] and not loop.blocked


def test_rows_for_several_readers_are_acknowledged_when_the_last_reader_has_them() -> None:
    events = Events()
    first, second = FakeOutlet(events, name="first"), FakeOutlet(events, credit=0, name="second")
    loop = loop_of(Script(events), FakeInlet(events, rows(0)), first, second)
    turn_until_still(loop)
    assert events.of("first", "second", "acked") == [("first", 0)]
    second.credit = 1
    turn_until_still(loop)
    assert events.of("first", "second", "acked") == [("first", 0), ("second", 0), ("acked", 0)]


def test_nothing_is_worked_or_received_while_rows_wait_for_credit() -> None:
    events = Events()
    inlet, outlet = FakeInlet(events, rows(0), rows(1)), FakeOutlet(events, credit=0)
    loop = loop_of(Script(events, holds=1), inlet, outlet)
    loop.turn()
    before = list(events)
    assert loop.blocked
    for _ in range(5):
        assert not loop.turn()
    assert events == before


def test_a_blocked_loop_still_answers_on_all_its_ends() -> None:
    events = Events()
    inlet, outlet = FakeInlet(events, rows(0)), FakeOutlet(events, credit=0)
    loop = loop_of(Script(events), inlet, outlet)
    for _ in range(5):
        loop.turn()
    assert (inlet.polls, outlet.polls) == (5, 5)


def test_no_more_is_received_than_the_runtime_has_room_for() -> None:
    events = Events()
    inlet = FakeInlet(events, *(rows(n) for n in range(10)))
    loop = loop_of(Script(events, holds=3), inlet, FakeOutlet(events))
    loop.turn()
    assert events.of("received") == [("received", 0), ("received", 1), ("received", 2)]
    assert loop.rows_in == 3


def test_rows_that_lead_to_nothing_are_acknowledged_too() -> None:
    events = Events()
    loop = loop_of(Swallow(events), FakeInlet(events, rows(0), rows(1), rows(2)))
    turn_until_still(loop)
    assert events.of("acked") == [("acked", 0), ("acked", 1)]


def test_the_end_is_passed_on_once_and_after_the_last_row() -> None:
    events = Events()
    outlet = FakeOutlet(events, credit=1)
    runtime = Script(events)
    loop = loop_of(runtime, FakeInlet(events, rows(0), rows(1)), outlet)
    turn_until_still(loop)
    assert not loop.ended and outlet.finishes == 0
    outlet.credit = 5
    for _ in range(20):
        loop.turn()
    assert events.of("sent", "finished") == [("sent", 0), ("sent", 1), ("finished",)]
    assert loop.ended and runtime.told == [{"end": True}]


def test_the_end_waits_for_rows_that_the_runtime_still_owes() -> None:
    events = Events()
    outlet, runtime = FakeOutlet(events), Script(events, keeps_last=True)
    loop = loop_of(runtime, FakeInlet(events, rows(0)), outlet)
    turn_until_still(loop)
    assert not loop.ended and runtime.told == []
    runtime.keeps_last = False
    turn_until_still(loop)
    assert events.of("sent", "finished") == [("sent", 0), ("finished",)]


def test_rows_made_when_the_runtime_hears_of_the_end_leave_before_the_end() -> None:
    events = Events()

    class Last(Script):
        def tell(self, message: Mapping[str, Any]) -> None:
            super().tell(message)
            self.inside.append(Batch("prompts", rows(9)))

    outlet = FakeOutlet(events)
    turn_until_still(loop_of(Last(events), FakeInlet(events, rows(0)), outlet))
    assert events.of("sent", "finished") == [("sent", 0), ("sent", 9), ("finished",)]


def test_the_end_waits_for_every_inlet() -> None:
    events = Events()
    first, second = FakeInlet(events), FakeInlet(events)
    second.ended = False
    loop = NodeLoop("node", Script(events), [("a", "x", first), ("b", "y", second)], {})
    turn_until_still(loop)
    assert not loop.ended
    second.ended = True
    turn_until_still(loop)
    assert loop.ended


def test_the_end_of_one_source_is_passed_on_while_another_goes_on_and_not_before_its_last_row() -> (
    None
):
    """Held-out prompts never end by themselves; those that are trained may."""
    events = Events()
    ending, lasting = FakeInlet(events, rows(0)), FakeInlet(events)
    lasting.ended = False
    first, second = FakeOutlet(events), FakeOutlet(events, name="other")
    runtime = Script(events, keeps_last=True)
    sources = {"a": [first], "b": [second]}
    loop = NodeLoop("node", runtime, [("a", "x", ending), ("b", "y", lasting)], sources)
    turn_until_still(loop)
    assert (first.finishes, second.finishes) == (0, 0)
    runtime.keeps_last = False
    turn_until_still(loop)
    assert events.of("sent", "acked", "finished") == [("sent", 0), ("acked", 0), ("finished",)]
    assert (first.finishes, second.finishes, loop.ended, runtime.told) == (1, 0, False, [])
    lasting.waiting.append(rows(1))
    lasting.ended = True
    turn_until_still(loop)
    assert (first.finishes, second.finishes, loop.ended, runtime.told) == (
        1,
        1,
        True,
        [{"end": True}],
    )
    assert events.of("other") == [("other", 1)]


def test_an_ended_loop_polls_its_ends_so_that_what_was_sent_may_be_sent_again() -> None:
    events = Events()
    inlet, outlet = FakeInlet(events), FakeOutlet(events)
    loop = loop_of(Script(events), inlet, outlet)
    turn_until_still(loop)
    assert loop.ended
    polls = inlet.polls, outlet.polls
    assert not loop.turn()
    assert (inlet.polls, outlet.polls) == (polls[0] + 1, polls[1] + 1)
    assert outlet.finishes == 1


def test_a_source_ends_when_it_says_that_it_is_done() -> None:
    events = Events()
    runtime, outlet = Script(events), FakeOutlet(events)
    runtime.inside.append(Batch("prompts", rows(0)))
    loop = loop_of(runtime, None, outlet)
    turn_until_still(loop)
    assert not loop.ended
    runtime.done = True
    turn_until_still(loop)
    assert events.of("sent", "finished") == [("sent", 0), ("finished",)]


def test_a_paused_loop_sends_what_it_has_and_makes_nothing_new() -> None:
    events = Events()
    outlet = FakeOutlet(events, credit=0)
    loop = loop_of(Script(events), FakeInlet(events, rows(0), rows(1)), outlet)
    loop.turn()
    loop.paused, outlet.credit = True, 10
    worked = len(events.of("worked"))
    turn_until_still(loop)
    assert events.of("sent") == [("sent", 0)] and len(events.of("worked")) == worked
    loop.paused = False
    turn_until_still(loop)
    assert events.of("sent") == [("sent", 0), ("sent", 1)] and loop.ended


def test_groups_are_marked_in_the_ledger_before_they_are_sent() -> None:
    events = Events()
    outlet = FakeOutlet(events)
    inlet = FakeInlet(events, rows(0, 0, 1, 1), rows(2, 2))
    loop = loop_of(
        Script(events),
        inlet,
        outlet,
        marks={"prompts": lambda groups: events.append(("marked", "prompts", *groups))},
    )
    turn_until_still(loop)
    assert events.of("marked", "sent") == [
        ("marked", "prompts", 0, 1),
        ("sent", 0, 0, 1, 1),
        ("marked", "prompts", 2),
        ("sent", 2, 2),
    ]


@pytest.mark.parametrize(
    ("method", "doing"), [("work", "working"), ("push", "taking rows of 'prompts' from 'before'")]
)
def test_an_exception_in_a_runtime_names_the_node_and_what_it_was_doing(
    method: str, doing: str
) -> None:
    events = Events()
    runtime = Script(events)

    def fail(*args: Any) -> Any:
        raise ValueError("boom")

    setattr(runtime, method, fail)
    loop = loop_of(runtime, FakeInlet(events, rows(0)), FakeOutlet(events))
    with pytest.raises(
        OperatorError, match=f"'node' failed while {doing}: ValueError: boom .*test_loop.py"
    ):
        loop.turn()
    assert events.of("acked") == []


def test_rows_are_acknowledged_only_when_the_next_node_has_acknowledged_what_they_led_to() -> None:
    events = Events()
    outlet = FakeOutlet(events, keeps=True)
    loop = loop_of(Script(events), FakeInlet(events, rows(0), rows(1)), outlet)
    turn_until_still(loop)
    assert loop.ended and events.of("acked") == []
    outlet.acknowledge()
    assert events.of("acked") == [("acked", 0)]


def test_an_answer_on_one_group_is_passed_on_before_its_neighbours_have_an_outcome() -> None:
    events = Events()
    outlet = FakeOutlet(events, keeps=True)
    loop = loop_of(Script(events), FakeInlet(events, rows(7, 7, 7, 8, 9, 9)), outlet)
    turn_until_still(loop)
    outlet.acknowledge_rows(3, 1)
    assert events.of("acked", "acked early") == [("acked early", 8)]
    outlet.acknowledge_rows(1, 2)
    assert len(events.of("acked early")) == 1, "no group begins with these rows"
    outlet.acknowledge()
    assert events.of("acked", "acked early")[1:] == [
        ("acked early", 7, 7, 7),
        ("acked", 7, 7, 7, 8, 9, 9),
    ]


def test_what_a_runtime_says_of_one_group_is_passed_on_before_it_is_done_with_the_others() -> None:
    events, script = Events(), Script(Events(), keeps_last=True)
    loop = NodeLoop(
        "node", script, [("prompts", "before", FakeInlet(events, rows(0, 0, 1, 2)))], {}
    )
    turn_until_still(loop)
    (batch,) = script.inside
    batch.release(1)
    batch.release(1)
    loop.turn()
    assert events.of("acked", "acked early") == [("acked early", 1)] and not loop.ended
    batch.ack()
    loop.turn()
    assert events.of("acked", "acked early")[1:] == [("acked early", 0, 0), ("acked", 0, 0, 1, 2)]


def test_a_group_that_comes_again_is_done_once() -> None:
    events = Events()
    outlet = FakeOutlet(events, keeps=True)
    loop = loop_of(Script(events), FakeInlet(events, rows(0, 1), rows(1, 2), rows(0)), outlet)
    turn_until_still(loop)
    assert events.of("pushed") == [("pushed", 0, 1), ("pushed", 2)]
    assert events.of("sent") == [("sent", 0, 1), ("sent", 2)]
    for _ in range(2):
        outlet.acknowledge()
    assert events.of("acked") == [("acked", 0, 1), ("acked", 0), ("acked", 1, 2)]


def test_what_was_finished_before_a_restart_leaves_without_being_made_again(tmp_path: Path) -> None:
    events = Events()
    before = Finished(tmp_path, "prompts")
    before.append(rows(1, 1))
    finished = Finished(tmp_path, "prompts", attempt=1)
    finished.load([0, 1])
    outlet = FakeOutlet(events, keeps=True)
    inlets = [("prompts", "origin", FakeInlet(events, rows(0, 1)))]
    loop = NodeLoop(
        "node", Script(events), inlets, {"prompts": [outlet]}, finished={"prompts": finished}
    )
    turn_until_still(loop)
    assert events.of("pushed") == [("pushed", 0)]
    assert sorted(events.of("sent")) == [("sent", 0), ("sent", 1, 1)]
    assert events.of("acked") == []
    for _ in range(2):
        outlet.acknowledge()
    assert events.of("acked") == [("acked", 0, 1)]
    loop.close()
    assert list(tmp_path.iterdir()) == [], "all have an outcome"


def test_the_end_of_a_source_waits_for_rows_that_were_found_finished_in_the_same_turn(
    tmp_path: Path,
) -> None:
    with_rows = Finished(tmp_path, "prompts")
    with_rows.append(rows(0))
    finished = Finished(tmp_path, "prompts", attempt=1)
    finished.load([0])
    events = Events()
    other = FakeInlet(events)
    other.ended = False
    outlet = FakeOutlet(events, credit=0)
    inlets = [("prompts", "source", FakeInlet(events, rows(0))), ("questions", "other", other)]
    loop = NodeLoop(
        "node", Script(events), inlets, {"prompts": [outlet]}, finished={"prompts": finished}
    )
    loop.turn()
    assert events.of("sent", "finished") == []
    outlet.credit = 1
    loop.turn()
    loop.turn()
    assert events.of("sent", "finished") == [("sent", 0), ("finished",)]


def test_after_the_end_what_a_restarted_node_sends_again_is_acknowledged_like_the_first() -> None:
    events = Events()
    inlet, outlet = FakeInlet(events, rows(0)), FakeOutlet(events, keeps=True)
    loop = loop_of(Script(events), inlet, outlet)
    turn_until_still(loop)
    inlet.waiting.extend([rows(0), rows(7)])
    loop.turn()
    assert events.of("pushed") == [("pushed", 0)]
    assert events.of("acked") == [
        ("acked", 0),
        ("acked", 7),
    ], "the delivery before, and what has an outcome"
    outlet.acknowledge()
    assert len(events.of("acked")) == 3


def test_what_has_an_outcome_is_acknowledged_and_not_made_again(tmp_path: Path) -> None:
    """A generator that was started again: groups 0 and 1 were trained before their source heard of
    it.
    """
    with Ledger.create(tmp_path / "ledger.db", {"trainer": ["source"]}) as ledger:
        ledger.issue("source", [(group, f"prompt {group}") for group in range(3)])
        settled = settled_since(ledger, ["source"])
        ledger.commit_step("trainer", 1, version=1, source="source", trained=[0, 1])
        ledger.issue("source", [(3, "prompt 3")])
        events = Events()
        inlet, outlet = (
            FakeInlet(events, rows(0), rows(1, 2), rows(3)),
            FakeOutlet(events, keeps=True),
        )
        loop = NodeLoop(
            "node",
            Script(events),
            [("source", "origin", inlet)],
            {"source": [outlet]},
            settled=settled,
        )
        loop.turn()
        assert events.of("pushed", "acked") == [("pushed", 2), ("pushed", 3), ("acked", 0)]
        while loop.turn():
            pass
        assert events.of("sent") == [("sent", 2), ("sent", 3)]
        outlet.acknowledge()
        assert events.of("acked") == [("acked", 0), ("acked", 1, 2)]
        ledger.roll_back_to(0, "trainer")
        assert settled("source", [0, 1, 2, 3]) == []


def test_a_node_that_was_started_again_asks_the_ledger_of_the_groups_that_come_alone() -> None:
    asked: list[object] = []

    class Spy:
        def next_group_id(self, source: str) -> int:
            return 1_000_000

        def in_flight(self, source: str, among: object = None) -> list[Any]:
            asked.append(among)
            return []

    settled = settled_since(cast(Ledger, Spy()), ["source"])
    assert settled("source", [7, 8, 1_000_000]) == [7, 8]
    assert asked == [[7, 8]]


def test_what_a_node_finished_is_kept_before_it_is_sent(tmp_path: Path) -> None:
    """Whoever comes after a crash right behind the sending finds it and need not make it again."""
    events = Events()

    class Successor(FakeOutlet):
        def send(self, batch: pa.RecordBatch, *told: Any, **called: Any) -> bool:
            later = Finished(tmp_path, "prompts", attempt=1)
            later.load(ids(batch))
            events.append(
                ("found", *(group for group in ids(batch) if later.find(group) is not None))
            )
            return super().send(batch, *told, **called)

    inlets = [("prompts", "before", FakeInlet(events, rows(0, 1), rows(2)))]
    kept = Finished(tmp_path, "prompts")
    loop = NodeLoop(
        "node",
        Script(events),
        inlets,
        {"prompts": [Successor(events, keeps=True)]},
        finished={"prompts": kept},
    )
    turn_until_still(loop)
    assert events.of("found", "sent") == [
        ("found", 0, 1),
        ("sent", 0, 1),
        ("found", 2),
        ("sent", 2),
    ]


def test_a_runtime_hears_of_every_group_that_has_an_outcome_and_of_no_other(tmp_path: Path) -> None:
    events = Events()

    class Keeps(Script):
        def forget(self, source: str, group: int) -> None:
            events.append(("forgot", source, group))

    earlier = Finished(tmp_path, "source")
    earlier.append(rows(1, 1))
    kept = Finished(tmp_path, "source", attempt=1)
    kept.load([0, 1, 2])
    outlet = FakeOutlet(events, keeps=True)
    loop = NodeLoop(
        "node",
        Keeps(events),
        [("source", "origin", FakeInlet(events, rows(0, 1, 2), rows(3)))],
        {"source": [outlet]},
        finished={"source": kept},
        settled=lambda source, groups: {2} & set(groups),
    )
    turn_until_still(loop)
    assert events.of("pushed") == [("pushed", 0), ("pushed", 3)]
    assert events.of("forgot") == [("forgot", "source", 2)], "the others are on their way"
    while outlet.owed:
        outlet.acknowledge()
    assert sorted(events.of("forgot")) == [("forgot", "source", group) for group in range(4)]


def test_rows_of_no_group_are_acknowledged_and_neither_pushed_nor_sent() -> None:
    events = Events()

    class Empty(Script):
        def work(self) -> list[Batch] | None:
            made = super().work()
            return (
                None
                if made is None
                else [Batch(batch.source, batch.records.slice(0, 0)) for batch in made]
            )

    outlet = FakeOutlet(events)
    turn_until_still(loop_of(Empty(events), FakeInlet(events, rows(), rows(1)), outlet))
    assert events.of("pushed", "sent", "acked") == [("acked",), ("pushed", 1), ("acked", 1)]
