"""A generator rank's end of the sharded weight plane: it receives its own shard, and adopts it at a
safe point.
"""

from __future__ import annotations

import contextlib
import functools
import socket as sockets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

from transport.weights.errors import SegmentError, WeightError
from transport.weights.executors.device import TransferDevice, transfer_device
from transport.weights.executors.peer_memory import DeviceMemory
from transport.weights.layout.layout import Layout
from transport.weights.protocol.membership import Deadlines, ReaderEnd, VerifiedOffer
from transport.weights.protocol.messages import (
    BROKEN,
    DAMAGED,
    WHOLE,
    FormGroup,
    Join,
    StartTransfer,
)
from transport.weights.protocol.ranks import (
    GroupVersion,
    ReaderRank,
    TransferOutcome,
)
from transport.weights.sharded.chunks import chunks_to, joint_plan
from transport.weights.sharded.control import ControlThread, MemberSocket, NetworkEnd
from transport.weights.sharded.delta import WHOLE_CHUNK, Gathered, Patch, patches
from transport.weights.sharded.process_group import Meeting
from transport.weights.sharded.put import Arrivals, peer_memory
from transport.weights.sharded.staging import Buffer, ReceiveBuffers
from transport.weights.sharded.steps import ChunkMessage, compiled, recent
from transport.weights.sharded.transfer import DEPTH, Arriving, GroupExchange

HEAR_S = 0.05
"""For a rank to hear of a version that another one has been told of at the same time."""


