"""Messages that carry what changed since the version their receiver has, where that is cheaper than
the whole.

Both ends gather a message of that version into the same bytes: its fragments at their offsets,
zeros between them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from transport.errors import MessageError
from transport.weights.deltas.delta import Delta, apply_delta, encode_delta
from transport.weights.errors import WeightError
from transport.weights.layout.flat import ALIGNMENT
from transport.weights.sharded.chunks import Chunk, Sums
from transport.weights.sharded.staging import Tensors
from transport.weights.sharded.steps import ChunkMessage, step_of
from transport.weights.sharded.transfer import Outbound

WHOLE_CHUNK = -1
"""Instead of the bytes of a delta: the message travels as it is."""
SCAN_BYTES_PER_S = 0.8e9
"""Of messages of which one word in a hundred changed: gathered and compared by the sender, then
gathered, changed and verified by the receiver, on a core each; about a third of it without a C
compiler."""


class Gathered:
    """The messages of a version that lies in one rank's tensors, one at a time, in memory of their
    own.
    """

    def __init__(
        self,
        chunks: Mapping[int, Sequence[Chunk]],
        tensors: Tensors,
        *,
        sending: bool,
        device: torch.device,
    ) -> None:
        """`tensors`: the source's if `sending`, else the destination's. `device`: where messages
        lie.
        """
        self._steps = {
            (step.peer, step.tag): step
            for peer, peer_chunks in chunks.items()
            for step in (
                step_of(peer, at + 1, chunk, tensors, sending, device)
                for at, chunk in enumerate(peer_chunks)
            )
        }
        size = (
            -(-max((step.nbytes for step in self._steps.values()), default=0) // ALIGNMENT)
            * ALIGNMENT
        )
        memory = torch.empty(size, dtype=torch.uint8, device=device)
        for step in self._steps.values():
            step.use(memory, sending=True)

    def message(self, peer: int, tag: int) -> tuple[torch.Tensor, list[int]]:
        """uint8[nbytes], which the next call overwrites, and the checksum of each fragment."""
        step = self._steps[peer, tag]
        step.data.zero_()
        return step.data, step.pack() or []


class DeltaMessage:
    """A message to one peer, as a delta."""

    def __init__(self, step: ChunkMessage, delta: Delta, sums: list[int]) -> None:
        """`step`: the message in full. `sums`: of its fragments."""
        self.peer, self.tag = step.peer, step.tag
        self.data = delta.to_bytes()
        self.nbytes = len(self.data)
        self._sums = sums

    def pack(self) -> list[int]:
        """The checksum of each fragment: it is ready to be sent."""
        return self._sums

    def known(self, sums: Sums) -> list[int]:
        """Those that were made when it was gathered."""
        return self._sums

    def sums(self) -> list[int]:
        """Of the fragments of the whole message."""
        return self._sums


class Patch:
    """A message from one peer, as a delta on the version that `base` has."""

    def __init__(self, step: ChunkMessage, nbytes: int, base: Gathered) -> None:
        """`step`: the message in full. `nbytes`: of the delta."""
        self.peer, self.tag, self.names = step.peer, step.tag, step.names
        self._step, self._nbytes, self._base = step, nbytes, base
        self._data: torch.Tensor | None = None

    @property
    def data(self) -> torch.Tensor:
        """Where the delta lies, from the first use until it is unpacked."""
        if self._data is None:
            self._data = torch.empty(self._nbytes, dtype=torch.uint8, device=self._step.data.device)
        return self._data

    def unpack(self) -> list[int] | None:
        """Put the message into its places; the checksum of each fragment, None where the delta is
        damaged or unfit.
        """
        message, _ = self._base.message(self.peer, self.tag)
        try:
            apply_delta(message, Delta.from_bytes(self.data))
        except (MessageError, WeightError):
            return None
        finally:
            self._data = None
        self._step.data.copy_(message)
        return self._step.unpack()


def changes(
    steps: Sequence[ChunkMessage],
    current: Gathered,
    bases: Mapping[int, tuple[int, Gathered]],
    known: Sums,
    link_bytes_per_s: float,
) -> list[ChunkMessage | DeltaMessage]:
    """What to send: of each message the delta from its peer's version, where that is cheaper, else
    itself.

    `bases`: by peer, the version that it has. `known`: checksums of the current version.
    """
    messages: list[ChunkMessage | DeltaMessage] = []
    for step in steps:
        delta = None
        if step.peer in bases:
            version, base = bases[step.peer]
            before, _ = base.message(step.peer, step.tag)
            now, sums = current.message(step.peer, step.tag)
            delta = encode_delta(
                before, now, link_bytes_per_s, base=version, scan_bytes_per_s=SCAN_BYTES_PER_S
            )
        messages.append(
            step if delta is None else DeltaMessage(step, delta, step.known(known) or sums)
        )
    return messages


def sizes(messages: Sequence[Outbound]) -> dict[int, list[int]]:
    """By peer: the bytes of each delta, WHOLE_CHUNK where it is none."""
    by_peer: dict[int, list[int]] = {}
    for message in messages:
        size = message.nbytes if isinstance(message, DeltaMessage) else WHOLE_CHUNK
        by_peer.setdefault(message.peer, []).append(size)
    return by_peer


def patches(
    steps: Sequence[ChunkMessage], peer_sizes: Mapping[int, Sequence[int]], base: Gathered | None
) -> list[ChunkMessage | Patch]:
    """What to receive, given the peers' `sizes`. WeightError for impossible sizes."""
    sizes_left = {peer: iter(of_peer) for peer, of_peer in peer_sizes.items()}
    inbound: list[ChunkMessage | Patch] = []
    for step in steps:
        size = next(sizes_left[step.peer])
        if size == WHOLE_CHUNK:
            inbound.append(step)
        elif base is None or not 0 < size < step.nbytes:
            raise WeightError(
                f"a peer told of a delta that cannot be; found {size} bytes for a message of"
                f" {step.nbytes}; trainer and generators must run the same release"
            )
        else:
            inbound.append(Patch(step, size, base))
    return inbound
