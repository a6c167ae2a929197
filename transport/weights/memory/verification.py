"""How a reader verifies that a segment holds what was published: while it is written, in slices, or
all at once.
"""

from __future__ import annotations

import time
from collections.abc import Generator

from transport.native import Follower
from transport.native.build import library
from transport.native.sums import folded
from transport.weights.layout.flat import FlatLayout
from transport.weights.memory import buffers
from transport.weights.memory.ports import ReaderSegment
from transport.weights.protocol.messages import Offer

NAP_S = 5e-5
NAPS = 2
"""What is left to sum when an offer arrives takes less than that many naps, if the sums kept up
with the writer."""


class Verification:
    """The sums of one version in one segment, and what they say.

    Consumes: the segment's bytes, behind the writer where it tells how far it is, or else from
    inside the gate. Produces: `damage`. Waits for: nothing. Unblocked by: the writer.
    """

    def __init__(
        self,
        layout: FlatLayout,
        segment: ReaderSegment,
        ahead: Follower | None,
        slice_bytes: int | None,
    ):
        """`ahead`: what sums the version already; closed with this."""
        self.damage: str | None = None
        """Where other bytes were found than were published, once verified."""
        self._layout, self._segment, self._ahead, self._slice_bytes = (
            layout,
            segment,
            ahead,
            slice_bytes,
        )
        self._steps: Generator[None, None, str | None] | None = None
        self._ended = False

    def verified(self, offer: Offer) -> bool:
        """Read the next slice, inside the gate; True after the last one, with the result in
        `damage`.
        """
        if self._steps is None:
            self._steps = self._all(offer)
        if not self._ended:
            try:
                next(self._steps)
            except StopIteration as end:
                self.damage, self._ended = end.value, True
        return self._ended

    def finish(self, offer: Offer) -> None:
        """Until it is verified."""
        while not self.verified(offer):
            if self._ahead is not None and self._ahead.running:
                time.sleep(NAP_S)

    @property
    def running(self) -> bool:
        """Whether a thread is at it."""
        return self._ahead is not None and self._ahead.running

    def close(self) -> None:
        """Stop, and release the segment."""
        if self._ahead is not None:
            self._ahead.close()

    def _all(self, offer: Offer) -> Generator[None, None, str | None]:
        layout, buffer = self._layout, self._segment.buffer
        packed = yield from self._sums()
        wrong = buffers.difference(layout, packed, offer.sums)
        if wrong is None and offer.digests:
            packed = yield from buffers.digested(layout, buffer, self._slice_bytes)
            wrong = buffers.difference(layout, packed, offer.digests)
        return wrong

    def _sums(self) -> Generator[None, None, bytes]:
        if self._ahead is not None:
            for _ in range(NAPS):
                if self._ahead.running:
                    time.sleep(NAP_S)
            while self._ahead.running:
                yield
            if (pairs := self._ahead.pairs) is not None:
                return buffers.packed(folded(pairs))
        return (yield from buffers.summed(self._layout, self._segment.buffer, self._slice_bytes))


def follows(segment: ReaderSegment) -> bool:
    """Whether a version in it can be verified while it is written, at no cost for the reader's
    loop.
    """
    return segment.progress is not None and library() is not None
