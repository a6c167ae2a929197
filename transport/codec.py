"""Messages: frozen dataclasses as MessagePack and back, the protocol and its version in front,
every field checked.
"""

from __future__ import annotations

from typing import Any, Generic, NoReturn, TypeVar

import msgpack

from transport.errors import MessageError
from transport.forms import SHOWN, Misfit, Natural, Plain, record, shown

__all__ = ["MESSAGE_BYTES", "Codec", "MessageError", "Natural", "Plain"]

MESSAGE_BYTES = 64 << 20
"""The largest message, where a protocol does not name its own bound."""

M = TypeVar("M")


class Codec(Generic[M]):
    """The messages of one protocol: `encode` on one side, `decode` on the other.

    A message travels as `["protocol/version", "Class", {field: value}]`. Its class is a frozen
    dataclass; its fields are of the types None, bool, int, float, str, bytes, `Natural`, Literal,
    an enum (by its member's name), tuple, NamedTuple, list, Sequence (a tuple at the other end),
    dict, Mapping, `Plain`, another frozen dataclass, or unions of these.
    The version is to be raised when a field means something else than before.

        @dataclass(frozen=True)
        class Ping:
            number: int

        codec = Codec("example", 1, Ping)
        assert codec.decode(codec.encode(Ping(3))) == Ping(3)
    """

    def __init__(
        self, protocol: str, version: int, *kinds: type[M], max_bytes: int = MESSAGE_BYTES
    ) -> None:
        """kinds: the classes of the messages; max_bytes: of one message, on both sides."""
        self._tag, self.max_bytes = f"{protocol}/{version}", max_bytes
        forms = {kind: record(kind) for kind in kinds}
        self._lower = {kind: (self._prefix(kind), form.lower) for kind, form in forms.items()}
        self._lift = {kind.__name__: form.lift for kind, form in forms.items()}
        assert len(self._lift) == len(kinds), f"two messages of {self._tag} have one name"

    def encode(self, message: M) -> bytes:
        """The message's bytes. Raises MessageError where they are too many, or a value is one that
        cannot travel.
        """
        prefix, lower = self._lower[type(message)]
        assert lower is not None, "a dataclass travels as a map"
        try:
            packed: bytes = prefix + msgpack.packb(lower(message))
        except (TypeError, ValueError, OverflowError, AttributeError, KeyError) as error:
            raise MessageError(
                f"a message '{type(message).__name__}' of {self._tag} cannot be sent; "
                f"found {shown(message)} ({error}); "
                f"give its fields values of their types"
            ) from error
        if len(packed) > self.max_bytes:
            self._too_large(len(packed))
        return packed

    def is_a(self, kind: type[M], data: bytes) -> bool:
        """Whether these bytes begin as a message of this kind does; nothing else of them is
        read.
        """
        return data.startswith(self._lower[kind][0])

    def decode(self, data: Any) -> M:
        """The message that `encode` made bytes of. Raises MessageError for anything else."""
        if len(data) > self.max_bytes:
            self._too_large(len(data))
        try:
            found = msgpack.unpackb(data, strict_map_key=False)
        except (
            ValueError,
            TypeError,
            RecursionError,
            MemoryError,
            msgpack.UnpackException,
        ) as error:
            self._refuse(f"cannot be read; found {bytes(data[:SHOWN])!r} ({error})")
        if (
            type(found) is not list
            or len(found) != 3
            or type(found[0]) is not str
            or type(found[1]) is not str
        ):
            self._refuse(f"cannot be read; found {shown(found)}")
        tag, name, plain = found
        if tag != self._tag:
            self._refuse(f"is of another protocol or version; found {shown(tag)}")
        if name not in self._lift:
            self._refuse(
                f"has an unknown kind; found {shown(name)}, known are {', '.join(self._lift)}"
            )
        try:
            message: M = self._lift[name](plain)
        except Misfit as misfit:
            where = ".".join([name, *reversed(misfit.path)])
            self._refuse(f"does not fit, '{where}' should be {misfit.wanted}; found {misfit.found}")
        return message

    def _prefix(self, kind: type[M]) -> bytes:
        """A list of three without its last member."""
        return msgpack.packb((self._tag, kind.__name__, None))[:-1]  # type: ignore[no-any-return]

    def _too_large(self, size: int) -> NoReturn:
        self._refuse(
            f"is too large; found {size} bytes, the bound is {self.max_bytes}", "send less at once"
        )

    def _refuse(self, what: str, do: str = "run the same release on both sides") -> NoReturn:
        raise MessageError(f"a message of {self._tag} {what}; {do}") from None
