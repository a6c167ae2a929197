"""Groups of a batch, whose rows lie side by side."""

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as some

from dataflow.records import GROUP_ID
from dataflow.tokens.ragged import group_slices


@given(
    some.lists(
        some.tuples(some.integers(0, 1 << 62), some.integers(1, 9)),
        unique_by=lambda group: group[0],
    )
)
def test_groups_are_told_in_order_with_their_rows(groups: list[tuple[int, int]]) -> None:
    ids = [group for group, count in groups for _ in range(count)]
    before = pa.record_batch({GROUP_ID: pa.array([-1, *ids], pa.int64())})
    slices = group_slices(before.slice(1))
    assert [(group, count) for group, _, count in slices] == groups
    assert all(ids[first : first + count] == [group] * count for group, first, count in slices)
