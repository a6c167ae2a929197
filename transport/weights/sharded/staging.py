"""Where versions lie: those that a trainer's rank can send, in two buffers of its own or in the
trainer's tensors; those that a reader's rank receives while it computes with another one.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Literal

import torch

from transport.native import Copier
from transport.weights.errors import LayoutMismatch
from transport.weights.executors.device import Mark, TransferDevice
from transport.weights.executors.peer_memory import PeerMemory
from transport.weights.layout.flat import ITEM_BYTES, FlatLayout
from transport.weights.layout.layout import Layout
from transport.weights.memory import copy, copying, flips_and_copies, views
from transport.weights.protocol.messages import BROKEN, WHOLE
from transport.weights.sharded.chunks import PlaceKey, place, split_shape

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class StagedSums:
    """Checksums of boxes of local tensors, made when these were copied."""

    rows: Mapping[PlaceKey, int]
    values: torch.Tensor
    """s1 and s2 of each row, int64[n, 2], where the copies are."""


class Staging(ABC):
    """Versions by number."""

    @abstractmethod
    def versions(self) -> set[int]:
        """Those that are whole."""

    @abstractmethod
    def free(self, versions: Set[int]) -> bool:
        """Make room for one more without touching those in `versions`; False when there is none."""

    @abstractmethod
    def fill(self, version: int, tensors: Tensors) -> None:
        """Put a version into the room that `free` has made."""

    @abstractmethod
    def of(self, version: int) -> tuple[int, Tensors]:
        """A version's tensors, and a number that is equal while they lie where they lay."""

    @abstractmethod
    def ready(self, version: int) -> Mark:
        """Behind which its tensors have their values."""

    @abstractmethod
    def copied(self) -> Mark:
        """Behind which nothing that was asked for here reads the trainer's tensors."""

    @abstractmethod
    def sums(self, version: int) -> StagedSums | None:
        """Of what was copied, made in the same pass: what travels is compared with them."""


class Snapshots(Staging):
    """Two flat buffers, each filled by one copy that casts, and sums the parts that will travel."""

    def __init__(
        self, layout: Layout, rank: int, device: TransferDevice, *, part_bytes: int
    ) -> None:
        local = layout.local(rank)
        self._flat = layout.flat(rank) if local else None
        self._device = device
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
        return {version for version in self._held if version >= 0}

    def free(self, versions: Set[int]) -> bool:
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
        if self._flat is not None:
            if self._room == len(self._views):
                self._add(self._flat)
            sources = [tensors[name].detach()[box] for name, box in self._parts]
            published = self._device.mark()
            with copying(), self._device.beside():
                self._device.after(published)
                self._device.uses(sources)
                sums = self._copiers[self._room].start(sources)
                self._marks[self._room] = self._copied = self._device.mark()
            self._sums[self._room] = StagedSums(self._rows, sums)
        self._held[self._room] = version

    def of(self, version: int) -> tuple[int, Tensors]:
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
        named = {
            spec.name: view for spec, view in zip(flat.tensors, views(flat, buffer), strict=True)
        }
        self._views.append(named)
        self._copiers.append(self._device.copier([named[name][box] for name, box in self._parts]))


class BorrowedTensors(Staging):
    """The trainer's own tensors, which it leaves alone until they are settled."""

    def __init__(self, device: TransferDevice) -> None:
        self._device = device
        self._version = -1
        self._ready: Mark = None
        self._tensors: Tensors = {}
        self._places: list[int] = []
        self._number = 0

    def versions(self) -> set[int]:
        return {self._version} - {-1}

    def free(self, versions: Set[int]) -> bool:
        if self._version in versions:
            return False
        self._version = -1
        return True

    def fill(self, version: int, tensors: Tensors) -> None:
        places = [tensor.data_ptr() for tensor in tensors.values()]
        if places != self._places:
            self._places, self._number = places, self._number + 1
        self._version, self._tensors = (
            version,
            {name: tensor.detach() for name, tensor in tensors.items()},
        )
        self._ready = self._device.mark()

    def of(self, version: int) -> tuple[int, Tensors]:
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


Use = Literal["free", "receiving", "whole", "held", "front"]
"""Held: whole, and it stays so whatever comes meanwhile."""


class Buffer:
    """One version's local tensors, flat."""

    def __init__(
        self,
        number: int,
        flat: FlatLayout,
        device: TransferDevice,
        shared: PeerMemory | None,
        in_host: bool,
    ) -> None:
        self.number, self.shared = number, shared
        self.read: Mark = None
        """Behind which nothing that was asked for reads it."""
        self.use: Use = "free"
        self.epoch, self.version = 0, -1
        self.own = None if shared is None else shared.allocate(flat.nbytes)
        """What opens it to the senders, where they write into it."""
        if self.own:
            self.memory = self.own.buffer
        elif in_host:
            self.memory = device.host_memory(flat.nbytes)
        else:
            self.memory = torch.empty(flat.nbytes, dtype=torch.uint8, device=device.device)
        self.views = {
            spec.name: view
            for spec, view in zip(flat.tensors, views(flat, self.memory), strict=True)
        }


