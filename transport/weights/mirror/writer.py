"""The end at which a mirror offers: segments that versions arrive in from elsewhere."""

from __future__ import annotations

import secrets
from typing import Any

from transport.weights.layout.flat import FlatLayout
from transport.weights.memory import buffers
from transport.weights.memory.ports import Site, WriterSegment
from transport.weights.writer import WeightWriter


class MirrorWriter(WeightWriter):
    """Offers segments that others have filled. For one thread, but for `fresh`."""

    def __init__(self, layout: FlatLayout, site: Site, **knobs: Any) -> None:
        """As for the `WeightWriter`."""
        super().__init__(layout, site, **knobs)
        self._line = 0

    @property
    def keys(self) -> set[str]:
        """Of the segments in use."""
        return set(self._segments)

    @property
    def taken(self) -> tuple[dict[str, int], dict[str, float], int]:
        """By reader that is in the version that it holds, and how long (s) that took it, where it
        has said so; and of which trainer they are, as `hand_on` has it.
        """
        readers = {each.name: each.version for each in self.readers if each.epoch}
        known = {
            name: sent for name, sent in self.sent.items() if readers.get(name) == sent.version
        }
        return readers, {name: sent.taken_s for name, sent in known.items()}, self._line

    def fresh(self) -> WriterSegment:
        """One more segment, sealed; SegmentError where there is no memory for it. In any thread."""
        return self._port.segment(self.layout.nbytes)

    def add(self, segment: WriterSegment) -> None:
        """A version may arrive in this segment."""
        self._segments[segment.key] = segment
        self._offers.writing(segment.key)

    def discard(self, segment: WriterSegment) -> None:
        """Nobody uses this segment any more, which holds no version."""
        self._offers.segments.pop(segment.key, None)
        if self._segments.pop(segment.key, None) is not None:
            segment.retire()
            segment.close()

    def make_room(self) -> WriterSegment | None:
        """A sealed segment for the next version, while that which was handed on last stays; None:
        readers are still in the other one. Those that do not leave it are left behind with it after
        a while, as by any writer.
        """
        front = self._offers.front
        for key in self._offers.order():
            if key is None:
                return self._added()
            if (front is None or key != front.segment) and self._segments[key].seal():
                self._offers.writing(key)
                return self._segments[key]
        stuck = self._offers.blocked(self._clock())
        if stuck is None:
            return None
        segment = self._abandoned[stuck] = self._segments.pop(stuck)
        segment.retire()
        self._send(self._offers.abandon(stuck))
        return self._added()

    def hand_on(self, segment: WriterSegment, version: int, line: int) -> None:
        """Offer a version that lies whole in its segment. `line`: the trainer's; of another one the
        number may be lower than before.
        """
        if line != self._line:
            if self._line:
                self._send(self._offers.begin_again(secrets.randbits(62)))
            self._line = line
        sums = buffers.whole(buffers.summed(self.layout, segment.buffer, None))
        segment.unseal(version)
        self._newest = version
        self._send(self._offers.written(segment.key, version, sums, b"", self._clock()))

    def _added(self) -> WriterSegment:
        segment = self.fresh()
        self.add(segment)
        return segment
