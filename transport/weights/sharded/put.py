"""One-sided transfers within a machine: each source rank writes its boxes into the receivers'
buffers, where they stay.

A receiver tells its senders which buffer is free as soon as one is. A sender copies straight into
it, casting on the way, and its messages only say that a chunk is there; then it is verified as any
other. A buffer of a transfer that did not come to its end is never used again: a sender that was
stopped in the middle may still write to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from transport.codec import Codec, Message
from transport.weights.errors import SegmentError
from transport.weights.executors.device import TransferDevice
from transport.weights.executors.peer_memory import DeviceMemory, Handle, PeerBuffer, PeerMemory
from transport.weights.layout.flat import FlatLayout
from transport.weights.memory import views
from transport.weights.sharded.chunks import Chunk, PlaceKey, place
from transport.weights.sharded.staging import Buffer, Tensors
from transport.weights.sharded.steps import recent
from transport.weights.sharded.transfer import Arriving, GroupExchange, Hearing

HANDLE_WORDS = 128
"""Of what a receiver tells, int64: the bytes of a `BufferOffer`, and those."""


class BufferOffer(Message, kw_only=True):
    """Receiver: write the next version here."""

    handle: Handle


CODEC: Codec[BufferOffer] = Codec("put", 1, BufferOffer)


def peer_memory(
    backend: str, device: torch.device, memory: DeviceMemory | None
) -> PeerMemory | None:
    """What a receiver's buffers are taken from; None where messages carry the bytes. `memory`
    stands in for a GPU's.
    """
    if backend == "cuda_ipc":
        if memory is None:
            from transport.weights.executors.cuda_ipc import CudaMemory

            memory = CudaMemory(device)
        return PeerMemory(memory)
    return PeerMemory() if backend == "shared_memory" else None


class Deposit:
    """A chunk that its sender writes into the receiver's buffer; the message announces it."""

    def __init__(
        self,
        peer: int,
        tag: int,
        chunk: Chunk,
        ours: Tensors,
        theirs: Tensors,
        device: TransferDevice,
    ) -> None:
        self.peer, self.tag = peer, tag
        self.names = [part.copy.tensor for part in chunk.fragments]
        self.nbytes = sum(fragment.nbytes for fragment in chunk.fragments)
        self.data = torch.zeros(1, dtype=torch.uint8)
        parts = chunk.fragments
        sources = [ours[part.copy.source_name].detach()[part.source] for part in parts]
        targets = [theirs[part.copy.destination_name][part.destination] for part in parts]
        self._keys = [(part.copy.source_name, place(part.source)) for part in parts]
        self._same = all(a.dtype == b.dtype for a, b in zip(sources, targets, strict=True))
        shaped = [
            source.view(target.shape) for source, target in zip(sources, targets, strict=True)
        ]
        self._copier = device.copier(targets, shaped)

    def pack(self, sums: torch.Tensor) -> None:
        """Write it, and add the checksum of each fragment."""
        self._copier.start(sums=sums)

    def known(self, rows: Mapping[PlaceKey, int]) -> list[int] | None:
        """As of `ChunkMessage`."""
        at = [rows.get(key, -1) for key in self._keys] if self._same else [-1]
        return None if -1 in at else at

    def sum(self, sums: torch.Tensor) -> None:
        """Nothing: `pack` adds them."""


class DepositedChunk:
    """A chunk in this rank's buffer, announced by a message."""

    def __init__(
        self, peer: int, tag: int, chunk: Chunk, ours: Tensors, device: TransferDevice
    ) -> None:
        self.peer, self.tag = peer, tag
        self.data = torch.zeros(1, dtype=torch.uint8)
        self.names = [part.copy.tensor for part in chunk.fragments]
        self._summer = device.summer(
            [ours[part.copy.destination_name][part.destination] for part in chunk.fragments]
        )

    def unpack(self, sums: torch.Tensor) -> bool:
        """Add the checksum of each fragment as it lies there; True."""
        self._summer.start(sums)
        return True


class _Opened:
    """A receiver's buffer, and the chunks that are written into it."""

    def __init__(self, buffer: PeerBuffer, flat: FlatLayout) -> None:
        self._buffer = buffer
        named = zip(flat.tensors, views(flat, buffer.buffer), strict=True)
        self.views = {spec.name: view for spec, view in named}
        self.steps: dict[int, list[Deposit]] = {}

    def close(self) -> None:
        self.views.clear()
        self.steps.clear()
        self._buffer.close()


