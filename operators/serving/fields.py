"""Fields of a call's JSON, of the kind and in the range that they have to be; ApiError (400) for
others."""

from __future__ import annotations

import math
import reprlib
import sys
from collections.abc import Mapping
from typing import Any

from operators.serving.errors import bad

_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxother = _BRIEF.maxlong = 80


def object_of(given: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A field that holds an object, or an empty one. Raises ApiError."""
    found = given.get(name, {})
    if not isinstance(found, dict):
        raise bad(name, f"'{name}' must be an object; found {shown(found)}; mend it")
    return found


def text_of(given: Mapping[str, Any], name: str, most: int) -> str:
    """A field that holds a text of at most so many characters. Raises ApiError."""
    found = given.get(name)
    if not isinstance(found, str) or not 0 < len(found) <= most:
        code = "missing_required_parameter" if found is None else "invalid_value"
        raise bad(
            name,
            f"'{name}' must be a text of at most {most} characters; found {shown(found)}; give one",
            code,
        )
    return found


def flag_of(given: Mapping[str, Any], name: str) -> bool:
    """A field that is true or false; false where it is not given. Raises ApiError."""
    found = given.get(name, False)
    if not isinstance(found, bool):
        raise bad(name, f"'{name}' must be true or false; found {shown(found)}; mend it")
    return found


def list_of(where: str, found: Any) -> list[Any]:
    """A list. Raises ApiError."""
    if not isinstance(found, list):
        raise bad(where, f"'{where}' must be a list; found {shown(found)}; mend it")
    return found


def whole_of(
    given: Mapping[str, Any], name: str, default: int | None, *, least: int, most: int | None = None
) -> Any:
    """A field that holds a whole number. Raises ApiError."""
    found = given.get(name, default)
    if type(found) is not int or found < least or (most is not None and found > most):
        upto = "" if most is None else f" and at most {most}"
        raise bad(
            name,
            f"'{name}' must be a whole number of at least {least}{upto}; found {shown(found)};"
            " mend it",
        )
    return found


def number_of(
    given: Mapping[str, Any],
    name: str,
    default: float,
    *,
    least: float = -math.inf,
    above: float = -math.inf,
    most: float = math.inf,
) -> float:
    """A field that holds a finite number. Raises ApiError."""
    found = given.get(name, default)
    fits = (
        isinstance(found, int | float)
        and not isinstance(found, bool)
        and abs(found) <= sys.float_info.max
    )
    if not fits or found < least or found <= above or found > most:
        range_ = f"above {above:g}" if above > -math.inf else f"of at least {least:g}"
        upto = "" if most == math.inf else f" and at most {most:g}"
        raise bad(name, f"'{name}' must be a number {range_}{upto}; found {shown(found)}; mend it")
    return float(found)


def shown(value: Any) -> str:
    """Of a value whatever its size, what fits into a sentence."""
    brief = _BRIEF.repr(value)
    return brief if len(brief) <= 80 else brief[:77] + "..."
