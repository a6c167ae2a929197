"""What travels on an edge: five messages between its ends, and the frames that they are written in.

sender -> receiver    Hello     who I am, what I send, where I stand; repeated after every
                                reconnection, when a window shrank, at the end of the stream, and
                                when it begins again
                      Data      one record batch, or a part of one that is too large for a message
receiver -> sender    Welcome   your window, and what I have of you: the rest is sent again
                      Ack       these batches are done with, and of others these rows; your window
                                from now on
                      Refused   no, and why

A message is one header frame, and for `Data` one body frame. The header is what the codec makes of
the message, followed by its own xxh3_64, so that no byte of it can change unnoticed.
"""

import struct
from typing import Annotated, Any, cast

import msgspec
import pyarrow as pa
import xxhash

from transport.codec import Codec, Natural
from transport.errors import FrameError, SchemaMismatch
from transport.life import LifeMessage, Refused

SEAL_BYTES = 8
MAX_HEADER_BYTES = 1 << 20
Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
"""Of one batch, in rows or bytes; counts of many such batches stay within 64 bits."""


class _OfEdge(LifeMessage, kw_only=True):
    """From either end."""

    edge: str
    """Name of the edge."""


class Hello(_OfEdge, kw_only=True):
    """The state of a sender towards one receiver."""

    sender: str
    """Name of the sender, the same after a restart; its life is larger then."""
    schema: bytes
    """Arrow schema of the batches, as an IPC message."""
    base: Natural
    """Lowest sequence number that may come."""
    next: Natural
    """Sequence number that the next new batch will have."""
    gone: tuple[Natural, ...]
    """Sequence numbers from base on that will not come (again): acknowledged, or taken back."""
    window_rows: Natural
    """The window that the sender goes by: rows."""
    window_bytes: Natural
    """The window that the sender goes by: bytes."""
    window_number: Natural
    """Number of that window; 0: it goes by none yet."""
    ended: bool
    """Whether no batch will follow."""
    number: Natural = 0
    """Larger in each later Hello of this sender and life: so one read late, from a connection that
    broke, is known."""


class Data(_OfEdge, kw_only=True):
    """The header of one record batch, or of a part of it: its parts follow each other, and nothing
    comes between.
    """

    sender: str
    """Name of the sender."""
    sequence: Natural
    """0, 1, 2, ... per sender, life and receiver."""
    rows: Size
    """Rows of the batch."""
    bytes: Size
    """Length of the encoded batch."""
    checksum: Natural
    """xxh3_64 of the encoded batch; 0 where no bytes are made."""
    offset: Size = 0
    """Bytes of the batch that earlier parts have."""
    left: Size = 0
    """Bytes of the batch that later parts have."""

    @property
    def part_bytes(self) -> int:
        """Length of this part."""
        return self.bytes - self.offset - self.left


class Welcome(_OfEdge, kw_only=True):
    """What a receiver grants to one sender, and what it has of it."""

    window_rows: Natural
    """The window: rows that may be unacknowledged."""
    window_bytes: Natural
    """The window: encoded bytes that may be unacknowledged."""
    window_number: Natural
    """Number of the window: larger, each time that the receiver says another."""
    capacity_rows: Natural
    """Rows that the receiver holds at most, of all senders."""
    capacity_bytes: Natural
    """Bytes that the receiver holds at most, of all senders."""
    max_message_bytes: Natural
    """Bytes of the largest message that it takes: a larger batch comes in parts."""
    expected: Natural
    """Sequence number that it has not seen yet; everything from here on is to be sent again."""
    held: tuple[Natural, ...]
    """Sequence numbers below `expected` that are not acknowledged yet."""
    ended: bool
    """Whether it knows where the stream ends."""
    answers: Natural = 0
    """Number of the newest Hello that it has of this sender, so that an answer read late is
    known."""
    early: tuple[Natural, ...] = ()
    """Of the batches that it holds, rows that are done with: as in Ack."""


