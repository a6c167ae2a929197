"""A generator rank's end of the sharded weight plane: it receives its own shard, and adopts it at a safe point."""

from __future__ import annotations

import contextlib
import socket as sockets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from transport.weights.deltas.chunks import WHOLE_MESSAGE, Gathered, Patch, patches
from transport.weights.errors import AddressTaken, LayoutMismatch, WeightError, waited
from transport.weights.executors.address import Address
from transport.weights.layout.layout import Layout
from transport.weights.layout.reshard import reshard
from transport.weights.protocol.messages import Note
from transport.weights.sharded.chunks import parcels
from transport.weights.sharded.control import Control
from transport.weights.sharded.groups import Deadlines
from transport.weights.sharded.member import Destination
from transport.weights.sharded.shadow import Buffer, Shadows
from transport.weights.sharded.steps import Step, compiled, recent
from transport.weights.sharded.transfer import DEPTH, Exchange, Outcome
from transport.weights.sharded.words import DAMAGED, WHOLE, Form


@dataclass(frozen=True)
class Offered:
    """A version that every rank of the group has its part of."""

    version: int
    epoch: int
    """Of the group."""


class ShardedReader:
    """Takes versions of one model, of which this rank of a reader group holds a shard. For a single-threaded loop.

    A version can be seen here when every rank of the group has its part of it, proved; it is adopted when the loop
    says so, and until then the group takes no other.

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
        device: str | torch.device = "cpu",
        deadlines: Deadlines | None = None,
        clock: Callable[[], float] = time.monotonic,
        attempt: int = 0,
    ) -> None:
        """`layout`: of all ranks of the group called `name`. `ranks`: how many they are, if the last hold nothing.

        `adopt`: "view" turns parameters into views of the buffer received into, so that an update is a pointer
        flip; "copy" copies into the parameters' own memory. Tensors that are no Parameter, or have another dtype
        or device, are always copied. `device`: where versions arrive; a GPU where the trainer sends by nccl.
        `attempt`: the scheduler's, at this process; a later one takes the rank's place, whatever clocks say."""
        self.layout, self.rank, self.name = layout, rank, name
        self.ranks = ranks if ranks is not None else layout.ranks
        self._deadlines = deadlines or Deadlines()
        self._view, self._device, self._clock = adopt == "view", torch.device(device), clock
        self._shadows: Shadows | None = None
        self._ear, self._bell = sockets.socketpair()
        for end in (self._ear, self._bell):
            end.setblocking(False)
        self._rung = -1
        self._torn = False
        self._closed = False
        self._member = Destination(
            name, rank, self.ranks, layout.key, layout.to_plain(), self._deadlines, incarnation=attempt
        )
        self._control = Control(
            self._member, self._connect, socket=Address(address).connected(), beat_s=self._deadlines.beat_s,
            transfer_s=self._deadlines.transfer_s, clock=clock, heard=self._announce,
        )  # fmt: skip
        self._started = False

    @property
    def version(self) -> int:
        """The version that the attached tensors hold, -1 for none."""
        return -1 if self._torn else self._member.version

    @property
    def epoch(self) -> int:
        """The epoch under which the group is in, 0 while it is not."""
        return self._member.epoch if self._member.joined else 0

    @property
    def note(self) -> Note:
        """The newest note of the trainer."""
        return dict(self._member.note)

    @property
    def refused(self) -> str:
        """What was found in the last version, if it was damaged; then the one before is kept."""
        return self._member.refused

    @property
    def silent_s(self) -> float:
        """Seconds since the trainer was last heard; infinite if never."""
        return self._clock() - self._member.heard

    @property
    def socket(self) -> sockets.socket:
        """Becomes readable when a version may be adopted; what a loop may poll."""
        return self._ear

    def attach(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Name this rank's local tensors that versions go into, and join; before the first adopt.

        LayoutMismatch when names or shapes are not those of the layout."""
        self._require_open()
        if self._started:
            raise WeightError("tensors are attached once; found a second call; make a new reader for another model")
        self._shadows = Shadows(self.layout, self.rank, tensors, view=self._view, device=self._device)
        self._started = True
        self._control.start()

    def poll(self) -> Offered | None:
        """What may be adopted, or None. Never waits.

        AddressTaken when another process has taken this rank's place; LayoutMismatch when the trainer's layout, or
        the group's other ranks, do not fit this rank."""
        self._require_open()
        with contextlib.suppress(BlockingIOError):
            while self._ear.recv(4096):
                pass
        if self._control.error:
            raise WeightError("the control thread of this reader has ended; see its error") from self._control.error
        if self._member.replaced:
            raise AddressTaken(
                f"another process has taken rank {self.rank} of group '{self.name}'; found this one fenced off for "
                "good; give each group its own name"
            )
        if self._member.denied:
            raise LayoutMismatch(f"group '{self.name}' cannot take the trainer's weights; {self._member.denied}")
        offer = self._member.offer
        return Offered(offer, self._member.epoch) if offer >= 0 else None

    def adopt(self) -> int:
        """Make the offered version the attached tensors' value; the version now held.

        It was proved by checksums when it came. When there is no offer nothing changes."""
        self._require_open()
        with self._control.changed:
            version = self._member.offer
            if version >= 0 and self._shadows is not None:
                self._torn = True
                self._shadows.adopt(version, self._member.epoch)
                self._torn = False
                self._control.act(self._member.adopted(version))
        return self.version

    def wait(self, version: int, timeout_s: float) -> int:
        """Poll and adopt until this version, or a newer one, is held; the version held.

        PeerGone when the trainer was not heard in all that time, WaitTimeout when it was but had none."""
        if not self._started:
            raise WeightError(
                f"rank {self.rank} of group '{self.name}' has nowhere to put versions; found nothing attached; call "
                "attach with this rank's local tensors first"
            )
        begun = self._clock()
        deadline = begun + timeout_s
        while True:
            if self.poll() is not None:
                self.adopt()
            if self.version >= version:
                return self.version
            left = deadline - self._clock()
            if left <= 0:
                break
            with self._control.changed:
                if self._member.offer < 0:
                    self._control.changed.wait(min(left, 0.05))
        heard = self._member.heard >= begun
        raise waited(f"rank {self.rank} of group '{self.name}'", version, timeout_s, self.version, heard)

    def close(self) -> None:
        """Leave the trainer; attached tensors keep the version held."""
        if self._closed:
            return
        self._closed = True
        self._control.close(self._member.leaving() if self._started else [])
        self._ear.close()
        self._bell.close()

    def _announce(self) -> None:
        """Ring once for each version that may be adopted."""
        if self._member.offer != self._rung:
            self._rung = self._member.offer
            if self._rung >= 0:
                with contextlib.suppress(BlockingIOError, OSError):
                    self._bell.send(b"\0")

    def _connect(self, form: Form, stop: threading.Event) -> _Receiving:
        assert self._shadows is not None
        return _Receiving(self, self._shadows, form, stop)

    def _require_open(self) -> None:
        if self._closed:
            raise WeightError("this reader is closed; found a call after close; make a new one")


