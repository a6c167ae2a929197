"""Rows become calls of a scorer's function, and its results a column; both travel as bytes between
two processes.
"""

import asyncio
import itertools
import math
import os
import random
import struct
import time
import traceback
from collections.abc import Callable, Mapping, Sequence, Set
from types import CodeType
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dataflow.errors import WorldFailed
from dataflow.records import AnyArray
from dataflow.scoring.calls import Call
from dataflow.scoring.failure import RAISED, UNUSABLE, WORLD
from dataflow.scoring.signature import NOTED, Noted
from dataflow.system.text import sound

if TYPE_CHECKING:
    from dataflow.scorer import Scorer


# Repeats calls where the world failed: how often, and after which pause.

WORLD_ERRORS: tuple[type[BaseException], ...] = (WorldFailed, ConnectionError, TimeoutError)
"""Errors that mean that something outside failed, whatever a scorer adds to them."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0


def pause_s(attempt: int, error: BaseException, share: float) -> float:
    """Seconds before a call is made again: as long as the error asks, else twice as long each time.

    attempt: calls made before this one failed. share: from 0 to 1, so that callers that failed
    together do not return together.

    >>> [pause_s(attempt, TimeoutError(), share=1.0) for attempt in range(8)]
    [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    >>> pause_s(0, WorldFailed("busy", after_s=3.0), share=0.0)
    3.0
    """
    after_s = getattr(error, "after_s", None)
    if isinstance(after_s, int | float):
        return min(max(0.0, float(after_s)), _LONGEST_PAUSE_S)
    longest: float = min(_FIRST_PAUSE_S * 2**attempt, _LONGEST_PAUSE_S)
    return longest * (0.5 + 0.5 * share)


def retried(
    call: Call,
    retries: int,
    world: tuple[type[BaseException], ...],
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> Call:
    """The same call, made again so often where it raises one of `world`; the limit of a call holds
    for all of them.
    """

    def made(index: int) -> Any:
        for attempt in itertools.count():
            try:
                return call(index)
            except world as error:
                if attempt == retries:
                    raise
                sleep(pause_s(attempt, error, random.random()))
        raise AssertionError("counting does not end")

    return made


def retried_async(call: Call, retries: int, world: tuple[type[BaseException], ...]) -> Call:
    """The same for a call that returns a coroutine."""

    async def made(index: int) -> Any:
        for attempt in itertools.count():
            try:
                return await call(index)
            except world as error:
                if attempt == retries:
                    raise
                pause = pause_s(attempt, error, random.random())
            await asyncio.sleep(pause)
        raise AssertionError("counting does not end")

    return made


# What a scorer's function may return, and how its exceptions are described.

_LONGEST_ERROR = 500
_INT64 = range(-(2**63), 2**63)
Check = Callable[[Any], Any]


class Unscored(Exception):
    """A call that gave no usable score; its text is what the row records."""


def checker(output: pa.DataType) -> Check:
    """What turns a returned value into one that can be stored; it raises Unscored for any other."""
    if output == NOTED:
        return _checked_noted
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
    return lambda value: [item(part) for part in _checked_kind(value, list)]


def applying(check: Check, may_not_apply: bool) -> Check:
    """The same check, which also takes None where a function may say so that it does not apply."""
    return (lambda value: None if value is None else check(value)) if may_not_apply else check


def describe(
    error: BaseException, code: CodeType, world: tuple[type[BaseException], ...] = WORLD_ERRORS
) -> str:
    """An exception as its cause and one line with the place in the function's file where it came
    from.
    """
    if isinstance(error, Unscored):
        return f"{UNUSABLE}: {error}"
    try:
        text = " ".join(str(error).split())
    except Exception as second:
        text = f"its message cannot be read: {type(second).__name__}"
    if len(text) > _LONGEST_ERROR:
        text = text[: _LONGEST_ERROR - 1] + "…"
    described = f"{type(error).__name__}: {text}" if text else type(error).__name__
    cause = WORLD if isinstance(error, world) else RAISED
    return f"{cause}: {described} ({_place(error, code)})".encode(
        "utf-8", "backslashreplace"
    ).decode()


def _place(error: BaseException, code: CodeType) -> str:
    frames = [
        (frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    own = [frame for frame in frames if frame[0] == code.co_filename]
    file, line = own[-1] if own else (code.co_filename, code.co_firstlineno)
    return f"{os.path.basename(file)}:{line}"  # noqa: PTH119


def _checked_float(value: Any) -> float:
    if value.__class__ is not float:
        value = _scalar(value)
        if not isinstance(value, int | float):
            raise Unscored(
                f"returned {shown(value)}, which is no number; return a float, or None where it"
                " does not apply"
            )
        try:
            value = float(value)
        except OverflowError:
            value = math.inf
    if not math.isfinite(value):
        raise Unscored(f"returned {value}; return a finite number, or None where it does not apply")
    return value  # type: ignore[no-any-return]


def _checked_noted(value: Any) -> dict[str, Any]:
    if not isinstance(value, Noted):
        raise Unscored(f"returned {shown(value)}, which is not Noted(value, note); return one")
    return {
        "value": None if value.value is None else _checked_float(value.value),
        "note": None if value.note is None else _checked_text(value.note),
    }


def _checked_int(value: Any) -> int:
    value = _scalar(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise Unscored(
            f"returned {shown(value)}, which is no int; return an int, or annotate it otherwise"
        )
    if value not in _INT64:
        raise Unscored(
            f"returned {shown(value)}, which does not fit 64 bits; return a smaller number"
        )
    return value


def _checked_kind(value: Any, kind: type) -> Any:
    value = _scalar(value)
    if not isinstance(value, kind):
        raise Unscored(f"returned {shown(value)}, which is no {kind.__name__}; return one")
    return value


def _checked_text(value: Any) -> str:
    text: str = sound(_checked_kind(value, str))
    return text


def _checked_numbers(value: Any) -> bytes:
    """Numbers of one row as the bytes of float32."""
    try:
        with np.errstate(over="ignore"):
            numbers = np.asarray(value, np.float32)
    except (TypeError, ValueError, OverflowError):
        raise Unscored(
            f"returned {shown(value)}, which is no array of numbers; return one"
        ) from None
    if numbers.ndim != 1:
        raise Unscored(
            f"returned an array of shape {numbers.shape}; return one number for each token"
        )
    if not np.isfinite(numbers).all():
        raise Unscored(
            "returned an array with NaN or infinity; return finite numbers, or None where it does"
            " not apply"
        )
    return numbers.tobytes()


def _scalar(value: Any) -> Any:
    """Numpy's and torch's numbers as Python's."""
    if not isinstance(value, int | float | str | list) and hasattr(value, "item"):
        try:
            return value.item()
        except (TypeError, ValueError, RuntimeError):
            return value
    return value


def shown(value: Any) -> str:
    """A value in a few letters, for an error."""
    try:
        text = " ".join(repr(value).split())
    except Exception:
        text = "a value"
    text = text if len(text) <= 60 else text[:59] + "…"
    return f"{text} ({type(value).__name__})".encode("utf-8", "backslashreplace").decode()


# Rows become calls, and their results a column.

_COUNT = struct.Struct("<I")


def encode(rows: pa.RecordBatch, starts: AnyArray, per: str, start: int, stop: int) -> bytes:
    """Calls start to stop: the number of rows of each (none when called per row), then Arrow
    IPC.
    """
    sizes = (
        np.empty(0, np.int32)
        if per == "row"
        else np.diff(starts[start : stop + 1]).astype(np.int32)
    )
    first, last = int(starts[start]), int(starts[stop])
    sink = pa.BufferOutputStream()
    sink.write(_COUNT.pack(len(sizes)) + sizes.tobytes())
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_batch(rows.slice(first, last - first))
    return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]


