"""Whether the columns of an Arrow message are compressed, from its flatbuffer: pyarrow tells only
by decompressing."""

import struct
from typing import Any, cast

_HEADER_KIND, _HEADER, _DICTIONARY_BATCH, _RECORD_BATCH, _DATA, _COMPRESSION = 1, 2, 2, 3, 1, 3
"""Of Arrow's Message.fbs: fields of Message, its kinds of header, and fields of DictionaryBatch and
RecordBatch."""


def is_compressed(metadata: Any) -> bool:
    """Whether the columns of a message are; `metadata` is its flatbuffer, which Arrow has
    verified."""
    data = memoryview(metadata)
    message = _follow(data, 0)
    kind = _field(data, message, _HEADER_KIND)
    table = _follow(data, _field(data, message, _HEADER))
    if data[kind] == _DICTIONARY_BATCH:
        table = _follow(data, _field(data, table, _DATA))
    elif data[kind] != _RECORD_BATCH:
        return False
    return _field(data, table, _COMPRESSION) > 0


def _follow(data: memoryview, at: int) -> int:
    """Where the offset that stands at a place leads."""
    return at + cast(int, struct.unpack_from("<I", data, at)[0])


def _field(data: memoryview, table: int, number: int) -> int:
    """Where a field of a flatbuffer's table stands; 0 where it is left out."""
    layout = table - cast(int, struct.unpack_from("<i", data, table)[0])
    slot = 4 + 2 * number
    if slot >= struct.unpack_from("<H", data, layout)[0]:
        return 0
    offset = cast(int, struct.unpack_from("<H", data, layout + slot)[0])
    return table + offset if offset else 0
