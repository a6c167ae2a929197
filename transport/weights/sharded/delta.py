"""What changed between two versions, bit for bit, where sending that is cheaper than sending all.

A delta lists changed units: 16-bit words, or blocks of 64 or 512 bytes, whichever makes it
smallest; scattered changes of bfloat16 weights are words, a row of an embedding is blocks. It
stands on one base, which it names. Both ends gather a message of that version into the same bytes:
its fragments at their offsets, zeros between them.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from transport.errors import MessageError
from transport.native import wordsum
from transport.native.differences import PAGE_WORDS, differences
from transport.weights.errors import ChecksumMismatch, WeightError
from transport.weights.executors.device import TransferDevice
from transport.weights.layout.flat import ALIGNMENT
from transport.weights.sharded.chunks import Chunk, PlaceKey
from transport.weights.sharded.staging import StagedSums, Tensors
from transport.weights.sharded.steps import ChunkMessage, step_of
from transport.weights.sharded.transfer import Outbound

WORD, BLOCK, RUN = 2, 64, 512
"""The units, in bytes."""
MAGIC = b"DFDELTA1"
HEADER = struct.Struct("<8sQQqQQQ")
"""Magic, wordsum of all that follows it, unit, base, the sums of base and result, bytes of the
buffer."""
PROVED = 16
"""Bytes of the header before what its wordsum covers."""


def most_bytes(nbytes: int, link_bytes_per_s: float, scan_bytes_per_s: float) -> int:
    """The size below which a delta is cheaper than the buffer; 0 where the link is as fast as the
    scan.
    """
    return max(0, int(nbytes * (1 - link_bytes_per_s / scan_bytes_per_s)))


@dataclass(frozen=True, kw_only=True, eq=False)
class Delta:
    """The units of one buffer that a version changed."""

    base: int
    """The version that it changes."""
    base_sum: int
    """wordsum of that version's buffer."""
    result: int
    """wordsum of the buffer afterwards."""
    nbytes: int
    """Size of the buffer."""
    unit: int
    """Bytes of a unit: 2, 64 or 512."""
    where: torch.Tensor
    """uint8: which units. A bit for each block, the lowest first; of words int32 per page how many
    changed, and then their places within their pages, 16 bits each, ascending."""
    values: torch.Tensor
    """uint8[n * unit + nbytes % unit]: the n units' bytes, and the end of the buffer that fills no
    unit."""

    @property
    def size(self) -> int:
        """Bytes of `to_bytes`."""
        return HEADER.size + len(self.where) + len(self.values)

    @cached_property
    def places(self) -> torch.Tensor:
        """int64[n]: the numbers of the changed units, ascending. MessageError when `where` is
        malformed.
        """
        places = places_of(self.where, self.nbytes, self.unit)
        if places is None or len(self.values) != len(places) * self.unit + self.nbytes % self.unit:
            raise _unreadable(
                f"{len(self.where)} and {len(self.values)} bytes that do not fit each other"
            )
        return places

    def to_bytes(self) -> torch.Tensor:
        """The delta as it travels, uint8[size]."""
        facts = HEADER.pack(MAGIC, 0, self.unit, self.base, self.base_sum, self.result, self.nbytes)
        message = torch.cat([_bytes(facts, self.values.device), self.where, self.values])
        message[len(MAGIC) : PROVED] = _bytes(
            struct.pack("<Q", wordsum(message[PROVED:])), message.device
        )
        return message

    @classmethod
    def from_bytes(cls, message: torch.Tensor) -> Delta:
        """The delta that `to_bytes` wrote; its values are a view. MessageError for anything
        else.
        """
        if message.dtype is not torch.uint8 or message.dim() != 1 or len(message) < HEADER.size:
            raise _unreadable(f"{message.dtype} of shape {list(message.shape)}")
        magic, digest, unit, base, base_sum, result, nbytes = HEADER.unpack(
            bytes(message[: HEADER.size].tolist())
        )
        if magic != MAGIC or unit not in (WORD, BLOCK, RUN):
            raise _unreadable(f"magic {magic!r}, unit {unit}")
        if wordsum(message[PROVED:]) != digest:
            raise _unreadable(
                f"{len(message)} bytes with another checksum than they were sent with"
            )
        body = message[HEADER.size :]
        fixed = fixed_bytes(nbytes, unit)
        if fixed > len(body):
            raise _unreadable(f"{len(message)} bytes for a buffer of {nbytes}")
        if unit == WORD:
            fixed += 2 * max(0, int(aligned(body[:fixed]).view(torch.int32).sum()))
        delta = cls(
            base=base,
            base_sum=base_sum,
            result=result,
            nbytes=nbytes,
            unit=unit,
            where=body[:fixed],
            values=body[fixed:],
        )
        _ = delta.places
        return delta


