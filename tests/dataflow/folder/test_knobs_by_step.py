"""Which knobs hold for which step: what the ledger says of a change, and what a change of the bound
waits for.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from dataflow.folder.knobs_by_step import KnobsByStep
from dataflow.folder.ledger import Ledger
from dataflow.folder.live_changes import KnobChange, bound_at, known_knobs, recorded_knobs
from dataflow.staleness import Bound
from dataflow.testing import FakeTrainer

BOUND = Bound(max_staleness=4, prompts_per_step=8)


def lr(number: int, value: float, **facts: Any) -> KnobChange:
    return KnobChange(
        number=number, node="trainer", knob="lr", value=value, was=1.0, trainer="trainer", **facts
    )


def stale(number: int, value: int) -> KnobChange:
    return KnobChange(
        number=number, node="generator", knob="max_staleness", value=value, was=0, trainer="trainer"
    )


def test_a_change_counts_from_the_next_step_on_and_is_on_record_before_it_begins(
    tmp_path: Path,
) -> None:
    with Ledger.create(tmp_path / "ledger.db") as ledger:
        knobs = KnobsByStep(FakeTrainer(), (), ledger)
        knobs.hear([lr(1, 0.5)])
        assert knobs.is_behind and knobs.at(9).lr == 1.0
        knobs.take(4, None)
        assert not knobs.is_behind and [knobs.at(step).lr for step in (3, 4, 9)] == [1.0, 0.5, 0.5]
        (on_record,) = recorded_knobs(ledger.facts())
        assert on_record == replace(lr(1, 0.5), step=4)
        knobs.hear([lr(1, 0.5)])
        assert not knobs.is_behind, "it is known"
        again = KnobsByStep(FakeTrainer(), known_knobs(ledger, [lr(1, 0.5), lr(2, 0.25)]), ledger)
        assert [again.at(step).lr for step in (3, 4, 9)] == [1.0, 0.5, 0.5], "as it was made"
        again.take(6, None)
        assert [again.at(step).lr for step in (5, 6)] == [0.5, 0.25]


def bounds(knobs: KnobsByStep[FakeTrainer], *steps: int) -> list[int]:
    return [
        found.max_staleness for step in steps if (found := knobs.bound(step, BOUND)) is not None
    ]


def test_a_larger_bound_holds_at_once_and_a_smaller_one_when_what_was_started_is_through() -> None:
    knobs = KnobsByStep(FakeTrainer(), ())
    knobs.hear([stale(1, 6)])
    knobs.take(3, BOUND)
    assert bounds(knobs, 2, 3) == [4, 6]
    knobs.hear([stale(2, 1)])
    (change,) = knobs.take(10, BOUND)
    assert change.step == 10 + 6 + 1 and bounds(knobs, 10, 16, 17) == [6, 6, 1]
    assert bound_at([replace(stale(1, 6), step=3), change], "trainer", 16, 4) == 6
    assert bound_at([change], "critic", 99, 4) == 4


def test_a_bound_that_does_not_hold_yet_gives_way_to_the_next() -> None:
    knobs = KnobsByStep(FakeTrainer(), ())
    knobs.hear([stale(1, 0)])
    knobs.take(10, BOUND)
    knobs.hear([stale(2, 2)])
    knobs.take(12, BOUND)
    assert bounds(knobs, 12, 14, 15, 16, 17) == [4, 4, 4, 4, 2], (
        "what starts now may be two versions old at step 15"
    )
