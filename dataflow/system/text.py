"""Text and JSON that come from outside a run: what UTF-8 and JSON hold, as all files and messages
here do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")

MOST_DEEP = 128
"""Values within each other: far below where reading one as JSON works, and writing it does not."""


def sound(value: T) -> T:
    """A text, or the texts in a value of JSON's types, with U+FFFD for each half of a character
    that stands alone: such a half is what Python makes of a byte that it cannot decode, and no
    tokenizer takes it.

    >>> sound("caf\\udce9")
    'caf\ufffd'
    >>> sound({"a": ["\\ud83d\\ude00", 1.5]}) == {"a": ["\\N{GRINNING FACE}", 1.5]}
    True
    """
    result: Any = value
    if isinstance(value, str) and not is_sound(value):
        result = value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    elif isinstance(value, Mapping):
        result = {sound(key): sound(item) for key, item in value.items()}
    elif isinstance(value, list | tuple):
        result = [sound(item) for item in value]
    return result  # type: ignore[no-any-return]


def is_sound(value: Any) -> bool:
    """Whether `sound` has nothing to do: UTF-8 holds every text in it."""
    if isinstance(value, str):
        try:
            return value.isascii() or bool(value.encode())
        except UnicodeEncodeError:
            return False
    if isinstance(value, Mapping):
        return all(is_sound(key) and is_sound(item) for key, item in value.items())
    return not isinstance(value, list | tuple) or all(map(is_sound, value))


def strict_json(value: Any) -> str:
    """A value as JSON that every reader takes. Raises ValueError for half of a character, NaN and
    infinities, and for what nests too deep; TypeError for what is no value of JSON's.

    >>> strict_json({"a": "é"})
    '{"a": "é"}'
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
        too_deep = text.count("[") + text.count("{") > MOST_DEEP and not _fits(value, MOST_DEEP)
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise ValueError(
            f"it has {half} alone, half of a character that needs two; leave it out"
        ) from error
    except RecursionError:
        too_deep = True
    if too_deep:
        raise ValueError(f"its brackets nest too deep, more than {MOST_DEEP} times")
    return text


def _fits(value: Any, depth: int) -> bool:
    """Whether no more values than these are within each other."""
    inner = (
        value.values()
        if isinstance(value, dict)
        else value
        if isinstance(value, list | tuple)
        else ()
    )
    return depth >= 0 and all(_fits(item, depth - 1) for item in inner)