class ShardedReader(ReaderEnd[ReaderRank]):
    """Takes versions of one model, of which this rank of a reader group holds a shard. For a
    single-threaded loop.

    A version can be seen here when every rank of the group has its part of it, verified; it is
    adopted when the loop says so, and until then the group takes no other.

    Consumes: this rank's shard of each version. Produces: new values in the attached tensors.
    Waits for: nothing, except in `wait`. Unblocked by: the trainer's next version.
    """

    def __init__(
        self,
        layout: Layout,
        rank: int,
        address: str,
        name: str,
        *,
        ranks: int | None = None,
        adopt: Literal["view", "copy"] = "view",
        device: str | torch.device | TransferDevice = "cpu",
        in_host: bool = False,
        deadlines: Deadlines | None = None,
        clock: Callable[[], float] = time.monotonic,
        attempt: int = 0,
        memory: DeviceMemory | None = None,
        host: NetworkEnd | None = None,
        seek: Callable[[], str] = lambda: "",
    ) -> None:
        """`layout`: of all ranks of the group called `name`. `ranks`: how many they are, if the
        last hold nothing.

        `adopt`: "view" turns parameters into views of the buffer received into, so that an update
        is a pointer flip; "copy" copies into the parameters' own memory. Tensors that are no
        Parameter, or have another dtype or device, are always copied. `device`: where versions
        arrive; a GPU where the trainer sends by nccl, and then `adopt` is called on the stream that
        reads the tensors. `in_host`: versions come over the device into main memory, one at a time,
        and are copied from there. `attempt`: the scheduler's, at this process; a later one takes
        the rank's place, whatever clocks say. `memory`: stands in for a GPU's, by cuda_ipc. `host`:
        where the trainer may be on another host than this rank. `seek`: where the trainer listens
        now, asked while it is silent; empty where nobody knows.
        """
        super().__init__(f"rank {rank} of group '{name}'", clock)
        self.layout, self.rank, self.name = layout, rank, name
        self.ranks = ranks if ranks is not None else layout.ranks
        self._deadlines = deadlines or Deadlines()
        self._view, self._device = adopt == "view", transfer_device(device)
        self._in_host = in_host
        self._buffers: ReceiveBuffers | None = None
        self._memory_of = functools.cache(
            lambda backend: peer_memory(backend, self._device.device, memory)
        )
        self._no_room: SegmentError | None = None
        self._woken, self._waker = sockets.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)
        self._announced = -1
        self._held: GroupVersion | None = None
        self._held_at = 0.0
        """When the loop began to take it."""
        self._arriving_at = 0.0
        """When the newest version began to arrive; no other does before it was adopted."""
        self._torn = False
        join = Join(
            group=name,
            rank=rank,
            ranks=self.ranks,
            incarnation=attempt,
            attempt=1,
            writer=0,
            version=-1,
            key=layout.key,
            layout=layout.to_plain() if rank == 0 else {},
        )
        self._member = ReaderRank(join, self._deadlines)
        self._control = ControlThread(
            self._member,
            self._connect,
            line=MemberSocket(address, host.keys if host else None, seek),
            deadlines=self._deadlines,
            clock=clock,
            heard=self._announce,
            host=host.address if host else "",
        )
        self._started = False

    @property
    def refused(self) -> str:
        """What was found in the last version, if it was damaged; then the one before is kept."""
        return self._member.refused

    @property
    def socket(self) -> sockets.socket:
        """Becomes readable when a version may be adopted; what a loop may poll."""
        return self._woken

    def attach(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Name this rank's local tensors that versions go into, and join; before the first adopt.

        LayoutMismatch when names or shapes are not those of the layout.
        """
        self._require_open()
        if self._started:
            raise WeightError(
                "tensors are attached once; found a second call; make a new reader for another"
                " model"
            )
        self._buffers = ReceiveBuffers(
            self.layout,
            self.rank,
            tensors,
            view=self._view,
            device=self._device,
            in_host=self._in_host,
        )
        self._started = True
        self._control.start()

    def poll(self) -> GroupVersion | None:
        """What may be adopted, or None. Never waits.

        AddressTaken when another process has taken this rank's place; LayoutMismatch when the
        trainer's layout, or the group's other ranks, do not fit this rank; SegmentError when there
        was no room for a version: it is left out, the one before is kept, and the next is tried.
        """
        self._require_open()
        with contextlib.suppress(BlockingIOError):
            while self._woken.recv(4096):
                pass
        if self._control.error:
            raise WeightError(
                "the control thread of this reader has ended; see its error"
            ) from self._control.error
        self._check()
        if no_room := self._no_room:
            self._no_room = None
            raise no_room
        return self._member.offered

    def verify(self) -> VerifiedOffer | None:
        """Hold the offered version as it is until `adopt` or `decline`, though its epoch may end;
        None for no offer.

        Where all ranks of a group hold one (the others by `enter`) before any of them adopts it,
        they never compute with different versions.
        """
        self._require_open()
        return self._hold(self._clock())

    def enter(self, segment: str, version: int, layout: Mapping[str, Any] | None = None) -> bool:
        """Hold the version that another rank of the group has verified; False when it is not
        offered here by now.

        `layout`: known already. Raises as `poll`.
        """
        self.poll()
        began = self._clock()

        def is_offered() -> bool:
            offered = self._member.offered
            return offered is not None and (_segment(offered), offered.version) == (
                segment,
                version,
            )

        with self._control.changed:
            return (
                self._control.changed.wait_for(is_offered, HEAR_S) and self._hold(began) is not None
            )

    def decline(self) -> None:
        """Let go of the version held, if any; it is offered again, or a newer one is."""
        with self._control.changed:
            current, self._held = self._held, None
            if current is not None and self._buffers is not None:
                self._buffers.hold(current.version, current.epoch, still=False)
                self._announced = -1
                self._announce()

    def adopt(self) -> int:
        """Make the version held, or else the offered one, the attached tensors' value; the version
        now in use.

        It was verified by checksums when it came. When there is no offer nothing changes.
        """
        self._require_open()
        began = self._clock()
        with self._control.changed:
            if self._held is not None:
                began = self._held_at
            offer = self._held or self._member.offered
            if offer is not None and self._buffers is not None:
                self._torn = True
                self._buffers.adopt(offer.version, offer.epoch)
                self._torn, self._held = False, None
                now = self._clock()
                self._control.act(self._member.adopted(offer, now - began, now - self._arriving_at))
                self._control.prepare(offer.epoch)
        return self.version

    def wait(self, version: int, timeout_s: float) -> int:
        """As `ReaderEnd.wait`; WeightError where nothing is attached."""
        if not self._started:
            raise WeightError(
                f"{self._whose} has nowhere to put versions; found nothing attached; call attach"
                " with this rank's local tensors first"
            )
        return super().wait(version, timeout_s)

    def close(self) -> None:
        """Leave the trainer; attached tensors keep the version held."""
        if self._closed:
            return
        self._closed = True
        self._control.close([self._member.leaving()] if self._started else [])
        if self._buffers is not None:
            self._buffers.close()
        self._woken.close()
        self._waker.close()

    @property
    def _is_torn(self) -> bool:
        return self._torn

    def _rest(self, timeout_s: float) -> None:
        with self._control.changed:
            if self._member.offer < 0:
                self._control.changed.wait(timeout_s)

    def _hold(self, began: float) -> VerifiedOffer | None:
        with self._control.changed:
            self.decline()
            offered = self._member.offered
            if offered is None or self._buffers is None:
                return None
            self._buffers.hold(offered.version, offered.epoch, still=True)
            self._held, self._held_at = offered, began
            return VerifiedOffer(version=offered.version, segment=_segment(offered))

    def _announce(self) -> None:
        """Wake pollers once for each version that may be adopted."""
        if self._member.offer != self._announced:
            self._announced = self._member.offer
            if self._announced >= 0:
                with contextlib.suppress(BlockingIOError, OSError):
                    self._waker.send(b"\0")

    def _connect(self, form: FormGroup, meeting: Meeting) -> Receiving:
        assert self._buffers is not None
        return Receiving(self, self._buffers, form, meeting)


def _segment(offered: GroupVersion) -> str:
    return f"{offered.writer}.{offered.epoch}"


class Receiving:
    """The receiver's end of one epoch."""

    def __init__(
        self, reader: ShardedReader, buffers: ReceiveBuffers, form: FormGroup, meeting: Meeting
    ) -> None:
        self._chunks = chunks_to(joint_plan(form), form, reader.name, reader.rank)
        self._epoch, self._sends_changes, self._is_usable = form.epoch, form.deltas, True
        self._gathered: dict[int, Gathered] = {}
        self._buffers, self._lock = buffers, reader._control.changed
        self._device = reader._device.another()
        self._steps: dict[int, list[ChunkMessage]] = {}
        with self._device.beside():
            self._exchange = GroupExchange(
                form,
                form.sources + form.columns[reader.name][reader.rank],
                self._device,
                reader._deadlines.form_s,
                meeting,
                reader._clock,
            )
        self._reader, self._form_s = reader, reader._deadlines.form_s
        self._memory = reader._memory_of(form.backend)
        self._arrivals = (
            Arrivals(self._exchange, self._chunks, self._device) if self._memory else None
        )
        self._next: tuple[Buffer, Arriving] | None = None
        """Where senders may write already."""

    def prepare(self) -> None:
        """Tell the senders where the next version goes, if there is room; else it is left to
        `transfer`.
        """
        with self._lock:
            has_room = self._buffers.has_room
        if has_room:
            with contextlib.suppress(SegmentError, TimeoutError), self._device.beside():
                self._ahead(self._reader._clock() + self._form_s)

    def transfer(self, transfer: StartTransfer, deadline: float) -> TransferOutcome:
        """Receive a version."""
        self._reader._arriving_at = self._reader._clock()
        if self._buffers.is_empty:
            return TransferOutcome(WHOLE)
        with self._device.beside():
            return self._transfer(transfer.version, deadline)

    def _transfer(self, version: int, deadline: float) -> TransferOutcome:
        try:
            self._ahead(deadline)
        except SegmentError as error:
            assert self._arrivals is not None, "other memory has other errors"
            self._arrivals.refuse()
            self._reader._no_room = error
            return TransferOutcome(DAMAGED, str(error))
        if self._next is None:
            buffer = self._take()
            self._device.after(buffer.read)
            return self._into(
                buffer, version, lambda: self._receive(self._steps_into(buffer), deadline)
            )
        (buffer, arriving), self._next = self._next, None
        return self._into(buffer, version, lambda: self._exchange.receive(arriving, deadline))

    def abort(self) -> None:
        """End what runs, from another thread."""
        self._exchange.abort()

    def close(self) -> None:
        """Release the buffers, which are the reader's."""
        self._steps.clear()
        if self._arrivals is not None:
            self._arrivals.close()
        if self._next is not None:
            self._give_back(self._next[0], -1, BROKEN)
            self._next = None

    def _ahead(self, deadline: float) -> None:
        """Have senders write into a free buffer, which nothing reads any more."""
        if self._arrivals is not None and self._next is None:
            buffer = self._take()
            try:
                self._exchange.reach(buffer.read, deadline)
                self._next = buffer, self._arrivals.expect(buffer)
            except BaseException:
                self._give_back(buffer, -1, BROKEN)
                raise

    def _into(
        self, buffer: Buffer, version: int, receive: Callable[[], TransferOutcome]
    ) -> TransferOutcome:
        state = BROKEN
        try:
            outcome = receive()
            state = outcome.state
        finally:
            self._give_back(buffer, version, state)
        return outcome

    def _give_back(self, buffer: Buffer, version: int, state: str) -> None:
        with self._lock:
            self._buffers.give_back(buffer, self._epoch, version, state)

    def _take(self) -> Buffer:
        with self._lock:
            buffer = self._buffers.take(self._epoch, self._memory)
        if buffer is None:
            buffer = self._buffers.make(self._memory)
            with self._lock:
                self._buffers.add(buffer)
        return buffer

    def _steps_into(self, buffer: Buffer) -> list[ChunkMessage]:
        return recent(self._steps, buffer.number, lambda: self._compiled(buffer))

    def _receive(self, steps: list[ChunkMessage], deadline: float) -> TransferOutcome:
        messages = self._changes(steps, deadline) if self._sends_changes else steps
        outcome = self._exchange.receive(self._exchange.expect(messages, DEPTH), deadline)
        if outcome.state == DAMAGED and any(isinstance(message, Patch) for message in messages):
            self._is_usable = False
        return outcome

    def _changes(
        self, steps: list[ChunkMessage], deadline: float
    ) -> Sequence[ChunkMessage | Patch]:
        """The messages as their senders will send them, knowing what version this rank has."""
        with self._lock:
            base = self._buffers.base(self._epoch) if self._is_usable else None
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

    def _compiled(self, buffer: Buffer) -> list[ChunkMessage]:
        return compiled(
            self._chunks,
            buffer.views,
            sending=False,
            depth=DEPTH,
            device=self._device,
            direct=not self._buffers.in_host,
        )