class _Receiving:
    """The receiver's end of one epoch."""

    def __init__(self, reader: ShardedReader, shadows: Shadows, form: Form, stop: threading.Event) -> None:
        plan = reshard(Layout.from_plain(form.layout), reader.layout)
        found = {of: parcels(plan, of, reader.rank, form.bucket_bytes) for of in range(form.sources)}
        self._parcels = {peer: cut for peer, cut in found.items() if cut}
        self._depth = max(DEPTH, len(self._parcels))
        self._first = reader.rank % form.sources
        self._epoch = form.epoch
        self._shadows, self._device, self._lock = shadows, reader._device, reader._control.changed
        self._deltas = self._usable = form.deltas
        self._steps: dict[int, list[Step]] = {}
        self._gathered: dict[int, Gathered] = {}
        self._exchange = Exchange(
            form, form.sources + reader.rank, self._parcels, self._device, reader._deadlines.form_s, stop, reader._clock
        )  # fmt: skip

    def move(self, version: int, deadline: float) -> Outcome:
        with self._lock:
            buffer = self._shadows.take()
            base = self._shadows.base(self._epoch) if self._usable else None
        if buffer is None:
            return Outcome(WHOLE)
        state = ""
        try:
            steps = recent(self._steps, buffer.number, lambda: self._compiled(buffer))
            messages = self._agreed(steps, base, deadline) if self._deltas else steps
            outcome = self._exchange.receive(messages, self._depth, deadline)
            state = outcome.state
            if state == DAMAGED and any(isinstance(message, Patch) for message in messages):
                self._usable = False
        finally:
            with self._lock:
                self._shadows.give_back(buffer, self._epoch, version if state == WHOLE else -1)
        return outcome

    def abort(self) -> None:
        self._exchange.abort()

    def _compiled(self, buffer: Buffer) -> list[Step]:
        return compiled(
            self._parcels, buffer.views, sending=False, depth=self._depth, device=self._device, first=self._first
        )

    def _agreed(self, steps: Sequence[Step], base: Buffer | None, deadline: float) -> Sequence[Step | Patch]:
        """The messages as their senders will send them, knowing what version this rank has."""
        exact = set(self._parcels) - {step.peer for step in steps if step.casts}
        bases = {peer: base.version if base and peer in exact else -1 for peer in self._parcels}
        told = self._exchange.sizes(bases, {peer: len(cut) for peer, cut in self._parcels.items()}, deadline)
        if base is None or all(size == WHOLE_MESSAGE for found in told.values() for size in found):
            return patches(steps, told, None)
        gathered = recent(
            self._gathered, base.number,
            lambda: Gathered(self._parcels, base.views, sending=False, device=self._device),
        )  # fmt: skip
        return patches(steps, told, gathered)
