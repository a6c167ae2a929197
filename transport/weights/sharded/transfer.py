"""Moves one version between this rank and its peers of one process group, and verifies it.

The host asks for all of it and looks once, at the end, whether the device has done it: packing,
messages and checksums stand in one queue there, beside the program's own.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from transport.errors import WaitTimeout
from transport.native.sums import folded_there
from transport.weights.executors.device import Mark, TransferDevice
from transport.weights.protocol.messages import DAMAGED, WHOLE, FormGroup
from transport.weights.protocol.ranks import TransferOutcome
from transport.weights.sharded.chunks import PlaceKey
from transport.weights.sharded.process_group import ONE_SIDED, Meeting, ProcessGroup
from transport.weights.sharded.staging import StagedSums

DEPTH = 4
"""Messages under way at once."""
SUMS_TAG = 1 << 30
"""Of the last message of a transfer to each peer: the checksums of all fragments, int64."""
NUMBERS_TAG = (1 << 30) + 2
"""Of what two ranks agree on before a transfer, int64."""
LOOK_S = 2e-4
"""Between two looks whether the device has come to the end."""


class Outbound(Protocol):
    """A message to one peer."""

    peer: int
    tag: int
    nbytes: int
    names: list[str]
    """The full tensor of each fragment."""

    @property
    def data(self) -> torch.Tensor:
        """Its bytes, once packed."""

    def pack(self, sums: torch.Tensor) -> None:
        """Make it ready to be sent, and add the checksum of each fragment if that makes it."""

    def known(self, rows: Mapping[PlaceKey, int]) -> list[int] | None:
        """The rows of the checksums made earlier, None for none."""

    def sum(self, sums: torch.Tensor) -> None:
        """Add the checksum of each fragment, where `pack` has not."""


class Inbound(Protocol):
    """A message from one peer."""

    peer: int
    tag: int
    names: list[str]
    """The full tensor of each fragment."""

    @property
    def data(self) -> torch.Tensor:
        """Where it is received."""

    def unpack(self, sums: torch.Tensor) -> bool:
        """Put it into its places, and add the checksum of each fragment; False where what came
        cannot be used.
        """


class SumRows:
    """Where the checksums of a transfer's fragments stand: those of one peer side by side, in the
    order of its messages.
    """

    def __init__(self, steps: Sequence[Outbound | Inbound]) -> None:
        counts = Counter[int]()
        for step in steps:
            counts[step.peer] += len(step.names)
        self.peers: dict[int, slice] = {}
        """The rows of each."""
        self.count = 0
        """Of all rows."""
        for peer, count in counts.items():
            self.peers[peer] = slice(self.count, self.count + count)
            self.count += count
        free = {peer: rows.start for peer, rows in self.peers.items()}
        self.steps: list[slice] = []
        """The rows of each message."""
        for step in steps:
            first = free[step.peer]
            free[step.peer] = first + len(step.names)
            self.steps.append(slice(first, free[step.peer]))


class Hearing:
    """Numbers from peers: as they are requested in advance, a message makes neither side wait."""

    def __init__(self, exchange: GroupExchange, counts: Mapping[int, int]) -> None:
        self._exchange = exchange
        self._numbers = {peer: exchange._numbers([0] * count) for peer, count in counts.items()}
        self._works = [
            exchange._group.receive(numbers, peer, NUMBERS_TAG)
            for peer, numbers in self._numbers.items()
        ]

    def heard(self, deadline: float) -> dict[int, list[int]]:
        """By peer, once all numbers have arrived."""
        for work in self._works:
            self._exchange._wait(work, deadline)
        return {peer: numbers.tolist() for peer, numbers in self._numbers.items()}


class Arriving:
    """A transfer's messages to this rank, `depth` of them asked for in advance, and then the sums
    of all.
    """

    def __init__(
        self, group: ProcessGroup, steps: Sequence[Inbound], depth: int, device: torch.device
    ) -> None:
        self.steps, self.rows = steps, SumRows(steps)
        self.sums = torch.empty(self.rows.count, dtype=torch.int64, device=device)
        """As the peers made them, once the last of `works` are done."""
        self.works: list[Any] = []
        """Of the messages, and behind them of the sums."""
        self._group = group
        for _ in range(min(depth, len(steps))):
            self.ask()

    def ask(self) -> None:
        """For one message more, if there is one, and behind the last one for the sums: NCCL knows
        order and no tags.
        """
        at = len(self.works)
        if at < len(self.steps):
            step = self.steps[at]
            self.works.append(self._group.receive(step.data, step.peer, step.tag))
            if at + 1 == len(self.steps):
                self.works += [
                    self._group.receive(self.sums[rows], peer, SUMS_TAG)
                    for peer, rows in self.rows.peers.items()
                ]


class _InOrder:
    """Messages under way, each of which is waited for once, in the order in which they began."""

    def __init__(self, order: Callable[[Any], None]) -> None:
        self._order, self._works = order, deque[Any]()
        self.count = 0
        """Of all that have begun."""

    def add(self, work: Any) -> None:
        """One more has begun."""
        self._works.append(work)
        self.count += 1

    def behind(self, number: int) -> None:
        """Come behind the one of this number, and all before it."""
        while self.count - len(self._works) <= number:
            self._order(self._works.popleft())


class GroupExchange:
    """What one rank does over a process group, in the queue of transfers that its thread uses.

    Consumes: messages of its peers. Produces: messages to them, bytes in the rank's tensors.
    Waits for: its peers, and once a transfer for the device, until the deadline of each call.
    Unblocked by: them, their death, `abort`.
    """

    def __init__(
        self,
        form: FormGroup,
        rank: int,
        device: TransferDevice,
        connect_s: float,
        meeting: Meeting,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Meets the epoch's other ranks. `rank`: among them, source ranks first.

        `device`: where weights lie, and messages if they carry them. `meeting`: where they find
        each other.
        """
        self._group = ProcessGroup(
            form.backend, meeting, rank, form.size, connect_s=connect_s, clock=clock
        )
        self._device, self._clock = device, clock
        self._messages = torch.device("cpu") if form.backend in ONE_SIDED else device.device
        """Where messages lie."""
        self._announces = form.backend in ONE_SIDED
        """Whether messages only say that bytes were written."""
        self._over = meeting.over
        self._group.meet(self._messages, clock() + connect_s, clock)

    def abort(self) -> None:
        """End what runs, from another thread."""
        self._over.set()
        self._group.abort()

    def agree(
        self, by_peer: Mapping[int, Sequence[int]], counts: Mapping[int, int], deadline: float
    ) -> dict[int, list[int]]:
        """Send each peer these numbers, and receive as many from each as `counts` says."""
        telling, hearing = self.tell(by_peer), self.hear(counts)
        for work in telling:
            self._wait(work, deadline)
        return hearing.heard(deadline)

    def hear(self, counts: Mapping[int, int]) -> Hearing:
        """Request from each peer as many numbers as `counts` says."""
        return Hearing(self, counts)

    def tell(self, by_peer: Mapping[int, Sequence[int]]) -> list[Any]:
        """Begin to send each peer these numbers; returns the works under way, to be kept until they
        are done.
        """
        return [
            self._group.send(self._numbers(numbers), peer, NUMBERS_TAG)
            for peer, numbers in by_peer.items()
        ]

    def expect(self, steps: Sequence[Inbound], depth: int) -> Arriving:
        """Ask for the messages of the next transfer."""
        return Arriving(self._group, steps, depth, self._messages)

    def reach(self, mark: Mark, deadline: float) -> None:
        """Until the device has come to this mark."""
        while not self._device.reached(mark):
            self._require_going()
            if self._clock() >= deadline:
                raise WaitTimeout(
                    f"a transfer of rank {self._group.rank} of {self._group.size} passed its"
                    " deadline; found its device at work"
                )
            time.sleep(LOOK_S)

    def send(
        self, steps: Sequence[Outbound], staged: StagedSums | None, depth: int, deadline: float
    ) -> None:
        """Send all steps, then to each peer the sums of what it was sent: those `staged`, or made
        on the way. Errors as `receive`.
        """
        works = _InOrder(lambda work: self._order(work, deadline))
        reads: dict[int, int] = {}
        """By address of a message, the last that was sent from there."""
        rows, sums = self._summed(steps)
        at: list[int] = []
        into: list[int] = []
        # What a GPU writes is announced when it is there, all at once: there is no use in waiting
        # for a part.
        late = self._announces and self._device.is_behind
        for number, (step, own) in enumerate(zip(steps, rows.steps, strict=True)):
            if not late:
                place = step.data.data_ptr()
                works.behind(max(number - depth, reads.get(place, -1)))
                reads[place] = number
            step.pack(sums[own])
            if not late:
                works.add(self._group.send(step.data, step.peer, step.tag))
            staged_rows = step.known(staged.rows) if staged else None
            if staged_rows is None:
                step.sum(sums[own])
            else:
                at += staged_rows
                into += range(own.start, own.stop)
        if staged and at:
            sums[into] = staged.values[at]
        checksums = folded_there(sums)
        if late:
            checksums = self._device.fetch(checksums)
            self.reach(self._device.mark(), deadline)
            for step in steps:
                works.add(self._group.send(step.data, step.peer, step.tag))
        for peer, own in rows.peers.items():
            works.add(self._group.send(checksums[own], peer, SUMS_TAG))
        works.behind(works.count - 1)
        self.reach(self._device.mark(), deadline)

    def receive(self, arriving: Arriving, deadline: float) -> TransferOutcome:
        """Receive all steps, put them into place, and compare the sums with the peers'.
        RuntimeError or TimeoutError when a peer is gone, the deadline has passed, or `abort` was
        called.
        """
        rows, sums = self._summed(arriving.steps)
        bad: set[str] = set()
        names = [""] * rows.count
        for number, (step, own) in enumerate(zip(arriving.steps, rows.steps, strict=True)):
            self._order(arriving.works[number], deadline)
            names[own] = step.names
            if not step.unpack(sums[own]):
                bad.update(step.names)
            arriving.ask()
        for work in arriving.works[len(arriving.steps) :]:
            self._order(work, deadline)
        ours, theirs = (self._device.fetch(sums) for sums in (folded_there(sums), arriving.sums))
        self.reach(self._device.mark(), deadline)
        bad.update(names[row] for row in (theirs != ours).nonzero().flatten().tolist())
        return (
            TransferOutcome(DAMAGED, f"other bytes than were sent in {sorted(bad)[:4]}")
            if bad
            else TransferOutcome(WHOLE)
        )

    def _summed(self, steps: Sequence[Outbound | Inbound]) -> tuple[SumRows, torch.Tensor]:
        """Rows for the steps' checksums, and zeros to add them to."""
        rows = SumRows(steps)
        return rows, torch.zeros((rows.count, 2), dtype=torch.int64, device=self._device.device)

    def _numbers(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._messages)

    def _order(self, work: Any, deadline: float) -> None:
        """What this thread asks for from now on comes behind this message."""
        self._group.order(work, deadline, self._clock)
        self._require_going()

    def _wait(self, work: Any, deadline: float) -> None:
        self._group.wait(work, deadline, self._clock, is_watched=True)
        self._require_going()

    def _require_going(self) -> None:
        if self._over.is_set():
            raise RuntimeError("the transfer was given up")
