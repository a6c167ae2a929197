"""Frames: what goes in comes out, and nothing else comes in."""

from typing import Any, get_type_hints

import msgpack
import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from rigs.examples import examples

from transport.codec import Natural
from transport.data import messages
from transport.data import messages as frames
from transport.data.messages import (
    Ack,
    Data,
    Hello,
    Message,
    Size,
    Welcome,
    decode_message,
    encode_message,
)
from transport.errors import FrameError, SchemaMismatch
from transport.life import Life, Refused

from .rig import SCHEMA, make_batch

_NUMBER = st.integers(0, 2**62)


_NUMBERS = st.lists(_NUMBER, max_size=4).map(tuple)


_HINTS: dict[Any, st.SearchStrategy[Any]] = {
    Natural: _NUMBER,
    Size: st.integers(0, 2**40),
    str: st.text(max_size=20),
    bytes: st.binary(max_size=20),
    bool: st.booleans(),
    tuple[Natural, ...]: _NUMBERS,
    Life: st.builds(Life, _NUMBER, _NUMBER),
}


MESSAGES = st.one_of(
    *(
        st.builds(
            kind,
            **{
                name: _HINTS[hint]
                for name, hint in get_type_hints(kind, include_extras=True).items()
            },
        )
        for kind in (Hello, Data, Welcome, Ack, Refused)
    )
)


_LEAVES: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    (pa.int32(), st.integers(-(2**31), 2**31 - 1)),
    (pa.float32(), st.floats(width=32, allow_nan=False)),
    (pa.float64(), st.floats(allow_nan=False)),
    (pa.bool_(), st.booleans()),
    (pa.string(), st.text(max_size=8)),
    (pa.large_string(), st.text(max_size=8)),
    (pa.binary(), st.binary(max_size=8)),
    (pa.dictionary(pa.int32(), pa.string()), st.sampled_from(["a", "bb", "", "dddd"])),
]


def _nested(
    leaf: tuple[pa.DataType, st.SearchStrategy[Any]], depth: int
) -> tuple[pa.DataType, Any]:
    kind, values = leaf
    for _ in range(depth):
        kind, values = pa.list_(kind), st.lists(st.none() | values, max_size=3)
    return kind, values


@st.composite
def batches(draw: st.DrawFn) -> pa.RecordBatch:
    """Record batches of any schema: numbers, strings, lists of lists, dictionaries, nulls,
    slices.
    """
    rows = draw(st.integers(0, 6))
    arrays = []
    for _ in range(draw(st.integers(1, 4))):
        kind, values = _nested(draw(st.sampled_from(_LEAVES)), draw(st.integers(0, 2)))
        arrays.append(
            pa.array(draw(st.lists(st.none() | values, min_size=rows, max_size=rows)), kind)
        )
    batch = pa.RecordBatch.from_arrays(arrays, names=[f"c{index}" for index in range(len(arrays))])
    start = draw(st.integers(0, rows))
    return batch.slice(start, draw(st.integers(0, rows - start)))


def pack(batch: pa.RecordBatch) -> tuple[Data, bytes]:
    """A batch as its header and its body."""
    encoder = messages.BatchEncoder(batch.schema)
    body = encoder.encode(batch, encoder.size_bytes(batch)).to_pybytes()
    return _header(body, batch.num_rows), body


def _header(body: bytes, rows: int) -> Data:
    return Data(
        edge="e",
        sender="s",
        life=Life(attempt=1),
        sequence=5,
        rows=rows,
        bytes=len(body),
        checksum=messages.checksum(body),
    )


@given(batches())
@examples(200)
def test_any_batch_comes_out_as_it_went_in(batch: pa.RecordBatch) -> None:
    header, body = pack(batch)
    decoded = messages.decode_batch(body, header, batch.schema)
    assert decoded.equals(batch)
    assert decoded.schema.equals(batch.schema)
    assert pack(decoded)[1] == body


@given(MESSAGES)
@examples(200)
def test_any_message_comes_out_as_it_went_in(message: Message) -> None:
    assert decode_message(encode_message(message)) == message


