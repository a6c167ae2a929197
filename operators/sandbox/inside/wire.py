"""Plain data as bytes, and frames of bytes through a descriptor: how processes of a sandbox speak
to each other.
"""

from __future__ import annotations

import os
import struct

TYPE_CHECKING = False  # importing `typing` would double the time that a sandbox takes to start
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Keep = Callable[[Any], int]
    Fetch = Callable[[int], Any]

_SIZE = FRAME = struct.Struct("<I")
_FLOAT = struct.Struct("<d")
_COMPLEX = struct.Struct("<dd")
_SERIES: dict[bytes, type] = {b"l": list, b"t": tuple, b"e": set, b"z": frozenset}


def encode(value: Any, keep: Keep) -> bytes:
    """A value as bytes: numbers, text and containers by value, anything else by the number that
    `keep` gives it.
    """
    out = bytearray()
    _write(value, out, keep)
    return bytes(out)


def decode(data: bytes, fetch: Fetch) -> Any:
    """The value of some bytes; never anything but plain data and what `fetch` has for a number.

    Raises ValueError, TypeError, IndexError, KeyError, struct.error or RecursionError for bytes
    that `encode` never writes.
    """
    value, stop = _read(data, 0, fetch)
    if stop != len(data):
        raise ValueError("bytes after the end of a value")
    return value


def write_frame(fd: int, data: bytes) -> None:
    """Write bytes with their length before them."""
    write_all(fd, _SIZE.pack(len(data)) + data)


def write_all(fd: int, data: bytes) -> None:
    """Write bytes, however many the descriptor takes at once."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def read_frame(fd: int) -> bytes:
    """Read what `write_frame` wrote; EOFError where the other end is gone."""
    return read_exactly(fd, _SIZE.unpack(read_exactly(fd, _SIZE.size))[0])


def read_exactly(fd: int, size: int) -> bytes:
    """So many bytes and not one more; EOFError where fewer come."""
    parts: list[bytes] = []
    while size:
        part = os.read(fd, min(size, 1 << 20))
        if not part:
            raise EOFError("the other end is gone")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _write(value: Any, out: bytearray, keep: Keep) -> None:
    if value is None or value is True or value is False:
        out += {None: b"N", True: b"T", False: b"F"}[value]
    elif isinstance(value, int):
        number = int(value)
        _write_bytes(
            b"i", number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True), out
        )
    elif isinstance(value, float):
        out += b"f" + _FLOAT.pack(value)
    elif isinstance(value, complex):
        out += b"c" + _COMPLEX.pack(value.real, value.imag)
    elif isinstance(value, str):
        _write_bytes(b"s", str.encode(value, "utf-8", "surrogatepass"), out)
    elif isinstance(value, bytes | bytearray):
        _write_bytes(b"b", bytes(value), out)
    elif isinstance(value, dict):
        out += b"d" + _SIZE.pack(len(value))
        for key, item in value.items():
            _write(key, out, keep)
            _write(item, out, keep)
    else:
        for tag, kind in _SERIES.items():
            if isinstance(value, kind):
                out += tag + _SIZE.pack(len(value))  # type: ignore[arg-type]
                for item in value:  # type: ignore[attr-defined]
                    _write(item, out, keep)
                return
        out += b"r" + _SIZE.pack(keep(value))


def _write_bytes(tag: bytes, data: bytes, out: bytearray) -> None:
    out += tag + _SIZE.pack(len(data)) + data


def _read(data: bytes, at: int, fetch: Fetch) -> tuple[Any, int]:
    tag, at = data[at : at + 1], at + 1
    if tag in (b"N", b"T", b"F"):
        return {b"N": None, b"T": True, b"F": False}[tag], at
    if tag == b"f":
        return _FLOAT.unpack_from(data, at)[0], at + _FLOAT.size
    if tag == b"c":
        return complex(*_COMPLEX.unpack_from(data, at)), at + _COMPLEX.size
    (size,) = _SIZE.unpack_from(data, at)
    at += _SIZE.size
    if tag == b"r":
        return fetch(size), at
    if tag in (b"i", b"s", b"b"):
        if len(data) < at + size:
            raise ValueError("bytes are missing")
        return _scalar(tag, data[at : at + size]), at + size
    if tag != b"d" and tag not in _SERIES:
        raise ValueError(f"no value begins with {tag!r}")
    items: list[Any] = []
    for _ in range(2 * size if tag == b"d" else size):
        item, at = _read(data, at, fetch)
        items.append(item)
    return dict(zip(items[::2], items[1::2], strict=True)) if tag == b"d" else _SERIES[tag](
        items
    ), at


def _scalar(tag: bytes, data: bytes) -> Any:
    if tag == b"i":
        return int.from_bytes(data, "little", signed=True)
    return data.decode("utf-8", "surrogatepass") if tag == b"s" else data
