"""A message taken apart, and put together as nobody would send it."""

from typing import Any

import msgpack


def opened(message: bytes) -> list[Any]:
    """Its protocol with the version, its kind, its fields."""
    unpacker = msgpack.Unpacker(strict_map_key=False)
    unpacker.feed(message)
    protocol, fields = unpacker
    return [protocol, fields.pop("type"), fields]


def closed(plain: Any) -> bytes:
    """The message of such three; of anything else what MessagePack makes of it."""
    match plain:
        case [protocol, kind, dict(fields)]:
            return b"".join(map(msgpack.packb, (protocol, {"type": kind, **fields})))
        case [protocol, fields]:
            return b"".join(map(msgpack.packb, (protocol, fields)))
    return msgpack.packb(plain)  # type: ignore[no-any-return]
