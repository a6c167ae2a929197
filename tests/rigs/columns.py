"""Whether rows have the columns that an operator promises."""

import pyarrow as pa

from dataflow.records import Columns


def check_columns(batch: pa.RecordBatch, columns: Columns) -> None:
    assert dict(zip(columns, batch.select(list(columns)).schema.types, strict=True)) == dict(columns)
