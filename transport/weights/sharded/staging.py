"""Where the versions lie that a trainer's rank can send: in two buffers of its own, or in the
trainer's tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Protocol

import torch

from transport.native import Copier
from transport.weights.errors import LayoutMismatch
from transport.weights.executors.device import Mark, TransferDevice
from transport.weights.layout.flat import ITEM_BYTES, FlatLayout
from transport.weights.layout.layout import Layout
from transport.weights.memory import buffers
from transport.weights.sharded.chunks import PlaceKey, place, split_shape

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class StagedSums:
    """Checksums of boxes of local tensors, made when these were copied."""

    rows: Mapping[PlaceKey, int]
    values: torch.Tensor
    """s1 and s2 of each row, int64[n, 2], where the copies are."""


class Staging(Protocol):
    """Versions by number."""

    def versions(self) -> set[int]:
        """Those that are whole."""

    def free(self, versions: Set[int]) -> bool:
        """Make room for one more without touching those in `versions`; False when there is none."""

    def fill(self, version: int, tensors: Tensors) -> None:
        """Put a version into the room that `free` has made."""

    def of(self, version: int) -> tuple[int, Tensors]:
        """A version's tensors, and a number that is equal while they lie where they lay."""

    def ready(self, version: int) -> Mark:
        """Behind which its tensors have their values."""

    def copied(self) -> Mark:
        """Behind which nothing that was asked for here reads the trainer's tensors."""

    def sums(self, version: int) -> StagedSums | None:
        """Of what was copied, made in the same pass: what travels is compared with them."""


class Snapshots:
    """Two flat buffers, each filled by one copy that casts, and sums the parts that will travel."""

    def __init__(
        self, layout: Layout, rank: int, device: TransferDevice, *, part_bytes: int, threads: int
    ) -> None:
        local = layout.local(rank)
        self._flat = layout.flat(rank) if local else None
        self._device, self._threads = device, threads
        self._parts = [
            (name, box)
            for name, (shape, dtype) in local.items()
            for box in split_shape(shape, ITEM_BYTES[dtype], part_bytes)
        ]
        self._keys = [(name, place(box)) for name, box in self._parts]
        self._held: list[int] = []
        self._views: list[dict[str, torch.Tensor]] = []
        self._copiers: list[Copier] = []
        self._sums: list[StagedSums | None] = [None, None]
        self._rows = {key: row for row, key in enumerate(self._keys)}
        self._marks: list[Mark] = [None, None]
        self._copied: Mark = None
        self._room = -1

    def versions(self) -> set[int]:
        """Those that are whole."""
        return {version for version in self._held if version >= 0}

    def free(self, versions: Set[int]) -> bool:
        """Make room without touching those in `versions`; False when there is none."""
        open_ = [at for at, version in enumerate(self._held) if version not in versions]
        if len(self._held) < 2:
            self._held.append(-1)
            self._room = len(self._held) - 1
            return True
        if not open_:
            return False
        self._room = min(open_, key=self._held.__getitem__)
        self._held[self._room] = -1
        return True

    def fill(self, version: int, tensors: Tensors) -> None:
        """Put a version into the room."""
        if self._flat is not None:
            if self._room == len(self._views):
                self._add(self._flat)
            sources = [tensors[name].detach()[box] for name, box in self._parts]
            published = self._device.mark()
            with buffers.copying(self._threads), self._device.beside():
                self._device.after(published)
                self._device.uses(sources)
                sums = self._copiers[self._room].start(sources)
                self._marks[self._room] = self._copied = self._device.mark()
            self._sums[self._room] = StagedSums(self._rows, sums)
        self._held[self._room] = version

    def of(self, version: int) -> tuple[int, Tensors]:
        """Its tensors, and a number that is equal while they lie where they lay."""
        at = self._held.index(version)
        return at, self._views[at] if self._views else {}

    def ready(self, version: int) -> Mark:
        """Behind its copy."""
        return self._marks[self._held.index(version)]

    def copied(self) -> Mark:
        """Behind the newest copy."""
        return self._copied

    def sums(self, version: int) -> StagedSums | None:
        """Of the parts of every tensor."""
        return self._sums[self._held.index(version)]

    def _add(self, flat: FlatLayout) -> None:
        with self._device.beside():
            buffer = torch.empty(flat.nbytes, dtype=torch.uint8, device=self._device.device)
        views = buffers.views(flat, buffer)
        named = {spec.name: view for spec, view in zip(flat.tensors, views, strict=True)}
        self._views.append(named)
        self._copiers.append(
            self._device.copier(
                [named[name][box] for name, box in self._parts], threads=self._threads
            )
        )


class BorrowedTensors:
    """The trainer's own tensors, which it leaves alone until they are settled."""

    def __init__(self, device: TransferDevice) -> None:
        self._device = device
        self._version = -1
        self._ready: Mark = None
        self._tensors: Tensors = {}
        self._places: list[int] = []
        self._number = 0

    def versions(self) -> set[int]:
        """Those that are whole."""
        return {self._version} - {-1}

    def free(self, versions: Set[int]) -> bool:
        """Make room without touching those in `versions`; False when there is none."""
        if self._version in versions:
            return False
        self._version = -1
        return True

    def fill(self, version: int, tensors: Tensors) -> None:
        """Put a version into the room."""
        places = [tensor.data_ptr() for tensor in tensors.values()]
        if places != self._places:
            self._places, self._number = places, self._number + 1
        self._version, self._tensors = (
            version,
            {name: tensor.detach() for name, tensor in tensors.items()},
        )
        self._ready = self._device.mark()

    def of(self, version: int) -> tuple[int, Tensors]:
        """Its tensors, and a number that is equal while they lie where they lay."""
        assert version == self._version, "a kept version stays"
        return self._number, self._tensors

    def ready(self, version: int) -> Mark:
        """Behind what the trainer had asked for when it published."""
        return self._ready

    def copied(self) -> Mark:
        """None: nothing is copied before it is sent."""
        return None

    def sums(self, version: int) -> StagedSums | None:
        """None: they are made while it is sent."""
        return None


def checked(local: Mapping[str, tuple[tuple[int, ...], str]], rank: int, tensors: Tensors) -> None:
    """LayoutMismatch unless these are the rank's local tensors."""
    if missing := [name for name in local if name not in tensors]:
        raise LayoutMismatch(
            f"rank {rank} of the trainer has no tensor '{missing[0]}'; found {len(tensors)}"
            f" tensors, first {list(tensors)[:3]}; pass every local tensor of the layout"
        )
    for name, (shape, _) in local.items():
        if tuple(tensors[name].shape) != shape:
            raise LayoutMismatch(
                f"rank {rank} of the trainer has another shape for '{name}'; found"
                f" {list(tensors[name].shape)}, the layout says {list(shape)}; pass the local"
                " shard, not the full tensor"
            )
