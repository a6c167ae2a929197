"""Laws of what is counted beside the scores."""

import pyarrow as pa

from operators.training.batches import Outcomes


def rows(**columns: pa.Array) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


def test_failures_are_counted_by_node_and_cause_and_what_does_not_apply_by_scorer() -> None:
    errors = pa.array(
        [None, "judge: hung: no answer within 1 s", None, "generator: too long"], pa.string()
    )
    found = Outcomes()
    found.add([rows(error=errors, judge=pa.array([1.0, None, None, None]))], ["judge", "other"])
    found.add(
        [rows(judge=pa.array([None, 1.0]), drop_reason=pa.array(["filter", "filter"]))], ["judge"]
    )
    assert found.figures() == {
        "failed": {"judge: hung": 1, "generator: other": 1},
        "does_not_apply": {"judge": 1},
    }
    assert (found + found).figures()["failed"]["judge: hung"] == 2