class Ack(_OfEdge, kw_only=True):
    """Batches that the consumer is done with."""

    sequences: tuple[Natural, ...]
    """The batches; none when only the window changed."""
    window_rows: Natural
    """The window from now on: rows."""
    window_bytes: Natural
    """The window from now on: encoded bytes."""
    window_number: Natural
    """Number of the window."""
    early: tuple[Natural, ...] = ()
    """Rows that the consumer is done with before the rest of their batches, which stay
    unacknowledged and keep their credit: sequence number, first row, number of rows; and so on."""


Message = Hello | Data | Welcome | Ack | Refused
_CODEC: Codec[Message] = Codec(
    "data", 2, Hello, Data, Welcome, Ack, Refused, max_bytes=MAX_HEADER_BYTES - SEAL_BYTES
)


def encode_message(message: Message) -> bytes:
    """The header frame of a message."""
    packed = _CODEC.encode(message)
    return packed + xxhash.xxh3_64_digest(packed)


def decode_message(frame: Any) -> Message:
    """The message of a header frame; FrameError for anything that `encode_message` did not make."""
    data = bytes(frame)
    if not SEAL_BYTES < len(data) <= MAX_HEADER_BYTES:
        raise FrameError(
            f"a header frame has the wrong size; got {len(data)} bytes; use one protocol"
        )
    packed, seal = data[:-SEAL_BYTES], data[-SEAL_BYTES:]
    if xxhash.xxh3_64_digest(packed) != seal:
        raise FrameError(
            f"a header is damaged; its seal does not fit its {len(packed)} bytes; send it again"
        )
    return _CODEC.decode(packed)


# Record batches as bytes on the wire: Arrow IPC streams with a checksum.
#
# The body frame of a `Data` message is a whole Arrow stream: schema, dictionaries, one batch;
# `checksum` in its header covers it. (Sending the schema with every batch costs about 15 us; it
# spares dictionary columns a protocol of their own.)


# Whether the columns of an Arrow message are compressed, from its flatbuffer: pyarrow tells only
# by decompressing.

_HEADER_KIND, _HEADER, _DICTIONARY_BATCH, _RECORD_BATCH, _DATA, _COMPRESSION = 1, 2, 2, 3, 1, 3
"""Of Arrow's Message.fbs: fields of Message, its kinds of header, and fields of DictionaryBatch and
RecordBatch."""


def is_compressed(metadata: Any) -> bool:
    """Whether the columns of a message are; `metadata` is its flatbuffer, which Arrow has
    verified.
    """
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


_ALIGNMENT_BYTES = 8
_UNREADABLE = (
    pa.ArrowException,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    OSError,
    MemoryError,
    StopIteration,
    struct.error,
)


def encode_schema(schema: pa.Schema) -> bytes:
    """A schema as it stands in a Hello."""
    return bytes(schema.serialize().to_pybytes())


def decode_schema(data: bytes) -> pa.Schema:
    """The schema of a Hello; FrameError when it is none."""
    try:
        return pa.ipc.read_schema(pa.py_buffer(data))
    except _UNREADABLE as error:
        raise FrameError(
            f"a schema cannot be read; {error}; run the same version on both sides"
        ) from error


