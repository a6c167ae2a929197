"""A trainer rank's end of the sharded weight plane: it sends its own shard, to those who need a part of it."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import torch

from transport.errors import PeerGone
from transport.weights.deltas.chunks import Change, Gathered, changes, sizes
from transport.weights.errors import WeightError
from transport.weights.executors.address import Address
from transport.weights.layout.layout import Layout
from transport.weights.layout.reshard import reshard
from transport.weights.protocol.handshake import ReaderStatus
from transport.weights.protocol.messages import Note
from transport.weights.sharded.chunks import parcels
from transport.weights.sharded.control import Control, Hall
from transport.weights.sharded.groups import Deadlines
from transport.weights.sharded.member import Source
from transport.weights.sharded.process_group import Backend
from transport.weights.sharded.rounds import Coordinator
from transport.weights.sharded.staging import Lent, Snapshots, Staging, Tensors, checked
from transport.weights.sharded.steps import Step, compiled, recent
from transport.weights.sharded.transfer import DEPTH, Exchange, Outcome
from transport.weights.sharded.words import WHOLE, Form

BUCKET_BYTES = 16 << 20


class ShardedWriter:
    """Publishes versions of one model, of which this trainer rank holds a shard, to any number of reader groups.

    Every rank of the trainer makes one and publishes the same versions in the same order; rank 0 coordinates. For a
    single-threaded loop; versions travel in threads of their own while the loop does something else.

    Consumes: tensors from the trainer. Produces: its shard, in the memory of the ranks that need it.
    Waits for: nothing, except in `settle`. Unblocked by: the end of the transfers, at the latest their deadline.
    """

    def __init__(
        self,
        layout: Layout,
        rank: int,
        address: str,
        *,
        ranks: int | None = None,
        backend: Backend = "gloo",
        device: str | torch.device = "cpu",
        hold: Literal["snapshot", "until_settle"] = "snapshot",
        bucket_bytes: int = BUCKET_BYTES,
        threads: int = 1,
        link_bytes_per_s: float | None = None,
        deadlines: Deadlines | None = None,
        clock: Callable[[], float] = time.monotonic,
        attempt: int = 0,
    ) -> None:
        """`layout`: of all ranks of the trainer. `ranks`: how many they are, if some of the last hold nothing.

        `address`: ipc:///folder/name.sock or tcp://127.0.0.1:port; the same at every rank. `hold`: "snapshot"
        copies each version into one of at most two buffers, so that groups may take it at any later time; with
        "until_settle" it is sent from the trainer's tensors, which must not change until `settle` has returned.
        `device`: where versions are sent from; this rank's GPU with nccl. `bucket_bytes`: of a message, at most.
        `threads`: for the copy. `link_bytes_per_s`: to the readers; where it is told and slow, messages of a snapshot
        travel as deltas, if that is cheaper, to a rank that has the version before it; rank 0 decides whether any
        may. `attempt`: the scheduler's, at this process; a later one takes the rank's place, whatever clocks say.
        Rank 0 raises AddressTaken when another live writer has the address."""
        if link_bytes_per_s is not None and hold != "snapshot":
            raise WeightError(
                f"a delta needs the version before it; found hold='{hold}', which keeps none; take hold='snapshot', or "
                "leave link_bytes_per_s out"
            )
        self.layout, self.rank = layout, rank
        self.ranks = ranks if ranks is not None else layout.ranks
        self._local = layout.local(rank)
        self._deadlines = deadlines or Deadlines()
        self._clock = clock
        self._device = torch.device(device)
        self._lent = hold == "until_settle"
        self._staging: Staging = (
            Lent() if self._lent else Snapshots(layout, rank, self._device, part_bytes=bucket_bytes, threads=threads)
        )
        self._newest = -1
        self._link = link_bytes_per_s
        self._pinned: Counter[int] = Counter()
        self._sent: Counter[str] = Counter()
        self._pending: tuple[int, Tensors] | None = None
        self._closed = False
        member = Source(rank, self.ranks, layout.key, self._deadlines, clock(), incarnation=attempt)
        hall = Hall(address) if rank == 0 else None
        coordinator = None if hall is None else Coordinator(
            self.ranks, layout.key, layout.to_plain(), f"{hall.folder}/", backend=backend, bucket_bytes=bucket_bytes,
            deltas=link_bytes_per_s is not None, writer=secrets.randbits(62), now=clock(), deadlines=self._deadlines,
        )  # fmt: skip
        self._member, self._coordinator = member, coordinator
        self._control = Control(
            member, self._connect, socket=None if hall else Address(address).connected(), beat_s=self._deadlines.beat_s,
            transfer_s=self._deadlines.transfer_s, clock=clock, coordinator=coordinator, hall=hall,
        )  # fmt: skip
        self._control.start()

    @property
    def version(self) -> int:
        """The newest version that this rank can send, -1 for none."""
        return max(self._staging.versions(), default=-1)

    @property
    def pending(self) -> int | None:
        """The version that still waits for a free buffer."""
        return self._pending[0] if self._pending else None

    @property
    def readers(self) -> tuple[ReaderStatus, ...]:
        """What is known of each reader group, in the order of joining; rank 0 alone knows."""
        with self._control.changed:
            return self._coordinator.status(self._clock()) if self._coordinator else ()

    @property
    def faults(self) -> Mapping[str, str]:
        """What last ended an epoch of each reader group that ever lost one; rank 0 alone knows."""
        with self._control.changed:
            return dict(self._coordinator.faults) if self._coordinator else {}

    @property
    def sent_bytes(self) -> Mapping[str, int]:
        """Bytes of weights that this rank has sent to each reader group, of transfers that came to their end."""
        with self._control.changed:
            return dict(self._sent)

    @property
    def socket(self) -> None:
        """Nothing that a loop must wait for: the control thread answers."""
        return None

    def publish(self, version: int, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Make a version available: True. False: both buffers are being sent, and a later `poll` copies it.

        `tensors`: this rank's local tensors by the layout's names. Where they are copied later, they must keep
        their values until then, or until the next publish, which replaces them. Versions must rise; any may be left
        out. PeerGone when a rank of the trainer is gone; LayoutMismatch when names or shapes differ."""
        self._check()
        if version <= self._newest:
            raise WeightError(
                f"versions must rise; found {version} after {self._newest}; publish each step once, in order"
            )
        checked(self._local, self.rank, tensors)
        with self._control.changed:
            if self._lent and self._member.kept:
                raise WeightError(
                    f"version {max(self._member.kept)} is still being sent from the trainer's tensors; found version "
                    f"{version} published over it; call settle before they change"
                )
        self._newest, self._pending = version, (version, dict(tensors))
        self._stage()
        return self._pending is None

    def settle(self, timeout_s: float) -> bool:
        """Wait until no transfer reads the trainer's tensors; at once where they were copied.

        False when the time was up: the transfers are given up, and their groups come back for a later version. In
        both cases the tensors may change now."""
        self._check()
        if not self._lent:
            return True
        deadline = self._clock() + timeout_s
        with self._control.changed:
            self._control.act(self._member.hold(set()))
            while self._member.kept and (left := deadline - self._clock()) > 0:
                self._control.changed.wait(min(left, 0.5))
                self._check()
            done = not self._member.kept
            self._control.act(self._member.give_up())
            self._staging.free(set())
        return done

    def tell(self, note: Note) -> None:
        """Replace the note that every reader gets; what rank 0 says counts."""
        self._check()
        with self._control.changed:
            if self._coordinator:
                self._coordinator.tell(note)
                self._control.ring()

    def poll(self) -> None:
        """Copy a waiting version if a buffer is free by now. PeerGone when a rank of the trainer is gone."""
        self._check()
        if self._pending:
            self._stage()

    def close(self) -> None:
        """Leave the address; readers keep the version they have."""
        if self._closed:
            return
        self._closed, self._pending = True, None
        self._control.close(self._member.leaving())

    def _stage(self) -> None:
        assert self._pending is not None
        version, tensors = self._pending
        with self._control.changed:
            if not self._staging.free(self._member.kept | set(self._pinned)):
                self._control.act(self._member.hold(set()))
                return
            self._control.act(self._member.hold(self._staging.versions()))
        self._staging.fill(version, tensors)
        self._pending = None
        with self._control.changed:
            self._control.act(self._member.hold(self._staging.versions()))

    @contextlib.contextmanager
    def _pins(self, versions: set[int]) -> Iterator[set[int]]:
        """Those of these versions that are here, and stay until the end."""
        with self._control.changed:
            found = versions & self._staging.versions()
            self._pinned.update(found)
        try:
            yield found
        finally:
            with self._control.changed:
                self._pinned -= Counter(found)

    def _connect(self, form: Form, stop: threading.Event) -> _Sending:
        return _Sending(self, form, stop)

    def _check(self) -> None:
        if self._closed:
            raise WeightError("this writer is closed; found a call after close; make a new one")
        if self._control.error:
            raise WeightError("the control thread of this writer has ended; see its error") from self._control.error
        if self._member.failure:
            raise PeerGone(
                f"rank {self.rank} of {self.ranks} cannot send weights; found: {self._member.failure}; "
                "look at that rank, and start the trainer again"
            )