def prepare(scorer: "Scorer[..., Any]", payload: bytes) -> Call:
    """The function that makes call number i of a payload, again where its world failed."""
    (count,) = _COUNT.unpack_from(payload)
    head = _COUNT.size + 4 * count
    sizes = np.frombuffer(payload, np.int32, count, _COUNT.size)
    rows = pa.ipc.open_stream(pa.py_buffer(memoryview(payload)[head:])).read_next_batch()
    if scorer.per == "row":
        call = _row_call(scorer, rows)
    else:
        call = _rows_call(scorer, rows, np.concatenate([[0], np.cumsum(sizes)]))
    if not scorer.isolate or not scorer.retries:
        return call
    again = retried_async if scorer.signature.is_async else retried
    return again(call, scorer.retries, (*WORLD_ERRORS, *scorer.world))


def pack(scorer: "Scorer[..., Any]", values: list[Any]) -> bytes:
    """The scores of several calls, row by row: a column, and failures of rows in calls with
    several.
    """
    if scorer.per == "row":
        columns = [score_column(values, scorer.output)]
    else:
        errors = [failures.get(row) for checked, failures in values for row in range(len(checked))]
        flat = [value for checked, _ in values for value in checked]
        columns = [score_column(flat, scorer.output), pa.array(errors, pa.string())]
    return pa.record_batch(columns, _packed(scorer)).serialize().to_pybytes()  # type: ignore[no-any-return]


