"""One rank's messages of a transfer, compiled once per process group and buffer, replayed for every
version.

Where a message is one run of bytes in the rank's tensors it is sent from there, or received there;
else it goes through a bucket, which one call packs or unpacks, casting on the way. Both ends sum
the bytes of every fragment, on the device where they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TypeVar

import torch

from transport.native import Copier, Summer
from transport.weights.executors.device import TransferDevice
from transport.weights.layout.flat import ALIGNMENT
from transport.weights.sharded.chunks import Chunk, Fragment, PlaceKey, place

Fragments = list[tuple[Fragment, torch.Tensor]]
Key = TypeVar("Key", int, bytes)
Compiled = TypeVar("Compiled")


class ChunkMessage:
    """One message to or from one peer."""

    def __init__(
        self,
        peer: int,
        tag: int,
        nbytes: int,
        fragments: Fragments,
        data: torch.Tensor | None,
        device: TransferDevice,
    ) -> None:
        """`data`: its bytes in the rank's tensors, None where it needs a bucket."""
        self.peer, self.tag, self.nbytes = peer, tag, nbytes
        self.names = [fragment.copy.tensor for fragment, _ in fragments]
        """The full tensor of each fragment."""
        self._data, self._device = data, device
        self._fragments = fragments
        self._keys = [
            (fragment.copy.source_name, place(fragment.source)) for fragment, _ in fragments
        ]
        self._copier: Copier | None = None
        self._summer: Summer | None = None
        self._same = all(_dtype(fragment) == tensor.dtype for fragment, tensor in fragments)

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

    def use(self, bucket: torch.Tensor, *, sending: bool) -> None:
        """Let the message go through this bucket, uint8[nbytes or more]."""
        self._data, self._summer = bucket[: self.nbytes], None
        inside = [
            bucket[fragment.offset : fragment.offset + fragment.nbytes]
            .view(_dtype(fragment))
            .view(tensor.shape)
            for fragment, tensor in self._fragments
        ]
        ours = [tensor for _, tensor in self._fragments]
        copier = self._device.copier
        self._copier = copier(inside, ours) if sending else copier(ours, inside)

    def pack(self, sums: torch.Tensor) -> None:
        """Make the message ready to be sent; a copy adds the checksums of its fragments."""
        if self._copier:
            self._copier.start(sums=sums)

    def known(self, rows: Mapping[PlaceKey, int]) -> list[int] | None:
        """The rows of its fragments' checksums among those made when the tensors were copied; None
        where these are not of such fragments.
        """
        at = [rows.get(key, -1) for key in self._keys] if self._same else [-1]
        return None if -1 in at else at

    def unpack(self, sums: torch.Tensor) -> bool:
        """Put what was received into its places, and add the checksums of its fragments as they
        came; True.
        """
        if self._copier is not None and self._same:
            self._copier.start(sums=sums)
            return True
        self._sum(sums)
        if self._copier is not None:
            self._copier.start()
        return True

    def sum(self, sums: torch.Tensor) -> None:
        """Add the checksums of its fragments, where `pack` has not."""
        if self._copier is None:
            self._sum(sums)

    def _sum(self, sums: torch.Tensor) -> None:
        if self._summer is None:
            self._summer = self._device.summer(
                [
                    self.data[fragment.offset : fragment.offset + fragment.nbytes]
                    for fragment, _ in self._fragments
                ]
            )
        self._summer.start(sums)


def recent(
    cache: dict[Key, Compiled],
    key: Key,
    make: Callable[[], Compiled],
    end: Callable[[Compiled], object] = lambda compiled: None,
) -> Compiled:
    """What was made for a buffer of this key; of the two last ones only. `end`: of what is
    forgotten.
    """
    if key not in cache:
        while len(cache) > 1:
            end(cache.pop(next(iter(cache))))
        cache[key] = make()
    return cache[key]


def compiled(
    chunks: Mapping[int, Sequence[Chunk]],
    tensors: Mapping[str, torch.Tensor],
    *,
    sending: bool,
    depth: int,
    device: TransferDevice,
    direct: bool = True,
) -> list[ChunkMessage]:
    """The steps of a transfer, peer by peer; `depth` of them may be under way at once.

    `chunks`: by the peer's rank in the process group, round by round. `device`: where messages lie.
    `direct`: they may lie in the tensors.
    """
    steps = [
        step_of(peer, number, chunk, tensors, sending, device, direct)
        for peer, cut in chunks.items()
        for number, chunk in enumerate(cut, 1)
    ]
    packed = [step for step in steps if step.needs_bucket]
    size = -(-max((step.nbytes for step in packed), default=0) // ALIGNMENT) * ALIGNMENT
    buckets = torch.empty(min(depth, len(packed)), size, dtype=torch.uint8, device=device.device)
    for number, step in enumerate(packed):
        step.use(buckets[number % depth], sending=sending)
    return steps


def step_of(
    peer: int,
    tag: int,
    chunk: Chunk,
    tensors: Mapping[str, torch.Tensor],
    sending: bool,
    device: TransferDevice,
    direct: bool = True,
) -> ChunkMessage:
    """One message, without a bucket. `tensors`: this rank's, the source's if `sending`, else the
    destination's.
    """
    fragments: Fragments = []
    loose: list[bool] = []
    for fragment in chunk.fragments:
        name = fragment.copy.source_name if sending else fragment.copy.destination_name
        box = fragment.source if sending else fragment.destination
        tensor = tensors[name].detach()
        fragments.append((fragment, tensor[box]))
        loose.append(
            sending
            or all(span.stop == length for span, length in zip(box, tensor.shape, strict=True))
        )
    data = _run(fragments, loose, chunk.nbytes, device.device) if direct else None
    return ChunkMessage(peer, tag, chunk.nbytes, fragments, data, device)


def _run(
    fragments: Fragments, loose: list[bool], nbytes: int, device: torch.device
) -> torch.Tensor | None:
    """The bytes of all fragments, if they lie in memory as they do in the message.

    What lies between two of them travels along. `loose`: whether what follows a fragment may be
    overwritten: nobody's is what lies between two tensors, but not what lies between two boxes of
    one.
    """
    start = fragments[0][1]
    storage, base = start.untyped_storage(), start.data_ptr()
    for fragment, tensor in fragments:
        if (
            tensor.dtype != _dtype(fragment)
            or tensor.device != device
            or not tensor.is_contiguous()
        ):
            return None
        if (
            tensor.untyped_storage().data_ptr() != storage.data_ptr()
            or tensor.data_ptr() != base + fragment.offset
        ):
            return None
    for ((fragment, _), (after, _)), free in zip(pairwise(fragments), loose, strict=False):
        if fragment.offset + fragment.nbytes != after.offset and not free:
            return None
    data: torch.Tensor = torch.empty(0, dtype=torch.uint8, device=device)
    return data.set_(storage, base - storage.data_ptr(), (nbytes,), (1,))


def _dtype(fragment: Fragment) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, fragment.copy.dtype)
    return dtype
