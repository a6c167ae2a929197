"""The tensors that a reader takes versions into, and the segments that they are views of."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping

import torch

from transport.native import Follower
from transport.native.build import library
from transport.native.sums import folded
from transport.weights.errors import LayoutMismatch
from transport.weights.layout.flat import FlatLayout
from transport.weights.layout.rank_slices import LocalTensor, RankSlice, local_tensors
from transport.weights.memory import buffers
from transport.weights.memory.ports import ReaderPort, ReaderSegment
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


Pairs = list[tuple[torch.Tensor, torch.Tensor]]
"""(destination, source)."""


class Mapped:
    """A segment with the attached tensors' places in it."""

    def __init__(
        self,
        segment: ReaderSegment,
        layout: FlatLayout,
        targets: list[list[LocalTensor[torch.Tensor]]],
        view: bool,
    ) -> None:
        self.segment = segment
        self._offsets, self._sizes = buffers.ranges(layout)
        self.flips: Pairs = []
        self.copies: Pairs = []
        for full, tied in zip(buffers.views(layout, segment.buffer), targets, strict=True):
            for part in tied:
                for target, source in _places(part, full):
                    whole = (
                        target is part.local
                        and isinstance(target, torch.nn.Parameter)
                        and source.is_contiguous()
                    )
                    flip = (
                        view
                        and whole
                        and target.device == source.device
                        and target.dtype == source.dtype
                    )
                    (self.flips if flip else self.copies).append((target, source))

    def follow(self, version: int) -> Follower | None:
        """What sums the version's tensors while they are written, where that can be."""
        if not follows(self.segment):
            return None
        return Follower(
            self.segment.buffer, self._offsets, self._sizes, self.segment.progress, version
        )


class Attached:
    """Tensors that hold a version; at most one segment stays entered, that of the version that they
    are views of.

    Consumes: segments that somebody has entered. Produces: new values in the tensors.
    Waits for: nothing. Unblocked by: -
    """

    def __init__(self, port: ReaderPort, whose: str, *, view: bool, threads: int) -> None:
        """`view`: turn parameters into views where that can be; `threads`: of the copies
        elsewhere.
        """
        self.torn = False
        """Whether a version was taken in half, by an error."""
        self._port, self._whose, self._view, self._threads = port, whose, view, threads
        self._parts: dict[str, LocalTensor[torch.Tensor]] | None = None
        self._layout: FlatLayout | None = None
        self._targets: list[list[LocalTensor[torch.Tensor]]] = []
        self._mapped: dict[str, Mapped] = {}
        self._inside: Mapped | None = None

    @property
    def named(self) -> bool:
        """Whether it knows its tensors."""
        return self._parts is not None

    def name(
        self, tensors: Mapping[str, torch.Tensor], slices: Mapping[str, RankSlice] | None
    ) -> None:
        """These are the tensors. LayoutMismatch when a slice does not fit its own."""
        self._parts = local_tensors(tensors, slices, self._whose)

    def bind(self, layout: FlatLayout | None) -> None:
        """Find the tensors in this layout, once both are known; no segment may be in use but the
        one they view.

        LayoutMismatch when names or full shapes differ, or two of the layout would go into one
        memory.
        """
        if layout is None or self._parts is None:
            return
        targets = layout.arrange(self._parts, self._whose)
        owners: dict[int, str] = {}
        for spec, tied in zip(layout.tensors, targets, strict=True):
            for pointer in {part.local.data_ptr() for part in tied if part.local.numel()}:
                if pointer in owners:
                    raise LayoutMismatch(
                        f"{self._whose} has one tensor for two of the layout; found"
                        f" '{owners[pointer]}' and '{spec.name}' in the same memory; tie them in"
                        " the trainer's model, or untie them here"
                    )
                owners[pointer] = spec.name
        self._layout, self._targets = layout, targets
        self.forget()

    def forget(self) -> None:
        """Let go of all segments but the one that the tensors view; that one is closed when it is
        left.
        """
        for mapped in self._mapped.values():
            if mapped is not self._inside:
                mapped.segment.close()
        self._mapped = {}

    def open(self, key: str) -> Mapped | None:
        """The segment of that name in this layout; None when it is gone."""
        assert self._layout is not None, "bind comes first"
        if key not in self._mapped:
            segment = self._port.segment(key, self._layout.nbytes)
            if segment is None:
                return None
            for old in [k for k, m in self._mapped.items() if m is not self._inside][
                : len(self._mapped) - 1
            ]:
                self._mapped.pop(old).segment.close()
            self._mapped[key] = Mapped(segment, self._layout, self._targets, self._view)
        return self._mapped[key]

    def take(self, mapped: Mapped) -> None:
        """Make the version in an entered segment the tensors' value, and leave segments that none
        of them views.
        """
        self.torn = True
        try:
            if mapped.copies:
                with buffers.copying(self._threads):
                    buffers.copy([t for t, _ in mapped.copies], [s for _, s in mapped.copies])
            for parameter, source in mapped.flips:
                parameter.data = source
            self.torn = False
        finally:
            if self.torn or not mapped.flips:
                mapped.segment.leave()
        before, self._inside = self._inside, mapped if mapped.flips else None
        if before is not None and before is not mapped:
            before.segment.leave()
            if before not in self._mapped.values():
                before.segment.close()

    def let_go(self) -> None:
        """Close all segments: views keep only name, shape and dtype until the next `take`."""
        if self._inside:
            for parameter, source in self._inside.flips:
                if parameter.data_ptr() == source.data_ptr():
                    parameter.data = torch.zeros(
                        (), dtype=source.dtype, device=source.device
                    ).expand(source.shape)
            self._inside.segment.leave()
            if self._inside not in self._mapped.values():
                self._inside.segment.close()
            self._inside = None
        self.forget()

    def close(self) -> None:
        """Close all segments; the tensors keep their version, in memory of their own."""
        if self._inside:
            for parameter, source in self._inside.flips:
                if parameter.data_ptr() == source.data_ptr():
                    parameter.data = source.clone()
            self._inside.segment.leave()
            if self._inside not in self._mapped.values():
                self._inside.segment.close()
        for mapped in self._mapped.values():
            mapped.segment.close()
        self._mapped.clear()
        self._inside = None


def _places(
    part: LocalTensor[torch.Tensor], full: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(destination, source) of each run; of a single one the local tensor itself."""
    if part.runs is None:
        yield part.local, full
        return
    for at, first, length in part.cuts():
        whole = len(part.runs) == 1
        yield (
            part.local if whole else part.local.detach().narrow(part.dim, at, length),
            full.narrow(part.dim, first, length),
        )