class Deposits:
    """What one source rank writes in an epoch.

    Consumes: the receivers' places. Produces: bytes there. Waits for: the places, in `steps`.
    Unblocked by: receivers.
    """

    def __init__(
        self,
        exchange: GroupExchange,
        chunks: Mapping[int, Sequence[Chunk]],
        flats: Mapping[int, FlatLayout],
        memory: PeerMemory,
        device: TransferDevice,
    ) -> None:
        """`chunks`, `flats`: what goes to each peer, round by round, and how
        its buffers are laid out. `device`: where this rank's tensors lie.
        """
        self._exchange, self._chunks, self._flats, self._memory = exchange, chunks, flats, memory
        self._device = device
        self._opened: dict[int, dict[bytes, _Opened]] = {peer: {} for peer in chunks}
        self._places = self._asked()

    def steps(self, key: int, tensors: Tensors, deadline: float) -> list[Deposit]:
        """The next transfer's: nothing for a receiver that has no room.

        `key`: equal while the tensors lie where they lay. SegmentError where a buffer cannot be
        opened.
        """
        places = self._places.heard(deadline)
        self._places = self._asked()
        decoded = {peer: _told(words) for peer, words in places.items()}
        return [
            step
            for peer, place in decoded.items()
            if place
            for step in self._steps_to(peer, place, key, tensors)
        ]

    def close(self) -> None:
        """Let go of all buffers."""
        for opened in self._opened.values():
            while opened:
                opened.popitem()[1].close()

    def _asked(self) -> Hearing:
        return self._exchange.hear(dict.fromkeys(self._chunks, HANDLE_WORDS))

    def _steps_to(self, peer: int, body: bytes, key: int, tensors: Tensors) -> list[Deposit]:
        opened = recent(self._opened[peer], body, lambda: self._open(peer, body), _Opened.close)
        return recent(opened.steps, key, lambda: self._compiled(peer, tensors, opened))

    def _open(self, peer: int, body: bytes) -> _Opened:
        buffer, flat = self._memory.open(CODEC.decode(body).handle), self._flats[peer]
        if len(buffer.buffer) != flat.nbytes:
            nbytes = len(buffer.buffer)
            buffer.close()
            raise SegmentError(
                f"the buffer of a receiver is not laid out as its layout says; found {nbytes} bytes"
                f" for {flat.nbytes}; trainer and generators must run the same release"
            )
        return _Opened(buffer, flat)

    def _compiled(self, peer: int, tensors: Tensors, opened: _Opened) -> list[Deposit]:
        return [
            Deposit(peer, number, chunk, tensors, opened.views, self._device)
            for number, chunk in enumerate(self._chunks[peer], 1)
        ]


class Arrivals:
    """What one destination rank is written in an epoch.

    Consumes: a free buffer. Produces: its place, for the senders. Waits for: nothing.
    """

    def __init__(
        self,
        exchange: GroupExchange,
        chunks: Mapping[int, Sequence[Chunk]],
        device: TransferDevice,
    ) -> None:
        """`chunks`: what comes from each peer, round by round. `device`: where."""
        self._exchange, self._chunks, self._device = exchange, chunks, device
        self._steps: dict[int, list[DepositedChunk]] = {}
        self._telling: list[Any] = []

    def expect(self, buffer: Buffer) -> Arriving:
        """The next transfer's, into this buffer."""
        assert buffer.own is not None, "buffers are taken from the epoch's memory"
        steps = recent(self._steps, buffer.number, lambda: self._compiled(buffer))
        arriving = self._exchange.expect(steps, len(steps))
        self._tell(_words(CODEC.encode(BufferOffer(handle=buffer.own.handle))))
        return arriving

    def refuse(self) -> None:
        """There is no room for the next transfer."""
        self._tell(_words(b""))

    def close(self) -> None:
        """Let go of all buffers."""
        self._steps.clear()

    def _tell(self, words: list[int]) -> None:
        self._telling = self._exchange.tell(dict.fromkeys(self._chunks, words))

    def _compiled(self, buffer: Buffer) -> list[DepositedChunk]:
        return [
            DepositedChunk(peer, number, chunk, buffer.views, self._device)
            for peer, cut in self._chunks.items()
            for number, chunk in enumerate(cut, 1)
        ]


def _words(body: bytes) -> list[int]:
    assert len(body) <= 8 * HANDLE_WORDS - 8, "a handle is short"
    words: list[int] = np.frombuffer(body.ljust(8 * HANDLE_WORDS - 8, b"\0"), "<i8").tolist()
    return [len(body), *words]


def _told(words: Sequence[int]) -> bytes:
    return np.array(words[1:], "<i8").tobytes()[: words[0]]
