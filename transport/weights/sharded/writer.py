"""A trainer rank's end of the sharded weight plane: it sends its own shard, to those who need a
part of it.
"""

from __future__ import annotations

import functools
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

import torch

from transport.errors import PeerGone
from transport.weights.errors import WeightError
from transport.weights.executors.device import TransferDevice, transfer_device
from transport.weights.executors.peer_memory import DeviceMemory
from transport.weights.layout.layout import Layout
from transport.weights.protocol.membership import Deadlines
from transport.weights.protocol.messages import WHOLE, FormGroup, Note, StartTransfer
from transport.weights.protocol.ranks import SourceRank, TransferOutcome
from transport.weights.protocol.roster import ReaderStatus, Sent
from transport.weights.protocol.rounds import Coordinator
from transport.weights.sharded.chunks import chunks_from, joint_plan
from transport.weights.sharded.control import (
    ControlThread,
    CoordinatorSocket,
    MemberSocket,
    NetworkEnd,
)
from transport.weights.sharded.delta import Gathered, changes, sizes
from transport.weights.sharded.process_group import ONE_SIDED, Backend, Meeting
from transport.weights.sharded.put import Deposits, peer_memory
from transport.weights.sharded.staging import BorrowedTensors, Snapshots, Staging, Tensors, checked
from transport.weights.sharded.steps import ChunkMessage, compiled, recent
from transport.weights.sharded.transfer import DEPTH, GroupExchange, Outbound

BUCKET_BYTES = 16 << 20


