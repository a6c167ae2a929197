"""Rows into calls of a scorer's function, and what it returns into a column; both as bytes between two processes."""

import math
import os
import struct
import traceback
from collections.abc import Callable, Mapping, Sequence, Set
from types import CodeType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dataflow.records import AnyArray
from dataflow.scoring.calls import Call
from dataflow.scoring.knobs import ScorerKnobs

_COUNT = struct.Struct("<I")
_LONGEST_ERROR = 500
_INT64 = range(-(2**63), 2**63)
Check = Callable[[Any], Any]


class Unscored(Exception):
    """A call that gave no usable score; its text is what the row records."""


def encode(rows: pa.RecordBatch, starts: AnyArray, per: str, start: int, stop: int) -> bytes:
    """Calls start to stop: the number of rows of each group (none when called per row), then Arrow IPC."""
    sizes = np.diff(starts[start : stop + 1]).astype(np.int32) if per == "group" else np.empty(0, np.int32)
    first, last = int(starts[start]), int(starts[stop])
    return _COUNT.pack(len(sizes)) + sizes.tobytes() + _stream(rows.slice(first, last - first))


def prepare(scorer: ScorerKnobs[..., Any], payload: bytes) -> Call:
    """The function that makes call number i of a payload."""
    (count,) = _COUNT.unpack_from(payload)
    head = _COUNT.size + 4 * count
    sizes = np.frombuffer(payload, np.int32, count, _COUNT.size)
    rows = _streamed(memoryview(payload)[head:])
    if scorer.per == "row":
        return _row_call(scorer, rows)
    return _group_call(scorer, rows, np.concatenate([[0], np.cumsum(sizes)]))


def pack(scorer: ScorerKnobs[..., Any], values: list[Any]) -> bytes:
    """What several calls gave: their rows' column, and what was wrong with rows of groups."""
    if scorer.per == "row":
        return _stream(pa.record_batch({"value": score_column(values, scorer.output)}))
    errors: list[str | None] = []
    for checked, failures in values:
        errors += [failures.get(row) for row in range(len(checked))]
    column = score_column([value for checked, _ in values for value in checked], scorer.output)
    return _stream(pa.record_batch({"value": column, "error": pa.array(errors, pa.string())}))


def unpack(body: bytes) -> tuple[pa.Array, dict[int, str]]:
    """What `pack` was given, row by row: the column, and what was wrong by row."""
    rows = _streamed(body)
    errors = rows.column(1).to_pylist() if rows.num_columns > 1 else []
    return rows.column(0), {row: text for row, text in enumerate(errors) if text is not None}


def _stream(rows: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_batch(rows)
    return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]


def _streamed(data: bytes | memoryview) -> pa.RecordBatch:
    return pa.ipc.open_stream(pa.py_buffer(data)).read_next_batch()


def _row_call(scorer: ScorerKnobs[..., Any], rows: pa.RecordBatch) -> Call:
    function, given, check = scorer.function, dict(scorer.given), checker(scorer.output)
    names = rows.schema.names
    columns = [row_arguments(rows.column(name), scorer.signature.annotations[name]) for name in names]

    def arguments(index: int) -> dict[str, Any]:
        return {name: column[index] for name, column in zip(names, columns, strict=True)}

    if scorer.signature.is_async:

        async def call_async(index: int) -> Any:
            return check(await function(**arguments(index), **given))

        return call_async
    return lambda index: check(function(**arguments(index), **given))


def _group_call(scorer: ScorerKnobs[..., Any], rows: pa.RecordBatch, starts: AnyArray) -> Call:
    function, given, check = scorer.function, dict(scorer.given), checker(scorer.output)
    annotations = scorer.signature.annotations

    def arguments(index: int) -> dict[str, Any]:
        size = int(starts[index + 1] - starts[index])
        group = rows.slice(int(starts[index]), size)
        return {name: group_argument(group.column(name), annotations[name]) for name in annotations}

    def values(index: int, returned: Any) -> Any:
        size = int(starts[index + 1] - starts[index])
        return group_values(returned, size, check, scorer.signature.is_broadcast)

    if scorer.signature.is_async:

        async def call_async(index: int) -> Any:
            return values(index, await function(**arguments(index), **given))

        return call_async
    return lambda index: values(index, function(**arguments(index), **given))


