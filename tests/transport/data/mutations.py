"""Frames that nobody sent: what a bad cable, a buggy peer or a liar could make of genuine ones."""

from typing import Any

import msgpack
import numpy as np
import pyarrow as pa
import xxhash
from opened import closed, opened

from transport.data.messages import SEAL_BYTES

Parts = list[bytes]
"""A message as it travels: a header, and a body where it is a Data."""

_EXTREMES = (0, 1, -1, 2**31 - 1, -(2**31), 2**32 - 1, 2**62, 2**63 - 1, -(2**63))
_VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    2**64 - 1,
    2**62,
    0.5,
    float("nan"),
    "",
    "x" * 5000,
    b"",
    b"\xff" * 5000,
    [],
    [-1],
    [2**63] * 9,
    [[[[[[]]]]]],
    {},
    {"a": 1},
    msgpack.Timestamp(1, 1),
    msgpack.ExtType(5, b"\0" * 9),
)


def fields_of(header: bytes) -> dict[str, Any]:
    """What stands in a header: its kind and its fields."""
    _, kind, fields = opened(header[:-SEAL_BYTES])
    return {"kind": kind, **fields}


def sealed(packed: bytes) -> bytes:
    """Bytes with a right seal."""
    return packed + xxhash.xxh3_64_digest(packed)


def header(**fields: Any) -> bytes:
    """A header with a right seal."""
    return sealed(packed(fields))


def packed(fields: dict[str, Any]) -> bytes:
    """A header without its seal."""
    rest = {name: value for name, value in fields.items() if name != "kind"}
    return closed(["data/2", fields.get("kind"), rest])


class Mutator:
    """Mutates messages, the same way for the same seed."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def chance(self, share: float) -> bool:
        """True in so many of all cases."""
        return bool(self.rng.random() < share)

    def pick(self, choices: Any) -> Any:
        """One of them."""
        return choices[int(self.rng.integers(len(choices)))]

    def damaged(self, parts: Parts, others: list[Parts]) -> Parts:
        """What is no genuine message any more, and carries the seal and checksum of one."""
        while (found := self._damaged(list(parts), others)) in [parts, *others] or not found:
            pass
        return found

    def _damaged(self, parts: Parts, others: list[Parts]) -> Parts:
        at = int(self.rng.integers(len(parts)))
        match int(self.rng.integers(7)):
            case 0:
                parts[at] = self.flipped(parts[at])
            case 1:
                parts[at] = parts[at][: int(self.rng.integers(len(parts[at])))]
            case 2:
                other = self.pick(others)[at % len(self.pick(others))]
                cut = int(self.rng.integers(min(len(parts[at]), len(other)) + 1))
                parts[at] = parts[at][:cut] + other[cut:]
            case 3:
                parts[at] = self.patched(parts[at])
            case 4:
                parts.insert(at, self.pick([b"", b"\0" * 40, *parts]))
            case 5:
                parts.pop(at)
            case _:
                parts[at] = self.rng.bytes(int(self.rng.integers(400)))
        return parts

    def flipped(self, data: bytes) -> bytes:
        """Up to eight bits the other way."""
        bits = np.frombuffer(data, np.uint8).copy()
        for place in self.rng.integers(len(bits), size=int(self.rng.integers(1, 9))):
            bits[place] ^= np.uint8(1 << int(self.rng.integers(8)))
        return bits.tobytes()

    def patched(self, data: bytes) -> bytes:
        """Up to four words overwritten: lengths, offsets, counts, declared sizes."""
        changed = bytearray(data)
        for _ in range(int(self.rng.integers(1, 5))):
            size = self.pick((1, 2, 4, 8))
            if len(data) >= size:
                place = int(self.rng.integers(len(data) // size)) * size
                word = self.pick(_EXTREMES) % (1 << 8 * size)
                changed[place : place + size] = word.to_bytes(size, "little")
        return bytes(changed)

    def forged_body(self, body: bytes, others: list[bytes]) -> bytes:
        """A body that its sender may seal as its own."""
        match int(self.rng.integers(7)):
            case 0:
                return self.flipped(body)
            case 1:
                return body[: int(self.rng.integers(1, len(body)))]
            case 2:
                other = self.pick(others)
                cut = int(self.rng.integers(min(len(body), len(other)))) // 8 * 8
                return body[:cut] + other[cut:]
            case 3:
                return body + self.pick(others)
            case 4:
                return self.bomb(body)
            case _:
                return self.patched(body)

    def bomb(self, body: bytes) -> bytes:
        """The same rows, compressed: few bytes that ask for any number of them."""
        reader = pa.ipc.open_stream(pa.py_buffer(body))
        sink = pa.BufferOutputStream()
        options = pa.ipc.IpcWriteOptions(compression=self.pick(("lz4", "zstd")))
        with pa.ipc.new_stream(sink, reader.schema, options=options) as writer:
            writer.write_batch(reader.read_next_batch())
        found: bytes = sink.getvalue().to_pybytes()
        return found if self.chance(0.5) else self.patched(found)

    def forged_header(self, fields: dict[str, Any], *, keep: tuple[str, ...] = ()) -> bytes:
        """A header with a right seal whose fields are not: types, sizes, kinds, names; `keep` names
        those that stay.
        """
        fields = dict(fields)
        free = [name for name in fields if name not in keep]
        match int(self.rng.integers(6)):
            case 0:
                fields.pop(self.pick(free))
            case 1:
                fields[self.pick(("extra", "", "life2"))] = self.pick(_VALUES)
            case 2 if "kind" in free:
                fields["kind"] = self.pick(
                    ("Hello", "Data", "Welcome", "Ack", "Refused", "__class__", "", 7, None)
                )
            case 3:
                return sealed(self.patched(packed({name: fields[name] for name in free})))
            case _:
                fields[self.pick(free)] = self.pick(_VALUES)
        return header(**fields)
