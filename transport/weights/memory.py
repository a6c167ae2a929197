"""Versions in memory: tensors in a flat buffer and their checksums, and a reader's tensors, which
take them over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from transport.native import Copier, Follower, wordsums
from transport.native.build import library
from transport.native.sums import folded
from transport.weights.errors import LayoutMismatch
from transport.weights.executors import ReaderPort, ReaderSegment, WriterSegment
from transport.weights.layout.flat import ITEM_BYTES, FlatLayout
from transport.weights.layout.rank_slices import RankSlice
from transport.weights.protocol.messages import Offer, Upcoming


def views(layout: FlatLayout, buffer: torch.Tensor) -> list[torch.Tensor]:
    """The layout's tensors, in its order, as views of `buffer` (uint8[layout.nbytes])."""
    typed = {
        dtype: buffer.view(getattr(torch, dtype))
        for dtype in {spec.dtype for spec in layout.tensors}
    }
    return [
        typed[spec.dtype]
        .narrow(0, spec.offset // ITEM_BYTES[spec.dtype], prod(spec.shape))
        .view(spec.shape)
        for spec in layout.tensors
    ]


def copy(destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its destination, casting where dtypes differ; strides and devices may
    be any.
    """
    with torch.no_grad():
        torch._foreach_copy_([t.detach() for t in destinations], [t.detach() for t in sources])


def filler(layout: FlatLayout, segment: WriterSegment) -> Copier:
    """What fills a segment, sums what it writes, and raises the segment's watermark."""
    return Copier(views(layout, segment.buffer), base=segment.buffer, progress=segment.progress)


def fill(filler: Copier, sources: Sequence[torch.Tensor]) -> bytes:
    """Write a version's tensors into its sealed segment; their cheap checksums, packed."""
    return packed(filler.run(sources))


def packed(numbers: Sequence[int] | NDArray[np.uint64]) -> bytes:
    """Integers of 64 bits, as an Offer carries them."""
    return np.asarray(numbers, "<u8").tobytes()


def ranges(layout: FlatLayout) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """First byte and size of each tensor of the layout."""
    places = np.array([(spec.offset, spec.nbytes) for spec in layout.tensors], np.int64)
    return places[:, 0].copy(), places[:, 1].copy()


def summed(layout: FlatLayout, buffer: torch.Tensor) -> bytes:
    """The cheap checksum of each tensor in the buffer, packed; made on the buffer's device."""
    return packed(wordsums(buffer, *ranges(layout)))


def digested(layout: FlatLayout, buffer: torch.Tensor) -> bytes:
    """xxh3_64 of each tensor in the buffer, packed."""
    parts = (buffer[spec.offset : spec.offset + spec.nbytes] for spec in layout.tensors)
    return packed([xxhash.xxh3_64_intdigest(part.cpu().numpy().tobytes()) for part in parts])


def difference(layout: FlatLayout, actual: bytes, published: bytes) -> str | None:
    """The tensor whose sum is another than published; None if there is none."""
    if actual == published:
        return None
    for index, spec in enumerate(layout.tensors):
        if actual[8 * index : 8 * index + 8] != published[8 * index : 8 * index + 8]:
            return f"tensor '{spec.name}'"
    return "the list of sums"


@contextmanager
def copying() -> Iterator[None]:
    """Run torch's copies on one thread, so that they take no core from the other workers."""
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


NAP_S = 5e-5
NAPS = 2
"""What is left to sum when an offer arrives takes less than that many naps, if the sums kept up
with the writer."""


@dataclass(frozen=True)
class LocalTensor:
    """A local tensor, and what it holds of the full one."""

    local: torch.Tensor
    shape: tuple[int, ...]
    """Of the full tensor, which is what the layout tells."""
    dim: int = 0
    runs: tuple[tuple[int, int], ...] | None = None
    """Ranges along it, end to end in the local tensor; None: all of it."""

    @classmethod
    def of(cls, name: str, local: torch.Tensor, part: RankSlice | None, whose: str) -> LocalTensor:
        """LayoutMismatch where the slice does not lie in its full shape, or gives another shape."""
        if part is None:
            return cls(local, tuple(local.shape))
        shape, dim = tuple(part[0]), part[1]
        runs = tuple((first, last) for first, last in part[2])
        expected = list(shape)
        if dim is not None:
            if not 0 <= dim < len(shape) or any(
                not 0 <= first <= last <= shape[dim] for first, last in runs
            ):
                raise LayoutMismatch(
                    f"{whose} holds a slice of '{name}' that does not lie in it; found"
                    f" {list(map(list, runs))} along dimension {dim} of {list(shape)}; cut it anew"
                )
            expected[dim] = sum(last - first for first, last in runs)
        if list(local.shape) != expected:
            raise LayoutMismatch(
                f"{whose} has another shape for its slice of '{name}'; found {list(local.shape)},"
                f" but ranges {list(map(list, runs))} along dimension {dim} of {list(shape)} make"
                f" {expected}; cut it anew"
            )
        return cls(local, shape) if dim is None else cls(local, shape, dim, runs)

    def places(self, full: torch.Tensor) -> Pairs:
        """Of each run; of a single one the local tensor itself."""
        if self.runs is None:
            return [(self.local, full)]
        pairs, at = [], 0
        for first, last in self.runs:
            own = self.local
            if len(self.runs) > 1:
                own = own.detach().narrow(self.dim, at, last - first)
            pairs.append((own, full.narrow(self.dim, first, last - first)))
            at += last - first
        return pairs


Pairs = list[tuple[torch.Tensor, torch.Tensor]]
"""(destination, source)."""


def flips_and_copies(pairs: Pairs, *, view: bool) -> tuple[Pairs, Pairs]:
    """Which destinations become views of their sources, and which are copied to. `view`: parameters
    that hold a source whole, in its dtype and on its device, become views.
    """
    flips: Pairs = []
    copies: Pairs = []
    for target, source in pairs:
        same = target.dtype == source.dtype and target.device == source.device
        is_parameter = isinstance(target, torch.nn.Parameter)
        flip = view and is_parameter and same and source.is_contiguous()
        (flips if flip else copies).append((target, source))
    return flips, copies


class Mapped:
    """A segment with the attached tensors' places in it."""

    def __init__(
        self,
        segment: ReaderSegment,
        layout: FlatLayout,
        targets: list[list[LocalTensor]],
        view: bool,
    ) -> None:
        self.segment, self.layout = segment, layout
        pairs = [
            pair
            for full, tied in zip(views(layout, segment.buffer), targets, strict=True)
            for part in tied
            for pair in part.places(full)
        ]
        self.flips, self.copies = flips_and_copies(pairs, view=view)

    @property
    def is_followed(self) -> bool:
        """Whether a version in it can be verified while it is written, at no cost for the reader's
        loop.
        """
        return self.segment.progress is not None and library() is not None


class Arrival:
    """A version on its way into a reader; inside its segment once it is offered.

    Consumes: the segment's bytes, behind the writer where it tells how far it is, or else from
    inside the gate. Produces: what is wrong with them. Waits for: nothing, except in `damage`.
    Unblocked by: the writer.
    """

    def __init__(self, key: str, version: int, mapped: Mapped) -> None:
        self.key, self.version, self.mapped = key, version, mapped
        self.inside = self._is_checked = False
        self._damage: str | None = None
        self._naps = NAPS
        self._ahead: Follower | None = None
        if mapped.is_followed:
            segment = mapped.segment
            places = ranges(mapped.layout)
            self._ahead = Follower(segment.buffer, *places, segment.progress, version)

    def is_of(self, goal: Offer | Upcoming) -> bool:
        """Whether it is this version, in this segment."""
        return (self.key, self.version) == (goal.segment, goal.version)

    @property
    def running(self) -> bool:
        """Whether a thread sums it."""
        return self._ahead is not None and self._ahead.running

    def is_summed(self) -> bool:
        """Whether a thread is through with it, or `damage` is to do all."""
        while self._naps and self.running:
            self._naps -= 1
            time.sleep(NAP_S)
        return not self.running

    def damage(self, offer: Offer) -> str | None:
        """Where other bytes are found than were published, from inside the gate; found out once."""
        if not self._is_checked:
            self._damage, self._is_checked = self._found(offer), True
        return self._damage

    def _found(self, offer: Offer) -> str | None:
        while self.running:
            time.sleep(NAP_S)
        layout, buffer = self.mapped.layout, self.mapped.segment.buffer
        pairs = None if self._ahead is None else self._ahead.pairs
        sums = summed(layout, buffer) if pairs is None else packed(folded(pairs))
        wrong = difference(layout, sums, offer.sums)
        if wrong is None and offer.digests:
            wrong = difference(layout, digested(layout, buffer), offer.digests)
        return wrong

    def close(self) -> None:
        """Stop, and step out of the segment."""
        self.stop()
        if self.inside:
            self.mapped.segment.leave()

    def stop(self) -> None:
        """Have no thread read it."""
        if self._ahead is not None:
            self._ahead.close()


class Attached:
    """Tensors that hold a version; at most one segment stays entered, that of the version that they
    are views of.

    Consumes: segments that somebody has entered. Produces: new values in the tensors.
    Waits for: nothing. Unblocked by: -
    """

    def __init__(self, port: ReaderPort, whose: str, *, view: bool) -> None:
        """`view`: turn parameters into views where that can be."""
        self.torn = False
        """Whether a version was taken in half, by an error."""
        self._port, self._whose, self._view = port, whose, view
        self._parts: dict[str, LocalTensor] | None = None
        self._layout: FlatLayout | None = None
        self._targets: list[list[LocalTensor]] = []
        self._mapped: dict[str, Mapped] = {}
        self._inside: Mapped | None = None

    @property
    def named(self) -> bool:
        """Whether it knows its tensors."""
        return self._parts is not None

    def name(
        self, tensors: Mapping[str, torch.Tensor], slices: Mapping[str, RankSlice] | None
    ) -> None:
        """These are the tensors; one without a slice is whole. LayoutMismatch when a slice does not
        fit its own, or is of none.
        """
        slices = slices or {}
        for name in slices.keys() - tensors.keys():
            raise LayoutMismatch(
                f"{self._whose} names a slice of a tensor that it does not have; found '{name}';"
                " give slices of its tensors alone"
            )
        self._parts = {
            name: LocalTensor.of(name, tensor, slices.get(name), self._whose)
            for name, tensor in tensors.items()
        }

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
                with copying():
                    copy([t for t, _ in mapped.copies], [s for _, s in mapped.copies])
            for parameter, source in mapped.flips:
                parameter.data = source
            self.torn = False
        finally:
            if self.torn or not mapped.flips:
                mapped.segment.leave()
        before, self._inside = self._inside, mapped if mapped.flips else None
        if before is not None and before is not mapped:
            self._leave(before)

    def let_go(self) -> None:
        """Close all segments: views keep only name, shape and dtype until the next `take`."""
        self._close(
            lambda source: torch.zeros((), dtype=source.dtype, device=source.device).expand(
                source.shape
            )
        )

    def close(self) -> None:
        """Close all segments; the tensors keep their version, in memory of their own."""
        self._close(torch.clone)

    def _close(self, value: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """`value`: what views of a segment become."""
        viewed, self._inside = self._inside, None
        if viewed is not None:
            for parameter, source in viewed.flips:
                if parameter.data_ptr() == source.data_ptr():
                    parameter.data = value(source)
            self._leave(viewed)
        self.forget()

    def _leave(self, mapped: Mapped) -> None:
        mapped.segment.leave()
        if mapped not in self._mapped.values():
            mapped.segment.close()
