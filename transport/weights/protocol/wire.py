"""Words of a handshake, frozen dataclasses, as msgpack: {"kind": the class's name, its fields}."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

import msgpack

from transport.weights.errors import MessageError

W = TypeVar("W")

_TYPES = {
    "int": int, "str": str, "bool": bool, "bytes": bytes, "list[int]": list, "dict[str, Any]": dict, "Note": dict,
}  # fmt: skip


def kinds(*words: type[W]) -> dict[str, type[W]]:
    """The words of one handshake by the name under which they travel."""
    return {word.__name__.lower(): word for word in words}


def pack(word: Any) -> bytes:
    """The word's bytes."""
    packed: bytes = msgpack.packb({"kind": type(word).__name__.lower(), **vars(word)})
    return packed


def unpack(payload: bytes, known: Mapping[str, type[W]], what: str) -> W:
    """The word that `pack` wrote; anything else is a MessageError that calls it `what`."""
    try:
        plain = msgpack.unpackb(payload)
        kind = known[plain.pop("kind")]
        word = kind(**plain)
        for part in fields(kind):  # type: ignore[arg-type]
            value = getattr(word, part.name)
            if type(value) is not _TYPES[str(part.type)]:
                raise TypeError(f"{part.name} is {type(value).__name__}, not {part.type}")
    except (ValueError, KeyError, TypeError, AttributeError, msgpack.UnpackException) as error:
        raise MessageError(
            f"{what} cannot be read; found {payload[:40]!r} ({error}); writer and readers must run the same release"
        ) from None
    return word
