"""What bench.path takes for the group that it follows, and what not."""

from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pytest

from bench import path
from bench.path import Holder, Marks

PROMPTS = ["gbdahx=", "kzyxwv=", "mnopqr=", "abcdef="]


@pytest.fixture
def holder(monkeypatch: pytest.MonkeyPatch) -> Holder:
    """Follows groups 7 to 10; their rows are known as far as they were drawn."""
    monkeypatch.setattr(path, "PRODUCT", (*path.PRODUCT, __name__.split(".")[0]))
    monkeypatch.setattr(path, "GROUPS", len(PROMPTS))
    marks = Marks({letter: at for at, letter in enumerate("abcdefghijklmnopqrstuvwxyz=")})
    columns = {
        "group_id": pa.array(range(7, 11)),
        "prompt": pa.array(PROMPTS),
        "round_size": pa.array([0] * 4, pa.int32()),
    }
    marks.pick(Rows(pa.RecordBatch.from_pydict(columns)))
    assert marks.known()
    assert marks.groups == {7, 8, 9, 10}
    found = Holder(marks)
    assert found.has(rollouts(7))
    return found


@dataclass(frozen=True)
class Rows:
    records: object


@dataclass
class Owner:
    now: object = None
    queue: list[object] = field(default_factory=list)


def rollouts(group: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(
        {
            "group_id": [group, group],
            "completion": ["abdghx", "abdgh"],
            "reward": [1.0, 0.0],
            "logprobs": pa.array(
                [[-0.5, -0.25, -0.125, -1.5], [-0.5, -0.25, -0.125, -3.0]], pa.list_(pa.float32())
            ),
        }
    )


def test_rows_bytes_texts_and_numbers_of_the_group_are_it(holder: Holder) -> None:
    tokens = np.array([0, 5, 6, 1, 3, 0, 7, 23, 26, 0], np.int32)
    logprobs = np.array([0, -0.5, -0.25, -0.125, -1.5], np.float32)
    for value in (
        b"..gbdahx=..",
        "abdghx",
        tokens,
        logprobs,
        np.array([1.0, 0.0]),
        [Rows(rollouts(8))],
    ):
        assert holder.has(value), value
    assert holder.has(7, "group_id")
    assert holder.has(("prompts", 9))


def test_what_belongs_to_another_group_is_not(holder: Holder) -> None:
    tokens = np.array([6, 1, 3, 0, 23, 7, 26], np.int32)
    for value in (
        b"gbdahy=",
        "abdg",
        tokens,
        np.array([0.0, 1.0]),
        rollouts(11),
        7,
        ("prompts", 11),
    ):
        assert not holder.has(value), value
    assert not holder.has(7, "step")


def test_what_holds_it_counts_and_who_owns_a_queue_of_it_does_not(holder: Holder) -> None:
    assert holder.has(Rows(rollouts(7)))
    assert holder.has(Owner(now=Rows(rollouts(7))))
    assert {kind.__name__ for kind in holder.classes} == {"Rows", "Owner"}
    assert not holder.has(Owner(queue=[Rows(rollouts(7))]))
    assert not holder.has(Owner(now=Owner(now=Rows(rollouts(7)))))


def test_a_text_that_is_learned_while_another_thread_looks_disturbs_nobody(holder: Holder) -> None:
    marks = holder._marks

    class Meanwhile(str):
        """Between two looks into it, the group's next text is learned."""

        def __contains__(self, text: object) -> bool:
            marks.learn(pa.table({"completion": [f"next {len(marks._texts)}"]}))
            return super().__contains__(str(text))

    assert not marks.in_text(Meanwhile("nothing of the group"))
    assert marks.in_text(f"it says: next {len(PROMPTS) + 1}")