def unpack(scorer: "Scorer[..., Any]", body: bytes) -> tuple[pa.Array, dict[int, str]]:
    """Reads what `pack` wrote: the column, and failures by row."""
    rows = pa.ipc.read_record_batch(pa.py_buffer(body), _packed(scorer))
    if scorer.per == "row" or rows.column(1).null_count == rows.num_rows:
        return rows.column(0), {}
    return rows.column(0), {
        row: text for row, text in enumerate(rows.column(1).to_pylist()) if text is not None
    }


def _packed(scorer: "Scorer[..., Any]") -> pa.Schema:
    both = [pa.field("value", scorer.output), pa.field("error", pa.string())]
    return pa.schema(both[:1] if scorer.per == "row" else both)


def _row_call(scorer: "Scorer[..., Any]", rows: pa.RecordBatch) -> Call:
    function, knobs, check = scorer.function, dict(scorer.given_knobs), _check(scorer)
    names = rows.schema.names
    columns = [
        row_arguments(rows.column(name), scorer.signature.annotations.get(name)) for name in names
    ]

    def arguments(index: int) -> dict[str, Any]:
        return {name: column[index] for name, column in zip(names, columns, strict=True)}

    if scorer.signature.is_async:

        async def call_async(index: int) -> Any:
            return check(await function(**arguments(index), **knobs))

        return call_async
    return lambda index: check(function(**arguments(index), **knobs))


def _check(scorer: "Scorer[..., Any]") -> Check:
    return applying(checker(scorer.output), scorer.may_not_apply)


def _rows_call(scorer: "Scorer[..., Any]", rows: pa.RecordBatch, starts: AnyArray) -> Call:
    function, knobs, check = scorer.function, dict(scorer.given_knobs), _check(scorer)
    annotations = scorer.signature.annotations

    def arguments(index: int) -> dict[str, Any]:
        size = int(starts[index + 1] - starts[index])
        group = rows.slice(int(starts[index]), size)
        return {
            name: rows_argument(group.column(name), annotations.get(name))
            for name in rows.schema.names
        }

    def values(index: int, returned: Any) -> Any:
        size = int(starts[index + 1] - starts[index])
        return rows_values(returned, size, check, scorer.signature.is_broadcast)

    if scorer.signature.is_async:

        async def call_async(index: int) -> Any:
            return values(index, await function(**arguments(index), **knobs))

        return call_async
    return lambda index: values(index, function(**arguments(index), **knobs))


