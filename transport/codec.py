"""Messages: classes checked by msgspec, as MessagePack; the protocol and its version stand in
front.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Generic, NoReturn, TypeAlias, TypeVar, Union, dataclass_transform

import msgspec
import numpy as np
from msgspec import field

from transport.errors import MessageError

__all__ = [
    "MESSAGE_BYTES",
    "Codec",
    "Message",
    "MessageError",
    "Natural",
    "Plain",
    "Secret",
    "field",
]

MESSAGE_BYTES = 64 << 20
"""The largest message, where a protocol does not name its own bound."""
Natural = Annotated[int, msgspec.Meta(ge=0)]
"""A whole number that is not negative."""
Plain: TypeAlias = Any
"""None, numbers, text, bytes, and lists and maps of them; what they mean is for the reader of the
field to check."""

_SHOWN = 60
"""Bytes of a message that an error shows."""
_NUMBERS = re.compile(r"[<>|][biufc][0-9]{1,2}")
"""What numpy calls the types of arrays that travel."""


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """A class of messages, or of what stands in one; the annotations of its fields are checked
    where it arrives. Unions tell such classes apart by their names.
    """


class Secret(Message):
    """A message that no log may show."""

    def __repr__(self) -> str:
        return type(self).__name__


M = TypeVar("M")


class Codec(Generic[M]):
    """The messages of one protocol: `encode` on one side, `decode` on the other.

    A message travels as "protocol/version" and, behind that, the map of its fields with the name
    of its class as `type`. A field has a type that msgspec knows: other messages and frozen
    dataclasses among them, and arrays of numpy, which arrive writable.
    The version is to be raised when a field means something else than before.

        class Ping(Message):
            number: int

        codec = Codec("example", 1, Ping)
        assert codec.decode(codec.encode(Ping(3))) == Ping(3)
    """

    def __init__(
        self, protocol: str, version: int, *kinds: type[M], max_bytes: int = MESSAGE_BYTES
    ) -> None:
        """kinds: the classes of the messages; max_bytes: of one message, on both sides."""
        self._tag, self.max_bytes = f"{protocol}/{version}", max_bytes
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_lowered)
        self._decoder = msgspec.msgpack.Decoder(
            Union[kinds],  # noqa: UP007
            dec_hook=_lifted,
            ext_hook=_refuse_extension,
        )
        self._head = self._encoder.encode(self._tag)

    def encode(self, message: M) -> bytes:
        """The message's bytes. Raises MessageError where they are too many, or a value is one that
        cannot travel.
        """
        try:
            packed = self._head + self._encoder.encode(message)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise MessageError(
                f"a message '{type(message).__name__}' of {self._tag} cannot be sent; "
                f"found {error}; give its fields values of their types"
            ) from error
        if len(packed) > self.max_bytes:
            self._too_large(len(packed))
        return packed

    def is_a(self, kind: type[Message], data: bytes) -> bool:
        """Whether these bytes begin as a message of this kind does; nothing else of them is
        read.
        """
        name = self._encoder.encode({"type": kind.__name__})[1:]
        return data.startswith(self._head + _map_head(kind) + name)

    def decode(self, data: Any) -> M:
        """The message that `encode` made bytes of. Raises MessageError for anything else."""
        if len(data) > self.max_bytes:
            self._too_large(len(data))
        view = memoryview(data)
        size = len(self._head)
        if view[:size] != self._head:
            self._refuse(f"is of another protocol or version; found {bytes(view[:_SHOWN])!r}")
        try:
            message: M = self._decoder.decode(view[size:])
        except (ValueError, TypeError, OverflowError, RecursionError, MemoryError) as error:
            self._refuse(f"does not fit; found: {error}")
        head = _map_head(type(message))
        if view[size : size + len(head)] != head:
            self._refuse(
                f"does not fit; found: a '{type(message).__name__}' without all its fields"
            )
        return message

    def _too_large(self, size: int) -> NoReturn:
        self._refuse(
            f"is too large; found {size} bytes, the bound is {self.max_bytes}", "send less at once"
        )

    def _refuse(self, what: str, do: str = "run the same release on both sides") -> NoReturn:
        raise MessageError(f"a message of {self._tag} {what}; {do}") from None


def _map_head(kind: type[Any]) -> bytes:
    """How the map of a message of this kind begins: a field has to travel, be it its default."""
    size = 1 + len(kind.__struct_fields__)
    return bytes([0x80 | size]) if size < 16 else b"\xde" + size.to_bytes(2, "big")


def _lowered(value: Any) -> Any:
    """What travels for a value that msgspec does not know."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, np.ascontiguousarray(value).data
    if isinstance(value, np.generic):
        return value.item()
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Collection):
        return list(value)
    raise TypeError(f"a value of type {type(value).__name__}")


def _lifted(kind: Any, value: Any) -> Any:
    """The array that `_lowered` made a value of."""
    if (getattr(kind, "__origin__", kind)) is not np.ndarray:
        raise TypeError(f"no message carries values of type {kind}")
    dtype, shape, data = value
    if type(data) is not bytes or type(dtype) is not str or not _NUMBERS.fullmatch(dtype):
        raise ValueError("Expected an array")
    return np.frombuffer(data, dtype).reshape(shape).copy()


def _refuse_extension(code: int, data: memoryview) -> NoReturn:
    raise ValueError(f"Expected a plain value, got an extension of code {code}")
