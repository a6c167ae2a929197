"""What tests ask of a batch: its columns, and that each of its groups is released once."""

from collections.abc import Callable

import pyarrow as pa

from dataflow.records import Columns
from dataflow.tokens.ragged import group_slices


def check_columns(batch: pa.RecordBatch, columns: Columns) -> None:
    assert dict(zip(columns, batch.select(list(columns)).schema.types, strict=True)) == dict(
        columns
    )


def whole(records: pa.RecordBatch, ack: Callable[[], object]) -> Callable[[int], None]:
    """What a `Batch` calls with each group; ack: called with the last of them. A group twice is an
    error.
    """
    left = {group for group, _, _ in group_slices(records)}

    def release(group: int) -> None:
        left.remove(group)
        if not left:
            ack()

    return release
