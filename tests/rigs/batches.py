"""What tests hear of the groups of a batch that is pushed into a runtime."""

from collections.abc import Callable

import pyarrow as pa

from dataflow.records import group_slices


def whole(records: pa.RecordBatch, ack: Callable[[], object]) -> Callable[[int], None]:
    """What a `Batch` calls with each group; ack: called with the last of them. A group twice is an error."""
    left = {group for group, _, _ in group_slices(records)}

    def release(group: int) -> None:
        left.remove(group)
        if not left:
            ack()

    return release