def diff(
    old: torch.Tensor, new: torch.Tensor, *, base: int, limit: int | None = None
) -> Delta | None:
    """The smallest delta from one buffer to another; None where it has `limit` bytes or more.
    Nothing is scanned for a limit of 0.

    Both are dense uint8[n] that begin at a multiple of 8 bytes. `base`: the version of `old`.
    WeightError when they differ in size.
    """
    if old.shape != new.shape:
        raise WeightError(
            f"only versions of one layout have a delta; found buffers of {len(old)} and {len(new)}"
            " bytes; send the first version of a layout in full"
        )
    if limit == 0:
        return None
    nbytes = len(new)
    differing = differences(old, new, (nbytes if limit is None else limit) // (2 * WORD))
    wheres = {
        BLOCK: differing.blocks[: fixed_bytes(nbytes, BLOCK)],
        RUN: packed(differing.blocks[: nbytes // RUN] != 0),
    }
    changed = {
        BLOCK: int(unpacked(differing.blocks).sum()),
        RUN: int((differing.blocks[: nbytes // RUN] != 0).sum()),
    }
    sizes = {
        unit: len(where) + changed[unit] * unit + nbytes % unit for unit, where in wheres.items()
    }
    if differing.lows is not None:
        wheres[WORD] = torch.cat(
            [differing.counts.view(torch.uint8), differing.lows.view(torch.uint8)]
        )
        sizes[WORD] = len(wheres[WORD]) + len(differing.lows) * WORD + nbytes % WORD
    unit = min(sizes, key=sizes.__getitem__)
    if limit is not None and HEADER.size + sizes[unit] >= limit:
        return None
    if unit == WORD and differing.values is not None:
        values = differing.values.view(torch.uint8)
    else:
        places = unpacked(wheres[unit]).view(-1).nonzero().view(-1)
        values = rows(new, unit)[places].view(-1).view(torch.uint8)
    return Delta(
        base=base,
        base_sum=wordsum(old),
        result=wordsum(new),
        nbytes=nbytes,
        unit=unit,
        where=wheres[unit],
        values=torch.cat([values, new[nbytes // unit * unit :]]),
    )


def apply_delta(buffer: torch.Tensor, delta: Delta) -> None:
    """Turn `buffer` from the delta's base into its result, in place. Buffer as for `diff`.

    WeightError, with the buffer as it was, when it does not hold the base; ChecksumMismatch when
    the result is not what was sent: the buffer then holds no version.
    """
    base_sum = wordsum(buffer) if len(buffer) == delta.nbytes else None
    if base_sum != delta.base_sum:
        raise WeightError(
            f"a delta does not stand on this buffer; found {len(buffer)} bytes that are not version"
            f" {delta.base} of {delta.nbytes} bytes; ask the writer for the full version"
        )
    whole = delta.nbytes // delta.unit * delta.unit
    units = rows(buffer, delta.unit)
    changed = delta.values[: len(delta.places) * delta.unit]
    units[delta.places] = aligned(changed).view(units.dtype).view(-1, *units.shape[1:])
    buffer[whole:] = delta.values[len(changed) :]
    if wordsum(buffer) != delta.result:
        raise ChecksumMismatch(
            f"the buffer is damaged after a delta on version {delta.base}; found another checksum"
            " than the writer's; take the next version in full"
        )


def _bytes(data: bytes, device: torch.device) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


def _unreadable(problem: str) -> MessageError:
    return MessageError(
        f"a delta cannot be read; found {problem}; writer and readers must run the same release"
    )


# How a delta marks the changed units: a bit for each block, or the places of words by page.


def rows(buffer: torch.Tensor, unit: int) -> torch.Tensor:
    """The whole units of a buffer as rows: int16[n], or int64[n, unit / 8]."""
    whole = buffer[: len(buffer) // unit * unit]
    return whole.view(torch.int16) if unit == WORD else whole.view(torch.int64).view(-1, unit // 8)


def fixed_bytes(nbytes: int, unit: int) -> int:
    """Bytes of a delta's `where`, without those that each changed word adds."""
    units = nbytes // unit
    return 4 * -(-units // PAGE_WORDS) if unit == WORD else -(-units // 8)


def places_of(where: torch.Tensor, nbytes: int, unit: int) -> torch.Tensor | None:
    """int64: the units that `where` names; None where they are none of this buffer, or not in
    order.
    """
    fixed = fixed_bytes(nbytes, unit)
    if unit == WORD:
        counts = aligned(where[:fixed]).view(torch.int32).long()
        lows = aligned(where[fixed:]).view(torch.int16).long() & (PAGE_WORDS - 1)
        if (len(counts) and int(counts.min()) < 0) or int(counts.sum()) != len(lows):
            return None
        places = (
            torch.repeat_interleave(
                torch.arange(len(counts), device=where.device) * PAGE_WORDS, counts
            )
            + lows
        )
    else:
        places = unpacked(where).view(-1).nonzero().view(-1)
    rising = bool((places[1:] > places[:-1]).all())
    return places if rising and (not len(places) or int(places[-1]) < nbytes // unit) else None


def packed(flags: torch.Tensor) -> torch.Tensor:
    """uint8[ceil(n / 8)]: a bit for each flag, the lowest first."""
    padded = torch.zeros(-(-len(flags) // 8), 8, dtype=torch.uint8, device=flags.device)
    padded.view(-1)[: len(flags)] = flags
    return (padded << _eight(flags.device)).sum(1, dtype=torch.uint8)


def unpacked(packed: torch.Tensor) -> torch.Tensor:
    """uint8[n, 8] of 0 and 1: what `packed` made."""
    return (packed[:, None] >> _eight(packed.device)) & 1


def _eight(device: torch.device) -> torch.Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)


def aligned(data: torch.Tensor) -> torch.Tensor:
    """The same bytes where wider numbers may be read from them."""
    return data if data.storage_offset() % 8 == 0 else data.clone()


WHOLE_CHUNK = -1
"""Instead of the bytes of a delta: the message travels as it is."""
SCAN_BYTES_PER_S = 0.8e9
"""Of messages of which one word in a hundred changed: gathered and compared by the sender, then
gathered, changed and verified by the receiver, on a core each; about a third of it without a C
compiler."""


class Gathered:
    """The messages of a version that lies in one rank's tensors, one at a time, in memory of their
    own.
    """

    def __init__(
        self,
        chunks: Mapping[int, Sequence[Chunk]],
        tensors: Tensors,
        *,
        sending: bool,
        device: TransferDevice,
    ) -> None:
        """`tensors`: the source's if `sending`, else the destination's. `device`: where messages
        lie.
        """
        self._steps = {
            (step.peer, step.tag): step
            for peer, peer_chunks in chunks.items()
            for step in (
                step_of(peer, at + 1, chunk, tensors, sending, device)
                for at, chunk in enumerate(peer_chunks)
            )
        }
        size = (
            -(-max((step.nbytes for step in self._steps.values()), default=0) // ALIGNMENT)
            * ALIGNMENT
        )
        memory = torch.empty(size, dtype=torch.uint8, device=device.device)
        for step in self._steps.values():
            step.use(memory, sending=True)

    def message(self, peer: int, tag: int) -> tuple[torch.Tensor, torch.Tensor]:
        """uint8[nbytes], which the next call overwrites, and the checksum of each fragment,
        int64[n, 2].
        """
        step = self._steps[peer, tag]
        step.data.zero_()
        sums = torch.zeros((len(step.names), 2), dtype=torch.int64, device=step.data.device)
        step.pack(sums)
        return step.data, sums


class DeltaMessage:
    """A message to one peer, as a delta."""

    def __init__(self, step: ChunkMessage, delta: Delta, sums: torch.Tensor) -> None:
        """`step`: the message in full. `sums`: of its fragments, int64[n, 2]."""
        self.peer, self.tag, self.names = step.peer, step.tag, step.names
        self.data = delta.to_bytes()
        self.nbytes = len(self.data)
        self._sums = sums

    def pack(self, sums: torch.Tensor) -> None:
        """It is ready to be sent: add the checksums of the whole message's fragments."""
        sums += self._sums

    def known(self, rows: Mapping[PlaceKey, int]) -> None:
        """None: it has them."""

    def sum(self, sums: torch.Tensor) -> None:
        """Nothing: `pack` adds them."""


class Patch:
    """A message from one peer, as a delta on the version that `base` has."""

    def __init__(self, step: ChunkMessage, nbytes: int, base: Gathered) -> None:
        """`step`: the message in full. `nbytes`: of the delta."""
        self.peer, self.tag, self.names = step.peer, step.tag, step.names
        self._step, self._nbytes, self._base = step, nbytes, base
        self._data: torch.Tensor | None = None

    @property
    def data(self) -> torch.Tensor:
        """Where the delta lies, from the first use until it is unpacked."""
        if self._data is None:
            self._data = torch.empty(self._nbytes, dtype=torch.uint8, device=self._step.data.device)
        return self._data

    def unpack(self, sums: torch.Tensor) -> bool:
        """Put the message into its places, and add the checksum of each fragment; False where the
        delta is damaged or unfit.
        """
        message, _ = self._base.message(self.peer, self.tag)
        try:
            apply_delta(message, Delta.from_bytes(self.data))
        except (MessageError, WeightError):
            return False
        finally:
            self._data = None
        self._step.data.copy_(message)
        return self._step.unpack(sums)


def changes(
    steps: Sequence[ChunkMessage],
    current: Gathered,
    bases: Mapping[int, tuple[int, Gathered]],
    staged: StagedSums | None,
    link_bytes_per_s: float,
) -> list[ChunkMessage | DeltaMessage]:
    """What to send: of each message the delta from its peer's version, where that is cheaper, else
    itself.

    `bases`: by peer, the version that it has. `staged`: checksums of the current version.
    """
    messages: list[ChunkMessage | DeltaMessage] = []
    for step in steps:
        delta = None
        if step.peer in bases:
            version, base = bases[step.peer]
            before, _ = base.message(step.peer, step.tag)
            now, sums = current.message(step.peer, step.tag)
            limit = most_bytes(len(now), link_bytes_per_s, SCAN_BYTES_PER_S)
            delta = diff(before, now, base=version, limit=limit)
            staged_rows = step.known(staged.rows) if staged else None
            sums = staged.values[staged_rows] if staged and staged_rows is not None else sums
        messages.append(step if delta is None else DeltaMessage(step, delta, sums))
    return messages


def sizes(messages: Sequence[Outbound]) -> dict[int, list[int]]:
    """By peer: the bytes of each delta, WHOLE_CHUNK where it is none."""
    by_peer: dict[int, list[int]] = {}
    for message in messages:
        size = message.nbytes if isinstance(message, DeltaMessage) else WHOLE_CHUNK
        by_peer.setdefault(message.peer, []).append(size)
    return by_peer


def patches(
    steps: Sequence[ChunkMessage], peer_sizes: Mapping[int, Sequence[int]], base: Gathered | None
) -> list[ChunkMessage | Patch]:
    """What to receive, given the peers' `sizes`. WeightError for impossible sizes."""
    sizes_left = {peer: iter(of_peer) for peer, of_peer in peer_sizes.items()}
    inbound: list[ChunkMessage | Patch] = []
    for step in steps:
        size = next(sizes_left[step.peer])
        if size == WHOLE_CHUNK:
            inbound.append(step)
        elif base is None or not 0 < size < step.nbytes:
            raise WeightError(
                f"a peer told of a delta that cannot be; found {size} bytes for a message of"
                f" {step.nbytes}; trainer and generators must run the same release"
            )
        else:
            inbound.append(Patch(step, size, base))
    return inbound