@given(MESSAGES, st.data())
@examples(200)
def test_any_flipped_byte_in_a_header_is_refused(message: Message, data: st.DataObject) -> None:
    frame = bytearray(encode_message(message))
    frame[data.draw(st.integers(0, len(frame) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(FrameError):
        decode_message(frame)


@given(batches(), st.data())
@examples(200)
def test_any_flipped_byte_in_a_body_is_refused(batch: pa.RecordBatch, data: st.DataObject) -> None:
    header, body = pack(batch)
    damaged = bytearray(body)
    damaged[data.draw(st.integers(0, len(body) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(FrameError):
        messages.decode_batch(bytes(damaged), header, batch.schema)


def test_every_single_flipped_bit_of_one_message_is_refused() -> None:
    batch = make_batch(0, rows=2)
    header, body = pack(batch)
    packed = encode_message(header)
    for frame, decode in (
        (packed, decode_message),
        (body, lambda damaged: messages.decode_batch(damaged, header, SCHEMA)),
    ):
        for position in range(len(frame)):
            for bit in range(8):
                damaged = bytearray(frame)
                damaged[position] ^= 1 << bit
                with pytest.raises(FrameError):
                    decode(bytes(damaged))


@given(batches(), st.data())
@examples(300)
def test_a_forged_body_with_a_right_checksum_is_refused_or_sound(
    batch: pa.RecordBatch, data: st.DataObject
) -> None:
    forged = bytearray(pack(batch)[1])
    for _ in range(data.draw(st.integers(1, 3))):
        forged[data.draw(st.integers(0, len(forged) - 1))] = data.draw(st.integers(0, 255))
    try:
        decoded = messages.decode_batch(
            bytes(forged), _header(bytes(forged), batch.num_rows), batch.schema
        )
    except FrameError:
        return
    decoded.validate(full=True)
    assert decoded.num_rows == batch.num_rows
    decoded.to_pylist()


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_a_compressed_batch_is_refused_because_it_could_grow_beyond_its_credit(
    compression: str,
) -> None:
    zeros = pa.RecordBatch.from_arrays([pa.array(np.zeros(1 << 20, np.int64))], names=["value"])
    labels = pa.RecordBatch.from_arrays([pa.array(["a", "b"]).dictionary_encode()], names=["label"])
    for batch in (zeros, labels):
        sink = pa.BufferOutputStream()
        options = pa.ipc.IpcWriteOptions(compression=compression)
        with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
            writer.write_batch(batch)
        body = sink.getvalue().to_pybytes()
        with pytest.raises(FrameError, match="is compressed"):
            messages.decode_batch(body, _header(body, batch.num_rows), batch.schema)


def test_a_patched_offset_is_refused_before_anyone_reads_it() -> None:
    batch = make_batch(0, rows=3, tokens=4)
    body = bytearray(pack(batch)[1])
    offsets = np.arange(0, 16, 4, dtype=np.int32).tobytes()
    at = body.index(offsets)
    body[at + 4 : at + 8] = (1_000_000).to_bytes(4, "little")
    with pytest.raises(FrameError, match="not valid"):
        messages.decode_batch(bytes(body), _header(bytes(body), 3), SCHEMA)


@given(st.binary(max_size=200))
def test_junk_is_never_a_message(junk: bytes) -> None:
    with pytest.raises(FrameError):
        decode_message(junk)


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(0, 2**63)
        | st.text(max_size=5)
        | st.binary(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=4)
        ),
    )
    | st.tuples(
        st.just("data/2"),
        st.sampled_from(["Data", "Hello", "None"]),
        st.fixed_dictionaries({"edge": st.text(max_size=2) | st.integers(0, 9)}),
    )
)
def test_sealed_junk_is_never_a_message(value: object) -> None:
    packed = msgpack.packb(value)
    with pytest.raises(FrameError):
        decode_message(packed + xxhash.xxh3_64_digest(packed))


@given(st.binary(max_size=300))
def test_a_junk_body_with_a_right_checksum_is_refused(junk: bytes) -> None:
    with pytest.raises(FrameError):
        messages.decode_batch(junk, _header(junk, 0), SCHEMA)


@given(st.binary(max_size=300))
def test_a_junk_schema_is_refused(junk: bytes) -> None:
    with pytest.raises(FrameError):
        frames.decode_schema(junk)


def test_another_schema_or_row_count_is_refused() -> None:
    batch = make_batch(0, rows=2)
    header, body = pack(batch)
    with pytest.raises(SchemaMismatch, match="missing \\['other'\\], not expected \\['tokens'\\]"):
        messages.decode_batch(
            body, header, pa.schema([SCHEMA.field("value"), ("other", pa.int8())])
        )
    with pytest.raises(SchemaMismatch, match="different order"):
        messages.decode_batch(body, header, pa.schema(list(reversed(list(SCHEMA)))))
    with pytest.raises(FrameError, match="2 rows"):
        messages.decode_batch(body, structs.replace(header, rows=3), SCHEMA)


@pytest.mark.parametrize("shift", range(9))
def test_bytes_may_lie_anywhere_in_memory(shift: int) -> None:
    batch = make_batch(0, rows=5)
    header, body = pack(batch)
    shifted = memoryview(bytes(shift) + body)[shift:]
    decoded = messages.decode_batch(shifted, header, SCHEMA)
    assert decoded.equals(batch)
    assert all(
        buffer.address % 4 == 0 for buffer in decoded["tokens"].buffers() if buffer is not None
    )


def test_large_batches_are_decoded_without_a_copy() -> None:
    header, body = pack(make_batch(0, rows=64, tokens=1000))
    buffer = pa.py_buffer(body)
    if buffer.address % 8:
        pytest.skip("this interpreter lays bytes out otherwise")
    values = messages.decode_batch(buffer, header, SCHEMA)["tokens"].flatten().buffers()[1]
    assert buffer.address <= values.address < buffer.address + buffer.size
