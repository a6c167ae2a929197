"""Where a reader receives versions while it computes with another one, and how they become the attached tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch

from transport.weights.layout.flat import FlatLayout
from transport.weights.layout.layout import Layout
from transport.weights.memory import buffers

Use = Literal["free", "receiving", "whole", "held", "front"]
"""Held: whole, and it stays so whatever comes meanwhile."""


class Buffer:
    """One version's local tensors, flat."""

    def __init__(self, number: int, flat: FlatLayout, device: torch.device) -> None:
        self.number = number
        self.use: Use = "free"
        self.epoch, self.version = 0, -1
        self.memory = torch.empty(flat.nbytes, dtype=torch.uint8, device=device)
        self.views = {
            spec.name: view for spec, view in zip(flat.tensors, buffers.views(flat, self.memory), strict=True)
        }


class ReceiveBuffers:
    """The buffers of one rank: usually two, the one computed with and the one received into."""

    def __init__(
        self, layout: Layout, rank: int, tensors: Mapping[str, torch.Tensor], *, view: bool, device: torch.device
    ) -> None:
        """`tensors`: attached. LayoutMismatch when they are not the rank's local ones."""
        self._flat = _flat(layout, rank)
        self._view, self._device = view, device
        self._targets: dict[str, list[torch.Tensor]] = {}
        if self._flat is not None:
            found = self._flat.arrange(tensors, f"rank {rank} of the reader group")
            self._targets = {spec.name: tied for spec, tied in zip(self._flat.tensors, found, strict=True)}
        self._partial = _partial(layout, rank)
        self._buffers: list[Buffer] = []
        self._made = 0

    def take(self) -> Buffer | None:
        """A buffer to receive into; None for a rank that holds nothing."""
        if self._flat is None:
            return None
        buffer = next((each for each in self._buffers if each.use == "free"), None)
        if buffer is None:
            self._made += 1
            buffer = Buffer(self._made, self._flat, self._device)
            for name in self._partial:
                buffer.views[name].copy_(self._targets[name][0].detach())
            self._buffers.append(buffer)
        buffer.use = "receiving"
        return buffer

    def base(self, epoch: int) -> Buffer | None:
        """The one with the newest version verified in this epoch, which `take` may have given out to be overwritten."""
        held = [each for each in self._buffers if each.epoch == epoch and each.version >= 0]
        return max(held, key=lambda each: each.version, default=None)

    def give_back(self, buffer: Buffer, epoch: int, version: int) -> None:
        """It has been received in this epoch: `version` whole, or -1."""
        for old in self._buffers:
            if old.use == "whole" and old.epoch <= epoch and version >= 0:
                old.use = "free"
        buffer.use, buffer.epoch, buffer.version = ("whole" if version >= 0 else "free"), epoch, version
        idle = [each for each in self._buffers if each.use == "free"]
        for extra in idle[1:]:
            self._buffers.remove(extra)

    def hold(self, version: int, epoch: int, *, still: bool) -> None:
        """Keep this version though newer ones come, or, unless `still`, no longer than until then."""
        if self._flat is not None:
            self._whole(version, epoch).use = "held" if still else "whole"

    @torch.no_grad()
    def adopt(self, version: int, epoch: int) -> None:
        """Make this version the attached tensors' values: parameters of the same dtype become views of it."""
        if self._flat is None:
            return
        buffer = self._whole(version, epoch)
        flips: list[tuple[torch.Tensor, torch.Tensor]] = []
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name, source in buffer.views.items():
            for target in self._targets[name]:
                same = target.dtype == source.dtype and target.device == source.device
                flip = self._view and same and isinstance(target, torch.nn.Parameter)
                (flips if flip else copies).append((target, source))
        if copies:
            buffers.copy([target for target, _ in copies], [source for _, source in copies])
        for target, source in flips:
            target.data = source
        for each in self._buffers:
            if each.use == "front":
                each.use = "free"
        buffer.use = "front" if flips else "free"

    def _whole(self, version: int, epoch: int) -> Buffer:
        found = (each for each in self._buffers if each.use in ("whole", "held"))
        return next(each for each in found if (each.version, each.epoch) == (version, epoch))


def _flat(layout: Layout, rank: int) -> FlatLayout | None:
    local = layout.local(rank)
    if not local:
        return None
    into = {alias: layout.tensors[name].into for alias, name in layout.aliases.items() if alias not in local}
    aliases = {alias: name for alias, name in into.items() if name in local}
    return FlatLayout.build([(name, shape, dtype) for name, (shape, dtype) in local.items()], aliases)


def _partial(layout: Layout, rank: int) -> list[str]:
    """Local tensors of which the layout does not describe every element."""
    left = {name: int(torch.Size(shape).numel()) for name, (shape, _) in layout.local(rank).items()}
    for held in layout.tensors.values():
        shards = held.shards
        for row in (shards.ranks == rank).nonzero()[0]:
            left[held.into] -= int((shards.stop[row] - shards.start[row]).prod())
    return [name for name, missing in left.items() if missing > 0]
