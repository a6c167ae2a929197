"""What a scorer's function may return, and how its exceptions are described."""

import math
import os
import traceback
from collections.abc import Callable
from types import CodeType
from typing import Any

import numpy as np
import pyarrow as pa

from dataflow.scoring.failure import RAISED, UNUSABLE, WORLD
from dataflow.scoring.retrying import WORLD_ERRORS
from dataflow.scoring.signature import NOTED, Noted
from dataflow.system.text import sound

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