class BatchEncoder:
    """Makes the body frames of one schema."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        empty = pa.RecordBatch.from_pylist([], schema=schema)
        self._frame_bytes = _stream_bytes(empty) - pa.ipc.get_record_batch_size(empty)
        self._has_dictionaries = "dictionary<" in " ".join(str(field.type) for field in schema)

    def size_bytes(self, batch: pa.RecordBatch) -> int:
        """Exact length of the body of a batch, without making it."""
        if self._has_dictionaries:
            return _stream_bytes(batch)
        return int(self._frame_bytes + pa.ipc.get_record_batch_size(batch))

    def encode(self, batch: pa.RecordBatch, size_bytes: int) -> pa.Buffer:
        """The body frame of a batch: one copy of its columns, into a buffer of exactly
        `size_bytes`.
        """
        body = pa.allocate_buffer(size_bytes)
        _write(pa.FixedSizeBufferWriter(body), batch)
        return body


def _stream_bytes(batch: pa.RecordBatch) -> int:
    sink = pa.MockOutputStream()
    _write(sink, batch)
    return int(sink.size())


def _write(sink: Any, batch: pa.RecordBatch) -> None:
    with pa.RecordBatchStreamWriter(sink, batch.schema) as writer:
        writer.write_batch(batch)


def checksum(body: Any) -> int:
    """xxh3_64 of a body frame."""
    return xxhash.xxh3_64_intdigest(body)


def put_together(begun: pa.Buffer | None, part: Any, header: Data) -> pa.Buffer:
    """The body frame of a batch that comes in parts, with one more of them; `begun` is None at the
    first.

    It takes the memory of what has come: pages that no part has reached yet are the system's.
    """
    try:
        body = pa.allocate_buffer(header.bytes) if begun is None else begun
    except MemoryError as error:
        raise FrameError(
            f"batch {header.sequence} of '{header.sender}' does not fit into memory; got"
            f" {header.bytes} bytes; send less at once"
        ) from error
    memoryview(body).cast("B")[header.offset : header.offset + header.part_bytes] = part
    return body


def decode_batch(body: Any, header: Data, schema: pa.Schema) -> pa.RecordBatch:
    """The batch of a body frame, without a copy where the bytes lie well.

    Length, checksum, schema and every offset are checked before anyone touches the data; compressed
    columns are refused, because they would take more memory than the credit that was given for
    them. Raises FrameError, or SchemaMismatch.
    """
    buffer = body if isinstance(body, pa.Buffer) else pa.py_buffer(body)
    if buffer.size != header.bytes:
        raise FrameError(
            f"a batch is cut; got {buffer.size} bytes of {header.bytes}; send it again"
        )
    actual = checksum(buffer)
    if actual != header.checksum:
        raise FrameError(
            f"batch {header.sequence} of '{header.sender}' is damaged; its checksum is"
            f" {actual:016x}, its header says {header.checksum:016x}; send it again"
        )
    if buffer.address % _ALIGNMENT_BYTES:
        buffer = pa.py_buffer(buffer.to_pybytes())
    try:
        if any(
            is_compressed(message.metadata) for message in pa.ipc.MessageReader.open_stream(buffer)
        ):
            raise FrameError(
                f"batch {header.sequence} of '{header.sender}' is compressed; got {buffer.size}"
                " bytes that would take an unknown number; send what BatchEncoder makes of a"
                " record batch"
            )
        reader = pa.ipc.open_stream(buffer)
        check_schema(reader.schema, schema, edge=header.edge)
        batch = reader.read_next_batch()
    except FrameError:
        raise
    except _UNREADABLE as error:
        raise FrameError(
            f"batch {header.sequence} of '{header.sender}' is no Arrow stream; {error}; "
            "send what BatchEncoder makes of a record batch"
        ) from error
    check_batch(batch, header)
    return batch


def check_schema(actual: pa.Schema, expected: pa.Schema, *, edge: str) -> None:
    """Raise SchemaMismatch unless both have the same fields in the same order; metadata does not
    count.
    """
    if actual.equals(expected):
        return
    ours = {field.name: field for field in expected}
    theirs = {field.name: field for field in actual}
    missing = sorted(ours.keys() - theirs.keys())
    extra = sorted(theirs.keys() - ours.keys())
    both = ours.keys() & theirs.keys()
    differing = sorted(str(theirs[name]) for name in both if ours[name] != theirs[name])
    raise SchemaMismatch(
        f"edge '{edge}' carries another schema; missing {missing}, not expected {extra}, different"
        f" {differing or ('order' if not missing + extra else [])}; send batches with"
        f" {expected.names}"
    )


def check_valid(batch: pa.RecordBatch, name: str) -> None:
    """Raise FrameError unless every offset, length and character of a batch is valid."""
    try:
        batch.validate(full=True)
    except _UNREADABLE as error:
        raise FrameError(
            f"{name} is not valid; {error}; check the offsets and buffers that it was built from"
        ) from error


def check_batch(batch: pa.RecordBatch, header: Data) -> None:
    """Raise FrameError unless a batch is valid, and has as many rows as its header says."""
    check_valid(batch, f"batch {header.sequence} of '{header.sender}'")
    if batch.num_rows != header.rows:
        raise FrameError(
            f"batch {header.sequence} of '{header.sender}' has {batch.num_rows} rows; its header"
            f" says {header.rows}; send it again"
        )