def row_arguments(column: pa.Array, annotation: Any) -> list[Any]:
    """One plain value for each row: lists of numbers as numpy arrays, unless annotated as list[...]."""
    if _is_ragged(column) and not _wants_list(annotation):
        flat = _numbers(column.values).copy()
        offsets, present = column.offsets.to_numpy(), _present(column)
        return [
            flat[start:stop] if there else None
            for start, stop, there in zip(offsets[:-1], offsets[1:], present, strict=True)
        ]
    return column.to_pylist()  # type: ignore[no-any-return]


def group_argument(column: pa.Array, annotation: Any) -> Any:
    """The rows of a group: a numpy array of numbers (null as NaN), a list of anything else."""
    if _is_number(column.type) and not _wants_list(annotation):
        return _numbers(column).copy()
    item = annotation.__args__[0] if _wants_list(annotation) and annotation.__args__ else None
    return row_arguments(column, item)


def checker(output: pa.DataType) -> Check:
    """What turns a returned value into one that can be stored; it raises Unscored for any other."""
    if pa.types.is_floating(output):
        return _checked_float
    if pa.types.is_integer(output):
        return _checked_int
    if pa.types.is_boolean(output):
        return lambda value: _checked_kind(value, bool)
    if pa.types.is_string(output):
        return _checked_text
    if pa.types.is_list(output) and output.value_type == pa.float32():
        return _checked_numbers
    item = checker(output.value_type)
    return lambda value: [item(each) for each in _checked_kind(value, list)]


def group_values(returned: Any, rows: int, check: Check, is_broadcast: bool) -> tuple[list[Any], dict[int, str]]:
    """A group's answer as one value for each row, with what was wrong by row."""
    if returned is None:
        raise Unscored("skipped (returned None)")
    if is_broadcast:
        return [check(returned)] * rows, {}
    is_flat = isinstance(returned, np.ndarray) and returned.ndim == 1
    values = returned.tolist() if is_flat else returned
    if not hasattr(values, "__len__") or isinstance(values, str | bytes | Mapping | Set) or _is_single(values):
        raise Unscored(f"returned {_shown(returned)} for {rows} rows; return one value for each")
    if len(values) != rows:
        raise Unscored(f"returned {len(values)} values for {rows} rows; return one for each")
    checked: list[Any] = []
    failures: dict[int, str] = {}
    for row, value in enumerate(values):
        try:
            checked.append(check(value))
        except Unscored as error:
            checked.append(None)
            failures[row] = str(error)
    return checked, failures