class ShardedWriter:
    """Publishes versions of one model, of which this trainer rank holds a shard, to any number of
    reader groups.

    Every rank of the trainer makes one and publishes the same versions in the same order; rank 0
    coordinates. For a single-threaded loop; versions travel in threads of their own while the loop
    does something else.

    Consumes: tensors from the trainer. Produces: its shard, in the memory of the ranks that need
    it. Waits for: nothing, except in `settle`. Unblocked by: the end of the transfers, at the
    latest their deadline.
    """

    def __init__(
        self,
        layout: Layout,
        rank: int,
        address: str,
        *,
        ranks: int | None = None,
        backend: Backend = "gloo",
        device: str | torch.device | TransferDevice = "cpu",
        hold: Literal["snapshot", "until_settle"] = "snapshot",
        bucket_bytes: int = BUCKET_BYTES,
        link_bytes_per_s: float | None = None,
        deadlines: Deadlines | None = None,
        clock: Callable[[], float] = time.monotonic,
        attempt: int = 0,
        memory: DeviceMemory | None = None,
        host: NetworkEnd | None = None,
        listener: CoordinatorSocket | None = None,
    ) -> None:
        """`layout`: of all ranks of the trainer. `ranks`: how many they are, if some of the last
        hold nothing.

        `address`: ipc:///folder/name.sock or tcp://127.0.0.1:port; with `host`, any
        tcp://host:port; the same at every rank. `listener`: rank 0's that is bound there already.
        `backend`: shared_memory and cuda_ipc write straight into the memory of readers, all of
        which are on this machine. `hold`: "snapshot" copies each version into one of at most two
        buffers, so that groups may take it at any later time; with "until_settle" it is sent from
        the trainer's tensors, which must not change until `settle` has returned. `device`: where
        versions are sent from; with nccl and cuda_ipc this rank's GPU, and then `publish` and
        `settle` are called on the stream that changes the tensors. `bucket_bytes`: of a message, at
        most.  `link_bytes_per_s`: to readers, where it is slow: a rank that
        has an earlier version is sent what changed since, bit for bit; WeightError where none is
        kept, or nothing is sent. `attempt`: the scheduler's, at this process; a later one
        takes the rank's place, whatever clocks say. `memory`: stands in for a GPU's, by cuda_ipc.
        Rank 0 raises AddressTaken when another live writer has the address.
        """
        if link_bytes_per_s is not None:
            _check_deltas(hold, backend)
        self.layout, self.rank = layout, rank
        self.ranks = ranks if ranks is not None else layout.ranks
        self._local = layout.local(rank)
        self._deadlines = deadlines or Deadlines()
        self._clock = clock
        self._device = transfer_device(device)
        self._memory_of = functools.cache(
            lambda backend: peer_memory(backend, self._device.device, memory)
        )
        self._borrows = hold == "until_settle"
        self._staging: Staging = (
            BorrowedTensors(self._device)
            if self._borrows
            else Snapshots(layout, rank, self._device, part_bytes=bucket_bytes)
        )
        self._newest = -1
        self._sent: Counter[str] = Counter()
        self._pending: tuple[int, Tensors] | None = None
        self._closed = False
        self._link_bytes_per_s = link_bytes_per_s
        self._pinned: Counter[int] = Counter()
        member = SourceRank(
            rank, self.ranks, layout.key, self._deadlines, clock(), incarnation=attempt
        )
        keys = host.keys if host else None
        listener = (listener or CoordinatorSocket(address, keys, attempt)) if rank == 0 else None
        coordinator = (
            None
            if listener is None
            else Coordinator(
                self.ranks,
                layout.key,
                layout.to_plain(),
                listener.store,
                backend=backend,
                bucket_bytes=bucket_bytes,
                deltas=link_bytes_per_s is not None,
                joint=backend not in ONE_SIDED,
                writer=secrets.randbits(62),
                now=clock(),
                deadlines=self._deadlines,
            )
        )
        self._member, self._coordinator = member, coordinator
        self._control = ControlThread(
            member,
            self._connect,
            line=None if listener else MemberSocket(address, keys),
            host=host.address if host else "",
            deadlines=self._deadlines,
            clock=clock,
            coordinator=coordinator,
            listener=listener,
        )
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
    def sent(self) -> Mapping[str, Sent]:
        """What the newest version that each reader group has whole has taken; rank 0 alone
        knows.
        """
        with self._control.changed:
            return self._coordinator.sent if self._coordinator else {}

    @property
    def sent_bytes(self) -> Mapping[str, int]:
        """Bytes of weights that this rank has sent to each reader group, of transfers that came to
        their end.
        """
        with self._control.changed:
            return dict(self._sent)

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes of weights that all ranks of the trainer have sent to all groups, in transfers that
        came to their end, and what these would have been without deltas; rank 0 alone knows.
        """
        with self._control.changed:
            return self._coordinator.traffic if self._coordinator else (0, 0)

    @property
    def socket(self) -> None:
        """Nothing that a loop must wait for: the control thread answers."""
        return None

    def publish(self, version: int, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Make a version available: True. False: both buffers are being sent, and a later `poll`
        copies it.

        `tensors`: this rank's local tensors by the layout's names. Where they are copied later,
        they must keep their values until then, or until the next publish, which replaces them.
        Versions must rise; any may be left out. PeerGone when a rank of the trainer is gone;
        LayoutMismatch when names or shapes differ.
        """
        self._check()
        if version <= self._newest:
            raise WeightError(
                f"versions must rise; found {version} after {self._newest}; publish each step once,"
                " in order"
            )
        checked(self._local, self.rank, tensors)
        with self._control.changed:
            if self._borrows and self._member.kept:
                raise WeightError(
                    f"version {max(self._member.kept)} is still being sent from the trainer's"
                    f" tensors; found version {version} published over it; call settle before they"
                    " change"
                )
        self._newest, self._pending = version, (version, dict(tensors))
        self._stage()
        return self._pending is None

    def settle(self, timeout_s: float) -> bool:
        """The tensors are about to change: forget a version that is not copied yet, and wait until
        no transfer reads them; at once where they were copied.

        False when the time was up: the transfers are given up, and their groups come back for a
        later version. In both cases the tensors may change now.
        """
        self._check()
        self._pending = None
        if not self._borrows:
            self._device.after(self._staging.copied())
            return True
        deadline = self._clock() + timeout_s
        with self._control.changed:
            self._control.act(self._member.hold(set()))
            while self._member.kept and (remaining_s := deadline - self._clock()) > 0:
                self._control.changed.wait(min(remaining_s, 0.5))
                self._check()
            done = not self._member.kept
            self._control.act(self._member.give_up())
            self._staging.free(set())
        return done

    def tell(self, note: Note) -> None:
        """Replace the note that every reader gets; rank 0's counts."""
        self._check()
        with self._control.changed:
            if self._coordinator:
                self._coordinator.tell(note)
                self._control.wake()

    def poll(self) -> None:
        """Copy a waiting version if a buffer is free by now. PeerGone when a rank of the trainer is
        gone.
        """
        self._check()
        if self._pending:
            self._stage()

    def close(self) -> None:
        """Leave the address; readers keep the version they have."""
        if self._closed:
            return
        self._closed, self._pending = True, None
        self._control.close([self._member.leaving()])

    def _stage(self) -> None:
        assert self._pending is not None
        version, tensors = self._pending
        with self._control.changed:
            if not self._staging.free(self._needed()):
                self._control.act(self._member.hold(set()))
                return
            self._member.hold(self._staging.versions())  # who asks for another one is told
        self._staging.fill(version, tensors)
        self._pending = None
        with self._control.changed:
            self._control.act(self._member.hold(self._staging.versions()))

    def _needed(self) -> set[int]:
        """Versions whose memory must not change; the caller holds the control thread's lock."""
        return self._member.kept | set(self._pinned)

    @contextmanager
    def _pins(self, versions: set[int]) -> Iterator[set[int]]:
        """Those of these versions that are here, and stay until the end."""
        with self._control.changed:
            pinned = versions & self._staging.versions()
            self._pinned.update(pinned)
        try:
            yield pinned
        finally:
            with self._control.changed:
                self._pinned -= Counter(pinned)

    def _connect(self, form: FormGroup, meeting: Meeting) -> Sending:
        return Sending(self, form, meeting)

    def _check(self) -> None:
        if self._closed:
            raise WeightError("this writer is closed; found a call after close; make a new one")
        if self._control.error:
            raise WeightError(
                "the control thread of this writer has ended; see its error"
            ) from self._control.error
        if self._member.failure:
            raise PeerGone(
                f"rank {self.rank} of {self.ranks} cannot send weights; found:"
                f" {self._member.failure}; look at that rank, and start the trainer again"
            )


