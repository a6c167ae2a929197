"""A sharded writer and reader between which chunks travel as deltas, where the link is slow and
that is cheaper.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from transport.weights.deltas.recoding import WHOLE_CHUNK, Gathered, Patch, changes, patches, sizes
from transport.weights.errors import WeightError
from transport.weights.protocol.messages import DAMAGED, FormGroup
from transport.weights.protocol.ranks import TransferOutcome
from transport.weights.sharded.process_group import ONE_SIDED
from transport.weights.sharded.reader import Receiving, ShardedReader
from transport.weights.sharded.receive_buffers import Buffer, ReceiveBuffers
from transport.weights.sharded.rendezvous import Meeting
from transport.weights.sharded.steps import ChunkMessage, recent
from transport.weights.sharded.transfer import DEPTH, Outbound
from transport.weights.sharded.writer import Sending, ShardedWriter


class DeltaWriter(ShardedWriter):
    """Sends a rank that has an earlier version what changed since, bit for bit."""

    deltas = True

    def __init__(self, *arguments: Any, link_bytes_per_s: float, **knobs: Any) -> None:
        """`link_bytes_per_s`: to the readers. All else as for `ShardedWriter`."""
        if knobs.get("hold", "snapshot") != "snapshot":
            raise WeightError(
                f"a delta needs the version before it; found hold='{knobs['hold']}', which keeps"
                " none; take hold='snapshot', or a ShardedWriter"
            )
        if knobs.get("backend") in ONE_SIDED:
            raise WeightError(
                f"a delta pays on a slow link; found backend='{knobs['backend']}', which writes"
                " within a machine; take a ShardedWriter"
            )
        self._link = link_bytes_per_s
        self._pinned: Counter[int] = Counter()
        super().__init__(*arguments, **knobs)

    @contextmanager
    def pins(self, versions: set[int]) -> Iterator[set[int]]:
        """Those of these versions that are here, and stay until the end."""
        with self._control.changed:
            pinned = versions & self._staging.versions()
            self._pinned.update(pinned)
        try:
            yield pinned
        finally:
            with self._control.changed:
                self._pinned -= Counter(pinned)

    def _needed(self) -> set[int]:
        return super()._needed() | set(self._pinned)

    def _connect(self, form: FormGroup, meeting: Meeting) -> Sending:
        return _SendingDeltas(self, form, meeting)


class _SendingDeltas(Sending):
    def __init__(self, writer: DeltaWriter, form: FormGroup, meeting: Meeting) -> None:
        self._link, self._pins = writer._link, writer.pins
        self._gathered: dict[int, Gathered] = {}
        super().__init__(writer, form, meeting)

    def _agreed(
        self, version: int, steps: list[ChunkMessage], deadline: float
    ) -> Sequence[Outbound]:
        """Receivers send their versions; the sender answers with the sizes."""
        counts = {step.peer: 1 for step in steps}
        base_versions = self._exchange.agree({}, counts, deadline)
        messages: Sequence[Outbound] = steps
        with self._pins({base for (base,) in base_versions.values()} - {version}) as pinned:
            bases = {
                peer: (base, self._gather(base))
                for peer, (base,) in base_versions.items()
                if base in pinned
            }
            if bases:
                messages = changes(
                    steps, self._gather(version), bases, self._staging.sums(version), self._link
                )
        self._exchange.agree(sizes(messages), {}, deadline)
        return messages

    def _gather(self, version: int) -> Gathered:
        key, tensors = self._staging.of(version)
        return recent(
            self._gathered,
            key,
            lambda: Gathered(self._chunks, tensors, sending=True, device=self._device),
        )


class DeltaReader(ShardedReader):
    """Takes what changed since a version that it has; whole versions too, where the trainer sends
    no deltas.
    """

    def _connect(self, form: FormGroup, meeting: Meeting) -> Receiving:
        assert self._buffers is not None
        return (_ReceivingDeltas if form.deltas else Receiving)(self, self._buffers, form, meeting)


class _ReceivingDeltas(Receiving):
    def __init__(
        self, reader: ShardedReader, buffers: ReceiveBuffers, form: FormGroup, meeting: Meeting
    ) -> None:
        self._usable = True
        self._gathered: dict[int, Gathered] = {}
        super().__init__(reader, buffers, form, meeting)

    def _receive(self, steps: list[ChunkMessage], deadline: float) -> TransferOutcome:
        with self._lock:
            base = self._buffers.base(self._epoch) if self._usable else None
        messages = self._agreed(steps, base, deadline)
        outcome = self._exchange.receive(self._exchange.expect(messages, DEPTH), deadline)
        if outcome.state == DAMAGED and any(isinstance(message, Patch) for message in messages):
            self._usable = False
        return outcome

    def _agreed(
        self, steps: list[ChunkMessage], base: Buffer | None, deadline: float
    ) -> Sequence[ChunkMessage | Patch]:
        """The messages as their senders will send them, knowing what version this rank has."""
        exact = set(self._chunks) - {step.peer for step in steps if step.casts}
        bases = {peer: [base.version if base and peer in exact else -1] for peer in self._chunks}
        peer_sizes = self._exchange.agree(
            bases, {peer: len(cut) for peer, cut in self._chunks.items()}, deadline
        )
        if base is None or all(
            size == WHOLE_CHUNK for of_peer in peer_sizes.values() for size in of_peer
        ):
            return patches(steps, peer_sizes, None)
        gathered = recent(
            self._gathered,
            base.number,
            lambda: Gathered(self._chunks, base.views, sending=False, device=self._device),
        )
        return patches(steps, peer_sizes, gathered)
