"""One rank's messages of a transfer, compiled once per process group and buffer, replayed for every version.

Where a message is one run of bytes in the rank's tensors it is sent from there, or received there; else it goes through
a bucket, which one call packs or unpacks, casting on the way. Both ends sum the bytes of every slot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TypeVar

import torch

from transport.native import Copier, wordsums
from transport.weights.layout.flat import ALIGNMENT
from transport.weights.sharded.chunks import Chunk, Slot
from transport.weights.sharded.staging import Sums, place

Slots = list[tuple[Slot, torch.Tensor]]
Compiled = TypeVar("Compiled")


class Step:
    """One message to or from one peer."""

    def __init__(self, peer: int, tag: int, nbytes: int, slots: Slots, data: torch.Tensor | None) -> None:
        """`data`: its bytes in the rank's tensors, None where it needs a bucket."""
        self.peer, self.tag, self.nbytes = peer, tag, nbytes
        self._data = data
        self._slots = slots
        self._offsets = [slot.offset for slot, _ in slots]
        self._sizes = [slot.nbytes for slot, _ in slots]
        self._keys = [(slot.copy.source_name, place(slot.source)) for slot, _ in slots]
        self._copier: Copier | None = None
        self._same = all(_dtype(slot) == tensor.dtype for slot, tensor in slots)

    @property
    def data(self) -> torch.Tensor:
        """Where the message lies, uint8[nbytes]."""
        assert self._data is not None, "a step without memory of its own is given a bucket"
        return self._data

    @property
    def needs_bucket(self) -> bool:
        """Whether it has no memory yet."""
        return self._data is None

    @property
    def casts(self) -> bool:
        """Whether the rank's tensors have other dtypes than the message."""
        return not self._same

    @property
    def names(self) -> list[str]:
        """The full tensor of each slot."""
        return [slot.copy.tensor for slot, _ in self._slots]

    def use(self, bucket: torch.Tensor, *, sending: bool) -> None:
        """Let the message go through this bucket, uint8[nbytes or more]."""
        self._data = bucket[: self.nbytes]
        inside = [
            bucket[slot.offset : slot.offset + slot.nbytes].view(_dtype(slot)).view(tensor.shape)
            for slot, tensor in self._slots
        ]
        ours = [tensor for _, tensor in self._slots]
        self._copier = Copier(inside, ours) if sending else Copier(ours, inside)

    def pack(self) -> list[int] | None:
        """Make the message ready to be sent; the checksum of each slot, None where nothing had to be copied."""
        return self._copier.run() if self._copier else None

    def known(self, sums: Sums) -> list[int] | None:
        """The checksums made when the tensors were copied; None where they are not of these slots."""
        found = [sums.get(key, -1) for key in self._keys] if sums and self._same else [-1]
        return None if -1 in found else found

    def unpack(self) -> list[int]:
        """Put what was received into its places; the checksum of each slot as it came."""
        if self._copier is None:
            return self.sums()
        if self._same:
            return self._copier.run()
        found = self.sums()
        self._copier.run()
        return found

    def sums(self) -> list[int]:
        """The checksum of each slot of the message."""
        return wordsums(self.data, self._offsets, self._sizes)


def recent(cache: dict[int, Compiled], number: int, make: Callable[[], Compiled]) -> Compiled:
    """What was made for a buffer of this number; of the two last ones only."""
    if number not in cache:
        while len(cache) > 1:
            cache.pop(next(iter(cache)))
        cache[number] = make()
    return cache[number]


def compiled(
    chunks: Mapping[int, Sequence[Chunk]],
    tensors: Mapping[str, torch.Tensor],
    *,
    sending: bool,
    depth: int,
    device: torch.device,
    first: int,
) -> list[Step]:
    """The steps of a transfer: the peers take turns, from `first` on; `depth` of them may be under way at once.

    `chunks`: by the peer's rank in the process group. `device`: where messages lie."""
    peers = sorted(chunks, key=lambda peer: (peer < first, peer))
    order = sorted(
        ((number, turn, peer) for turn, peer in enumerate(peers) for number in range(len(chunks[peer]))),
    )
    steps = [step_of(peer, number + 1, chunks[peer][number], tensors, sending, device) for number, _, peer in order]
    packed = [step for step in steps if step.needs_bucket]
    size = -(-max((step.nbytes for step in packed), default=0) // ALIGNMENT) * ALIGNMENT
    buckets = torch.empty(min(depth, len(packed)), size, dtype=torch.uint8, device=device)
    for number, step in enumerate(packed):
        step.use(buckets[number % depth], sending=sending)
    return steps


def step_of(
    peer: int, tag: int, chunk: Chunk, tensors: Mapping[str, torch.Tensor], sending: bool, device: torch.device
) -> Step:
    """One message, without a bucket. `tensors`: this rank's, the source's if `sending`, else the destination's."""
    slots: Slots = []
    loose: list[bool] = []
    for slot in chunk.slots:
        name = slot.copy.source_name if sending else slot.copy.destination_name
        box = slot.source if sending else slot.destination
        tensor = tensors[name].detach()
        slots.append((slot, tensor[box]))
        loose.append(sending or all(each.stop == length for each, length in zip(box, tensor.shape, strict=True)))
    return Step(peer, tag, chunk.nbytes, slots, _run(slots, loose, chunk.nbytes, device))


def _run(slots: Slots, loose: list[bool], nbytes: int, device: torch.device) -> torch.Tensor | None:
    """The bytes of all slots, if they lie in memory as they do in the message.

    What lies between two of them travels along. `loose`: whether what follows a slot may be overwritten: nobody's
    is what lies between two tensors, but not what lies between two boxes of one."""
    start = slots[0][1]
    storage, base = start.untyped_storage(), start.data_ptr()
    for slot, tensor in slots:
        if tensor.dtype != _dtype(slot) or tensor.device != device or not tensor.is_contiguous():
            return None
        if tensor.untyped_storage().data_ptr() != storage.data_ptr() or tensor.data_ptr() != base + slot.offset:
            return None
    for ((slot, _), (after, _)), free in zip(pairwise(slots), loose, strict=False):
        if slot.offset + slot.nbytes != after.offset and not free:
            return None
    data: torch.Tensor = torch.empty(0, dtype=torch.uint8, device=device)
    return data.set_(storage, base - storage.data_ptr(), (nbytes,), (1,))


def _dtype(slot: Slot) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, slot.copy.dtype)
    return dtype