class Sending:
    """The sender's end of one epoch."""

    def __init__(self, writer: ShardedWriter, form: FormGroup, meeting: Meeting) -> None:
        plan = joint_plan(form)
        self._chunks = chunks_from(plan, form, writer.rank)
        self._writer, self._staging, self._form = writer, writer._staging, form
        self._device = writer._device.another()
        self._steps: dict[int, list[ChunkMessage]] = {}
        self._link = writer._link_bytes_per_s
        self._gathered: dict[int, Gathered] = {}
        self._deposits: Deposits | None = None
        with self._device.beside():
            self._exchange = GroupExchange(
                form,
                writer.rank,
                self._device,
                writer._deadlines.form_s,
                meeting,
                writer._clock,
            )
            if memory := writer._memory_of(form.backend):
                self._deposits = Deposits(
                    self._exchange,
                    self._chunks,
                    {
                        peer: at.destination.flat(rank)
                        for peer in self._chunks
                        for at, rank in [plan.at(peer - form.sources)]
                    },
                    memory,
                    self._device,
                )

    def prepare(self) -> None:
        """Nothing: receivers are asked for their places after each transfer."""

    def transfer(self, transfer: StartTransfer, deadline: float) -> TransferOutcome:
        """Send a version."""
        with self._device.beside():
            self._device.after(self._staging.ready(transfer.version))
            return self._transfer(transfer.version, transfer.readers, deadline)

    def _transfer(self, version: int, readers: Sequence[str], deadline: float) -> TransferOutcome:
        key, tensors = self._staging.of(version)
        messages: Sequence[Outbound]
        whole: Sequence[Outbound]
        if self._deposits is not None:
            whole = messages = self._deposits.steps(key, tensors, deadline)
        else:
            steps = recent(self._steps, key, lambda: self._compiled(tensors))
            taking = {column for reader in readers for column in self._form.columns[reader]}
            whole = steps = [step for step in steps if step.peer - self._form.sources in taking]
            messages = self._changes(version, steps, deadline) if self._link else steps
        depth = len(messages) if self._deposits else DEPTH
        self._exchange.send(messages, self._staging.sums(version), depth, deadline)
        sent = self._bytes(messages)
        with self._writer._control.changed:
            for reader, columns in self._form.columns.items():
                self._writer._sent[reader] += sum(sent[columns.start : columns.stop])
        return TransferOutcome(WHOLE, sent=sent, whole=self._bytes(whole))

    def _bytes(self, messages: Sequence[Outbound]) -> list[int]:
        """By rank of the readers."""
        nbytes = [0] * (self._form.size - self._form.sources)
        for message in messages:
            nbytes[message.peer - self._form.sources] += message.nbytes
        return nbytes

    def abort(self) -> None:
        """End what runs, from another thread."""
        self._exchange.abort()

    def close(self) -> None:
        """Let go of the receivers' buffers."""
        self._steps.clear()
        if self._deposits is not None:
            self._deposits.close()

    def _changes(
        self, version: int, steps: list[ChunkMessage], deadline: float
    ) -> Sequence[Outbound]:
        """What changed, where receivers say that they have a version; they are told how much."""
        assert self._link is not None, "or nothing but whole versions is sent"
        counts = {step.peer: 1 for step in steps}
        base_versions = self._exchange.agree({}, counts, deadline)
        messages: Sequence[Outbound] = steps
        versions = {base for (base,) in base_versions.values()} - {version}
        with self._writer._pins(versions) as pinned:
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

    def _compiled(self, tensors: Tensors) -> list[ChunkMessage]:
        return compiled(
            self._chunks,
            tensors,
            sending=True,
            depth=DEPTH,
            device=self._device,
        )


def _check_deltas(hold: str, backend: str) -> None:
    """WeightError where changes cannot be sent."""
    if hold != "snapshot":
        raise WeightError(
            f"a delta needs the version before it; found hold='{hold}', which keeps none; take"
            " hold='snapshot', or give no link_bytes_per_s"
        )
    if backend in ONE_SIDED:
        raise WeightError(
            f"a delta pays on a slow link; found backend='{backend}', which writes within a"
            " machine; give no link_bytes_per_s"
        )