def score_column(values: Sequence[Any], output: pa.DataType) -> pa.Array:
    """Checked values (None: no score) as a column."""
    if not (pa.types.is_list(output) and output.value_type == pa.float32()):
        return pa.array(values, type=output)
    missing = np.array([value is None for value in values], bool)
    offsets = np.zeros(len(values) + 1, np.int32)
    np.cumsum([0 if value is None else len(value) // 4 for value in values], out=offsets[1:])
    flat = np.frombuffer(b"".join(value for value in values if value is not None), np.float32)
    return pa.ListArray.from_arrays(
        pa.array(offsets), pa.array(flat), type=output, mask=pa.array(missing) if missing.any() else None
    )


def error_column(found: pa.Array, failures: Mapping[int, str]) -> pa.Array:
    """The column of errors with those of some rows set."""
    if not failures:
        return found
    rows = sorted(failures)
    mask = np.zeros(len(found), bool)
    mask[rows] = True
    texts = pa.array([failures[row] for row in rows], pa.string())
    return pc.replace_with_mask(found, pa.array(mask), texts)


def describe(error: BaseException, code: CodeType) -> str:
    """An exception as one line with the place in the function's file where it came from."""
    if isinstance(error, Unscored):
        return str(error)
    try:
        text = " ".join(str(error).split())
    except Exception as second:
        text = f"its message cannot be read: {type(second).__name__}"
    if len(text) > _LONGEST_ERROR:
        text = text[: _LONGEST_ERROR - 1] + "…"
    said = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return f"{said} ({_place(error, code)})".encode("utf-8", "backslashreplace").decode()


def _place(error: BaseException, code: CodeType) -> str:
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [frame for frame in frames if frame[0] == code.co_filename]
    file, line = own[-1] if own else (code.co_filename, code.co_firstlineno)
    return f"{os.path.basename(file)}:{line}"  # noqa: PTH119


def _checked_float(value: Any) -> float:
    if value.__class__ is not float:
        value = _scalar(value)
        if not isinstance(value, int | float):
            raise Unscored(f"returned {_shown(value)}, which is no number; return a float, or None to skip")
        try:
            value = float(value)
        except OverflowError:
            value = math.inf
    if not math.isfinite(value):
        raise Unscored(f"returned {value}; return a finite number, or None to skip")
    return value  # type: ignore[no-any-return]


def _checked_int(value: Any) -> int:
    value = _scalar(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise Unscored(f"returned {_shown(value)}, which is no int; return an int, or annotate it otherwise")
    if value not in _INT64:
        raise Unscored(f"returned {_shown(value)}, which does not fit 64 bits; return a smaller number")
    return value


def _checked_kind(value: Any, kind: type) -> Any:
    value = _scalar(value)
    if not isinstance(value, kind):
        raise Unscored(f"returned {_shown(value)}, which is no {kind.__name__}; return one, or None to skip")
    return value


def _checked_text(value: Any) -> str:
    text: str = _checked_kind(value, str)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Unscored("returned text that UTF-8 cannot hold; remove lone surrogates") from None
    return text


def _checked_numbers(value: Any) -> bytes:
    """Numbers of one row as the bytes of float32."""
    if value is None:
        raise Unscored("skipped (returned None)")
    try:
        with np.errstate(over="ignore"):
            numbers = np.asarray(value, np.float32)
    except (TypeError, ValueError, OverflowError):
        raise Unscored(f"returned {_shown(value)}, which is no array of numbers; return one") from None
    if numbers.ndim != 1:
        raise Unscored(f"returned an array of shape {numbers.shape}; return one number for each token")
    if not np.isfinite(numbers).all():
        raise Unscored("returned an array with NaN or infinity; return finite numbers, or None to skip")
    return numbers.tobytes()


def _scalar(value: Any) -> Any:
    """Numpy's and torch's numbers as Python's; None is a skip."""
    if value is None:
        raise Unscored("skipped (returned None)")
    if not isinstance(value, int | float | str | list) and hasattr(value, "item"):
        try:
            return value.item()
        except (TypeError, ValueError, RuntimeError):
            return value
    return value


def _shown(value: Any) -> str:
    try:
        text = " ".join(repr(value).split())
    except Exception:
        text = "a value"
    text = text if len(text) <= 60 else text[:59] + "…"
    return f"{text} ({type(value).__name__})".encode("utf-8", "backslashreplace").decode()


def _is_single(value: Any) -> bool:
    return getattr(value, "ndim", 1) == 0


def _numbers(column: pa.Array) -> AnyArray:
    if column.null_count:
        column = column.cast(pa.float64())
    return column.to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]


def _present(column: pa.Array) -> Sequence[bool]:
    return column.is_valid().to_pylist() if column.null_count else [True] * len(column)


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def _is_ragged(column: pa.Array) -> bool:
    return bool(pa.types.is_list(column.type) and _is_number(column.type.value_type))


def _wants_list(annotation: Any) -> bool:
    return getattr(annotation, "__origin__", None) is list or annotation is list