class _Sending:
    """The sender's end of one epoch."""

    def __init__(self, writer: ShardedWriter, form: Form, stop: threading.Event) -> None:
        plan = reshard(writer.layout, Layout.from_plain(form.layout))
        found = {form.sources + to: parcels(plan, writer.rank, to, form.bucket_bytes) for to in range(form.ranks)}
        self._parcels = {peer: cut for peer, cut in found.items() if cut}
        self._depth = max(DEPTH, len(self._parcels))
        self._first = form.sources + writer.rank % form.ranks
        self._writer, self._staging, self._device = writer, writer._staging, writer._device
        self._group, self._deltas = form.group, form.deltas
        self._steps: dict[int, list[Step]] = {}
        self._gathered: dict[int, Gathered] = {}
        self._exchange = Exchange(
            form, writer.rank, self._parcels, self._device, writer._deadlines.form_s, stop, writer._clock
        )

    def move(self, version: int, deadline: float) -> Outcome:
        key, tensors = self._staging.of(version)
        steps = recent(self._steps, key, lambda: self._compiled(tensors))
        messages = self._agreed(version, steps, deadline) if self._deltas else steps
        outcome = self._exchange.send(messages, self._staging.sums(version), self._depth, deadline)
        if outcome.state == WHOLE:
            with self._writer._control.changed:
                self._writer._sent[self._group] += sum(message.nbytes for message in messages)
        return outcome

    def abort(self) -> None:
        self._exchange.abort()

    def _compiled(self, tensors: Tensors) -> list[Step]:
        return compiled(self._parcels, tensors, sending=True, depth=self._depth, device=self._device, first=self._first)

    def _agreed(self, version: int, steps: Sequence[Step], deadline: float) -> Sequence[Step | Change]:
        """The messages as their receivers, who tell what version they have and are told the sizes, expect them."""
        asked = self._exchange.bases(self._parcels, deadline)
        messages: Sequence[Step | Change] = steps
        if (link := self._writer._link) is not None:
            with self._writer._pins(set(asked.values()) - {version}) as found:
                bases = {peer: (base, self._gather(base)) for peer, base in asked.items() if base in found}
                if bases:
                    known = self._staging.sums(version)
                    messages = changes(steps, self._gather(version), bases, known, link)
        self._exchange.announce(sizes(messages), deadline)
        return messages

    def _gather(self, version: int) -> Gathered:
        key, tensors = self._staging.of(version)
        return recent(self._gathered, key, lambda: Gathered(self._parcels, tensors, sending=True, device=self._device))
