"""Where a reader receives versions while it computes with another one, and how they become the
attached tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Literal

import torch

from transport.weights.executors.device import Mark, TransferDevice
from transport.weights.executors.peer_memory import PeerMemory
from transport.weights.layout.flat import FlatLayout
from transport.weights.layout.layout import Layout
from transport.weights.memory import buffers
from transport.weights.protocol.messages import BROKEN, WHOLE

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
            for spec, view in zip(flat.tensors, buffers.views(flat, self.memory), strict=True)
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