def row_arguments(column: pa.Array, annotation: Any) -> list[Any]:
    """One plain value for each row: lists of numbers as numpy arrays, unless annotated as
    list[...].
    """
    if _is_ragged(column) and not _wants_list(annotation):
        flat = _numbers(column.values).copy()
        offsets, present = column.offsets.to_numpy(), _present(column)
        return [
            flat[start:stop] if is_there else None
            for start, stop, is_there in zip(offsets[:-1], offsets[1:], present, strict=True)
        ]
    return column.to_pylist()  # type: ignore[no-any-return]


def rows_argument(column: pa.Array, annotation: Any) -> Any:
    """Several rows at once: a numpy array of numbers (null as NaN), a list of anything else."""
    if _is_number(column.type) and not _wants_list(annotation):
        return _numbers(column).copy()
    item = annotation.__args__[0] if _wants_list(annotation) and annotation.__args__ else None
    return row_arguments(column, item)


def rows_values(
    returned: Any, rows: int, check: Check, is_broadcast: bool
) -> tuple[list[Any], dict[int, str]]:
    """One value for each of several rows, and failures by row."""
    if is_broadcast or returned is None:
        return [check(returned)] * rows, {}
    values = listed(returned, rows)
    checked: list[Any] = []
    failures: dict[int, str] = {}
    for row, value in enumerate(values):
        try:
            checked.append(check(value))
        except Unscored as error:
            checked.append(None)
            failures[row] = f"{UNUSABLE}: {error}"
    return checked, failures


def listed(returned: Any, rows: int) -> Sequence[Any]:
    """The returned values, one for each row in order; Unscored for anything else."""
    is_flat = isinstance(returned, np.ndarray) and returned.ndim == 1
    values = returned.tolist() if is_flat else returned
    if (
        not hasattr(values, "__len__")
        or isinstance(values, str | bytes | Mapping | Set)
        or _is_single(values)
    ):
        raise Unscored(f"returned {shown(returned)} for {rows} rows; return one value for each")
    if len(values) != rows:
        raise Unscored(f"returned {len(values)} values for {rows} rows; return one for each")
    return values  # type: ignore[no-any-return]


def score_column(values: Sequence[Any], output: pa.DataType) -> pa.Array:
    """Checked values (None: it does not apply, or failed) as a column."""
    if not (pa.types.is_list(output) and output.value_type == pa.float32()):
        return pa.array(values, type=output)
    missing = np.array([value is None for value in values], bool)
    offsets = np.zeros(len(values) + 1, np.int32)
    np.cumsum([0 if value is None else len(value) // 4 for value in values], out=offsets[1:])
    flat = np.frombuffer(b"".join(value for value in values if value is not None), np.float32)
    return pa.ListArray.from_arrays(
        pa.array(offsets),
        pa.array(flat),
        type=output,
        mask=pa.array(missing) if missing.any() else None,
    )


def error_column(errors: pa.Array, failures: Mapping[int, str]) -> pa.Array:
    """The column of errors with those of some rows set."""
    if not failures:
        return errors
    rows = sorted(failures)
    mask = np.zeros(len(errors), bool)
    mask[rows] = True
    texts = pa.array([failures[row] for row in rows], pa.string())
    return pc.replace_with_mask(errors, pa.array(mask), texts)


def _is_single(value: Any) -> bool:
    return getattr(value, "ndim", 1) == 0


def _numbers(column: pa.Array) -> AnyArray:
    if column.null_count:
        column = column.cast(pa.float64())
    return column.to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]


def _present(column: pa.Array) -> Sequence[bool]:
    return column.is_valid().to_pylist() if column.null_count else [True] * len(column)


def _is_number(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    )


def _is_ragged(column: pa.Array) -> bool:
    return bool(pa.types.is_list(column.type) and _is_number(column.type.value_type))


def _wants_list(annotation: Any) -> bool:
    return getattr(annotation, "__origin__", None) is list or annotation is list
