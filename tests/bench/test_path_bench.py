"""What bench.path takes for the group that it follows, and what not."""

from dataclasses import dataclass

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
