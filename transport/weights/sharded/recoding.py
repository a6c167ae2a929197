"""Messages that carry what changed since the version their receiver has, where that is cheaper than
the whole.

Both ends gather a message of that version into the same bytes: its fragments at their offsets,
zeros between them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from transport.errors import MessageError
from transport.weights.errors import WeightError
from transport.weights.executors.device import TransferDevice
from transport.weights.layout.flat import ALIGNMENT
from transport.weights.sharded.chunks import Chunk, PlaceKey
from transport.weights.sharded.delta import Delta, apply_delta, encode_delta
from transport.weights.sharded.staging import StagedSums, Tensors
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
        device: TransferDevice,
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
        memory = torch.empty(size, dtype=torch.uint8, device=device.device)
        for step in self._steps.values():
            step.use(memory, sending=True)

    def message(self, peer: int, tag: int) -> tuple[torch.Tensor, torch.Tensor]:
        """uint8[nbytes], which the next call overwrites, and the checksum of each fragment,
        int64[n, 2].
        """
        step = self._steps[peer, tag]
        step.data.zero_()
        sums = torch.zeros((len(step.names), 2), dtype=torch.int64, device=step.data.device)
        step.pack(sums)
        return step.data, sums


class DeltaMessage:
    """A message to one peer, as a delta."""

    def __init__(self, step: ChunkMessage, delta: Delta, sums: torch.Tensor) -> None:
        """`step`: the message in full. `sums`: of its fragments, int64[n, 2]."""
        self.peer, self.tag, self.names = step.peer, step.tag, step.names
        self.data = delta.to_bytes()
        self.nbytes = len(self.data)
        self._sums = sums

    def pack(self, sums: torch.Tensor) -> None:
        """It is ready to be sent: add the checksums of the whole message's fragments."""
        sums += self._sums

    def known(self, rows: Mapping[PlaceKey, int]) -> None:
        """None: it has them."""

    def sum(self, sums: torch.Tensor) -> None:
        """Nothing: `pack` adds them."""


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

    def unpack(self, sums: torch.Tensor) -> bool:
        """Put the message into its places, and add the checksum of each fragment; False where the
        delta is damaged or unfit.
        """
        message, _ = self._base.message(self.peer, self.tag)
        try:
            apply_delta(message, Delta.from_bytes(self.data))
        except (MessageError, WeightError):
            return False
        finally:
            self._data = None
        self._step.data.copy_(message)
        return self._step.unpack(sums)


def changes(
    steps: Sequence[ChunkMessage],
    current: Gathered,
    bases: Mapping[int, tuple[int, Gathered]],
    staged: StagedSums | None,
    link_bytes_per_s: float,
) -> list[ChunkMessage | DeltaMessage]:
    """What to send: of each message the delta from its peer's version, where that is cheaper, else
    itself.

    `bases`: by peer, the version that it has. `staged`: checksums of the current version.
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
            staged_rows = step.known(staged.rows) if staged else None
            sums = staged.values[staged_rows] if staged and staged_rows is not None else sums
        messages.append(step if delta is None else DeltaMessage(step, delta, sums))
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
