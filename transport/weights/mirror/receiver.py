"""The end by which a mirror takes versions over the network: they arrive in the segments that it
offers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from transport.weights.deltas.ends import DeltaReader
from transport.weights.layout.layout import Layout
from transport.weights.memory.ports import WriterSegment
from transport.weights.mirror.writer import MirrorWriter
from transport.weights.protocol.messages import BROKEN
from transport.weights.sharded.receive_buffers import Buffer, ReceiveBuffers


class SegmentBuffer(Buffer):
    """One version's tensors, in a segment of the mirror's."""

    def __init__(self, number: int, flat: Any, segment: WriterSegment) -> None:
        super().__init__(number, flat, torch.device("cpu"), None, memory=segment.buffer)
        self.segment = segment


class SegmentBuffers(ReceiveBuffers):
    """Two segments: that which was handed on last, and that which the next version arrives in.

    One that was handed on before is taken again when its readers have left it, which the mirror
    finds out (`make_room`) before it asks for a version.
    """

    def __init__(self, layout: Layout, writer: MirrorWriter) -> None:
        """`layout`: of one rank that holds all."""
        blank = {
            name: torch.empty(held.shape, dtype=getattr(torch, held.dtype), device="meta")
            for name, held in layout.tensors.items()
        }
        super().__init__(layout, 0, blank, view=True, device=torch.device("cpu"))
        self._writer = writer

    def take(self, epoch: int, shared: object) -> Buffer | None:
        """As of any buffers; none is let go of."""
        for old in self._buffers:
            if old.use == "whole" and old.epoch <= epoch:
                old.use = "free"
        free = next((each for each in self._buffers if each.use == "free"), None)
        if free is not None:
            free.use = "receiving"
        return free

    def make(self, shared: object) -> SegmentBuffer:
        """In a segment of its own; SegmentError where there is no memory for it."""
        return self._in(self._writer.fresh())

    def add(self, buffer: Buffer) -> None:
        """To receive into."""
        super().add(buffer)
        self._writer.add(_segment(buffer))

    def give_back(self, buffer: Buffer, epoch: int, version: int, state: str) -> None:
        """As of any buffers; what was spoiled goes with its segment."""
        super().give_back(buffer, epoch, version, state)
        if state == BROKEN:
            self._writer.discard(_segment(buffer))

    def make_room(self) -> bool:
        """Whether a version more can arrive, in memory that nobody reads."""
        if any(each.use in ("free", "receiving", "whole") for each in self._buffers):
            return True
        segment = self._writer.make_room()
        self._buffers = [each for each in self._buffers if _segment(each).key in self._writer.keys]
        if segment is None:
            return False
        known = next((each for each in self._buffers if _segment(each) is segment), None)
        if known is None:
            known = self._in(segment)
            self._buffers.append(known)
        known.use, known.version = "free", -1
        return True

    def adopt(self, version: int, epoch: int) -> None:
        """This version was handed on."""
        self._whole(version, epoch).use = "front"

    def segment_of(self, version: int, epoch: int) -> WriterSegment:
        """Where this version lies, held."""
        return _segment(self._whole(version, epoch))

    def _in(self, segment: WriterSegment) -> SegmentBuffer:
        return SegmentBuffer(next(self._numbers), self._flat, segment)


@dataclass(frozen=True)
class WholeVersion:
    """A version that lies whole in a segment, verified."""

    segment: WriterSegment
    version: int
    line: int
    """Of the trainer that has sent it."""


class MirrorReceiver(DeltaReader):
    """Takes whole models, each into a segment: `arrived`, then `adopt` when it was handed on and
    there is room.
    """

    def __init__(
        self, layout: Layout, writer: MirrorWriter, address: str, name: str, **knobs: Any
    ) -> None:
        """`layout`: of one rank that holds all; else as for the `ShardedReader`."""
        super().__init__(layout, 0, address, name, ranks=1, **knobs)
        self._segments = SegmentBuffers(layout, writer)

    def start(self) -> None:
        """Join the trainer."""
        self._buffers, self._started = self._segments, True
        self._control.start()

    def arrived(self) -> WholeVersion | None:
        """Hold what has arrived last, if it is new, until `adopt`. Raises as `poll`."""
        with self._control.changed:
            return None if self._held is not None or self.poll() is None else self._taken()

    def go_on(self) -> bool:
        """After what has arrived was handed on: ask for the next, if there is room for it."""
        with self._control.changed:
            if self._held is None or not self._segments.make_room():
                return False
            self.adopt()
            return True

    def serves(self, readers: dict[str, int], taken_s: dict[str, float], line: int) -> None:
        """Tell the trainer who takes versions from here: which of that line each of them holds, and
        how long (s) that took it, by its own clock.
        """
        with self._control.changed:
            if self._member.serves(readers, taken_s, line):
                self._control.wake()

    def _taken(self) -> WholeVersion | None:
        self.verify()
        if (held := self._held) is None:
            return None
        return WholeVersion(
            self._segments.segment_of(held.version, held.epoch), held.version, held.writer
        )


def _segment(buffer: Buffer) -> WriterSegment:
    assert isinstance(buffer, SegmentBuffer)
    return buffer.segment
