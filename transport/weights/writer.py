"""The trainer's end of the weight plane: write each version once, offer it, never wait for a slow
reader.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from typing import Literal

import torch
import zmq

from transport.native import Copier
from transport.weights.errors import WeightError
from transport.weights.executors import Site, WriterSegment
from transport.weights.executors.shared_memory import SharedMemory
from transport.weights.layout.flat import FlatLayout
from transport.weights.memory import copying, digested, fill, filler
from transport.weights.protocol.membership import Timing
from transport.weights.protocol.messages import Note
from transport.weights.protocol.roster import Outgoing, ReaderStatus, Sent
from transport.weights.protocol.segments import SegmentOffers


class WeightWriter:
    """Publishes versions of one model's tensors to any number of readers. For a single-threaded
    loop.

    Consumes: tensors from the trainer; messages of the readers. Produces: offers.
    Waits for: a segment that every reader has left, at most `wait_s` per publish.
    Unblocked by: readers that adopt, leave or die; `pace.release_s` for those that do none of
    these.
    """

    def __init__(
        self,
        layout: FlatLayout,
        address: str | Site,
        *,
        wait_s: float = 0.0,
        checksum: Literal["buffer", "tensors"] = "buffer",
        pace: Timing | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`address`: ipc:///folder/name.sock or tcp://127.0.0.1:port, or a `Hub` in one process.

        `wait_s`: how long one publish may wait for a free segment. `checksum`: "buffer" has every
        version verified by the cheap sum per tensor alone, which is made while copying; "tensors"
        by xxh3 per tensor as well, another pass on either side. AddressTaken when another live
        writer has the address.
        """
        self.layout = layout
        self._port = (SharedMemory(address) if isinstance(address, str) else address).writer(
            self.poll
        )
        self._offers = SegmentOffers(layout.to_plain(), writer=secrets.randbits(62), pace=pace)
        self._segments: dict[str, WriterSegment] = {}
        self._abandoned: dict[str, WriterSegment] = {}
        self._fillers: dict[str, Copier] = {}
        self._named: list[str] = []
        self._chosen: list[tuple[str, tuple[int, ...]]] = []
        self._pending: tuple[int, list[torch.Tensor]] | None = None
        self._newest = -1
        self._wait_s, self._per_tensor = wait_s, checksum == "tensors"
        self._clock = clock
        self._closed = False

    @property
    def version(self) -> int:
        """The newest version that readers are offered, -1 for none."""
        return self._offers.newest

    @property
    def pending(self) -> int | None:
        """The version that still waits for a free segment."""
        return self._pending[0] if self._pending else None

    traffic = None
    """Nothing goes over a link."""

    @property
    def readers(self) -> tuple[ReaderStatus, ...]:
        """What is known of each reader, in the order of joining."""
        return self._offers.status(self._clock())

    @property
    def segments(self) -> tuple[int, int]:
        """(in use, abandoned): buffers of `layout.nbytes` bytes each; at most two are in use."""
        return len(self._segments), len(self._abandoned)

    @property
    def socket(self) -> zmq.Socket[bytes] | None:
        """What a loop may poll for reading; None in one process."""
        return self._port.socket

    @property
    def sent(self) -> Mapping[str, Sent]:
        """What the newest version that each reader has taken has cost: readers on this machine
        share a segment, which is written once.
        """
        return self._offers.sent

    def publish(self, version: int, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Write a version and offer it: True. False: no segment is free yet, and a later `poll`
        writes it.

        The tensors are read at that later time, so they must keep their values until then, or until
        the next publish, which replaces them: change them in place and publish them with no poll in
        between. Versions must rise; any may be left out. Names and shapes must be the layout's
        (LayoutMismatch).
        """
        self._require_open()
        if version <= self._newest:
            raise WeightError(
                f"versions must rise; found {version} after {self._newest}; publish each step once,"
                " in order"
            )
        self._newest, self._pending = version, (version, self._arranged(tensors))
        deadline = self._clock() + self._wait_s
        self.poll()
        while self._pending and (remaining_s := deadline - self._clock()) > 0:
            self._port.wait(min(remaining_s, 0.01))
            self.poll()
        return self._pending is None

    def settle(self, timeout_s: float) -> bool:
        """The tensors are about to change: forget a version that is not written yet. Never waits;
        True.
        """
        self._pending = None
        return True

    def tell(self, note: Note) -> None:
        """Replace the note that every reader, present or late, gets with its next message."""
        self._require_open()
        self._offers.tell(note)

    def poll(self) -> None:
        """Answer the readers, write a waiting version if a segment is free. Never waits."""
        self._require_open()
        now = self._clock()
        for peer, message in self._port.receive():
            self._send(self._offers.receive(peer, message, now))
        if self._pending and (segment := self._free_segment(now)):
            (version, sources), self._pending = self._pending, None
            self._write(segment, version, sources)
        for key in [key for key, segment in self._abandoned.items() if segment.seal()]:
            self._abandoned.pop(key).close()
            self._offers.freed(key)
        self._send(self._offers.tick(now))

    def close(self) -> None:
        """Leave the address and unlink the segments; readers keep the version they have."""
        if self._closed:
            return
        self._closed, self._pending = True, None
        self._fillers.clear()
        for segment in (*self._segments.values(), *self._abandoned.values()):
            segment.retire()
            segment.close()
        self._port.close()

    def _arranged(self, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """The layout's tensors, in its order; names are looked up when they are others than at the
        last publish.
        """
        if list(tensors) == self._named and all(
            tensors[name].shape == shape for name, shape in self._chosen
        ):
            return [tensors[name] for name, _ in self._chosen]
        arranged = [tied[0] for tied in self.layout.arrange(tensors, "the writer")]
        first: dict[str, str] = {}
        for name in tensors:
            first.setdefault(self.layout.aliases.get(name, name), name)
        self._named = list(tensors)
        self._chosen = [(first[spec.name], spec.shape) for spec in self.layout.tensors]
        return arranged

    def _free_segment(self, now: float) -> WriterSegment | None:
        for key in self._offers.order():
            if key is None:
                return self._new_segment()
            if self._segments[key].seal():
                return self._segments[key]
        stuck = self._offers.blocked(now)
        if stuck is None:
            return None
        self._fillers.pop(stuck)
        segment = self._abandoned[stuck] = self._segments.pop(stuck)
        segment.retire()
        self._send(self._offers.abandon(stuck))
        return self._new_segment()

    def _new_segment(self) -> WriterSegment:
        segment = self._port.segment(self.layout.nbytes)
        self._segments[segment.key] = segment
        self._fillers[segment.key] = filler(self.layout, segment)
        return segment

    def _write(self, segment: WriterSegment, version: int, sources: list[torch.Tensor]) -> None:
        began = self._clock()
        self._offers.writing(segment.key)
        if segment.progress is not None:
            # Before the message: readers sum a version only in a segment that is being written for
            # it.
            segment.progress[0] = version
            self._send(self._offers.upcoming(segment.key, version))
        whole = False
        try:
            with copying():
                sums = fill(self._fillers[segment.key], sources)
            digests = digested(self.layout, segment.buffer) if self._per_tensor else b""
            whole = True
        finally:
            segment.unseal(version if whole else -1)
        now = self._clock()
        outgoing = self._offers.written(
            segment.key, version, sums, digests, now, now - began, self.layout.nbytes
        )
        self._send(outgoing)

    def _send(self, out: Outgoing) -> None:
        for peer, message in out:
            if not self._port.send(peer, message):
                self._offers.lost(peer)

    def _require_open(self) -> None:
        if self._closed:
            raise WeightError("this writer is closed; found a call after close; make a new one")