class ReceiveBuffers:
    """The buffers of one rank: usually two, the one computed with and the one received into."""

    def __init__(
        self,
        layout: Layout,
        rank: int,
        tensors: Mapping[str, torch.Tensor],
        *,
        view: bool,
        device: TransferDevice,
        in_host: bool = False,
    ) -> None:
        """`tensors`: attached. `in_host`: one alone, in main memory. LayoutMismatch when they are
        not the rank's local ones.
        """
        self._attached = device.mark()
        self._flat = layout.flat(rank) if layout.local(rank) else None
        self._view, self._device, self.in_host = view, device, in_host
        self._targets: dict[str, list[torch.Tensor]] = {}
        if self._flat is not None:
            by_spec = self._flat.arrange(tensors, f"rank {rank} of the reader group")
            self._targets = {
                spec.name: tied for spec, tied in zip(self._flat.tensors, by_spec, strict=True)
            }
        self._partial = _partial(layout, rank)
        self._buffers: list[Buffer] = []
        self._numbers = itertools.count(1)

    @property
    def is_empty(self) -> bool:
        """Whether this rank holds nothing."""
        return self._flat is None

    @property
    def has_room(self) -> bool:
        """Whether one version more can be received, with at most two held then."""
        return not self.is_empty and (
            len(self._buffers) < (1 if self.in_host else 2)
            or any(buffer.use == "free" for buffer in self._buffers)
        )

    def take(self, epoch: int, shared: PeerMemory | None) -> Buffer | None:
        """A buffer of that memory to receive into in this epoch; None: one must be made.

        What was whole and not adopted before a transfer begins never will be.
        """
        for old in self._buffers:
            if old.use == "whole" and old.epoch <= epoch:
                old.use = "free"
        free = next(
            (
                buffer
                for buffer in self._buffers
                if buffer.use == "free" and buffer.shared is shared
            ),
            None,
        )
        self._keep([buffer for buffer in self._buffers if buffer.use != "free" or buffer is free])
        if free is not None:
            free.use = "receiving"
        return free

    def make(self, shared: PeerMemory | None) -> Buffer:
        """A new buffer, which `add` takes in; SegmentError where `shared` has no room for it. Takes
        long.
        """
        assert self._flat is not None, "who holds nothing receives nothing"
        buffer = Buffer(next(self._numbers), self._flat, self._device, shared, self.in_host)
        if self._partial:
            self._device.after(self._attached)
        for name in self._partial:
            buffer.views[name].copy_(self._targets[name][0].detach())
        buffer.read = self._device.mark()
        return buffer

    def add(self, buffer: Buffer) -> None:
        """A new buffer, to receive into."""
        buffer.use = "receiving"
        self._buffers.append(buffer)

    def base(self, epoch: int) -> Buffer | None:
        """The one with the newest version verified in this epoch, which `take` may have given out
        to be overwritten.
        """
        verified = [
            buffer for buffer in self._buffers if buffer.epoch == epoch and buffer.version >= 0
        ]
        return max(verified, key=lambda buffer: buffer.version, default=None)

    def give_back(self, buffer: Buffer, epoch: int, version: int, state: str) -> None:
        """A transfer into it has ended in this epoch.

        One that did not come to its end spoils it: its senders may still be at it.
        """
        buffer.use, buffer.epoch = ("whole" if state == WHOLE else "free"), epoch
        buffer.version = version if state == WHOLE else -1
        if state == BROKEN:
            self._keep([candidate for candidate in self._buffers if candidate is not buffer])

    def close(self) -> None:
        """Let go of all; the attached tensors keep their memory."""
        self._keep([])
        self._targets.clear()

    def _keep(self, remaining: list[Buffer]) -> None:
        for buffer in self._buffers:
            if buffer.own is not None and buffer not in remaining:
                buffer.own.release()
        self._buffers = remaining

    def hold(self, version: int, epoch: int, *, still: bool) -> None:
        """Keep this version though newer ones come, or, unless `still`, no longer than until
        then.
        """
        if self._flat is not None:
            self._whole(version, epoch).use = "held" if still else "whole"

    @torch.no_grad()
    def adopt(self, version: int, epoch: int) -> None:
        """Make this version the attached tensors' values: parameters of the same dtype become views
        of it.
        """
        if self._flat is None:
            return
        buffer = self._whole(version, epoch)
        pairs = [
            (target, source)
            for name, source in buffer.views.items()
            for target in self._targets[name]
        ]
        flips, copies = flips_and_copies(pairs, view=self._view)
        if copies:
            copy([target for target, _ in copies], [source for _, source in copies])
        for target, source in flips:
            target.data = source
        self._device.uses([buffer.memory])
        read = self._device.mark()
        for older in self._buffers:
            if older.use == "front":
                older.use, older.read = "free", read
        buffer.use, buffer.read = ("front" if flips else "free"), read

    def _whole(self, version: int, epoch: int) -> Buffer:
        complete = (buffer for buffer in self._buffers if buffer.use in ("whole", "held"))
        return next(
            buffer for buffer in complete if (buffer.version, buffer.epoch) == (version, epoch)
        )


def _partial(layout: Layout, rank: int) -> list[str]:
    """Local tensors of which the layout does not describe every element."""
    uncovered = {
        name: int(torch.Size(shape).numel()) for name, (shape, _) in layout.local(rank).items()
    }
    for tensor in layout.tensors.values():
        shards = tensor.shards
        for row in (shards.ranks == rank).nonzero()[0]:
            uncovered[tensor.into] -= int((shards.stop[row] - shards.start[row]).prod())
    return [name for name, missing in uncovered.items() if missing > 0]
