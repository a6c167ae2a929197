"""Moves one version between this rank and its peers of one process group, and verifies it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from transport.weights.protocol.messages import BROKEN, DAMAGED, WHOLE, FormGroup
from transport.weights.protocol.ranks import TransferOutcome
from transport.weights.sharded.chunks import Sums
from transport.weights.sharded.process_group import ONE_SIDED, ProcessGroup
from transport.weights.sharded.rendezvous import Meeting

DEPTH = 4
"""Messages under way at once, at least."""
GREETING_TAG, SUMS_TAG = 0, 1 << 30
"""Of the first message to each peer, and of the last of a transfer: the checksums of all fragments,
int64."""
NUMBERS_TAG = (1 << 30) + 2
"""Of what two ranks agree on before a transfer, int64."""


class Outbound(Protocol):
    """A message to one peer."""

    peer: int
    tag: int
    nbytes: int

    @property
    def data(self) -> torch.Tensor:
        """Its bytes, once packed."""

    def pack(self) -> list[int] | None:
        """Make it ready to be sent; the checksum of each fragment, None where they are not known
        yet.
        """

    def known(self, sums: Sums) -> list[int] | None:
        """The checksums made earlier, None for none."""

    def sums(self) -> list[int]:
        """The checksum of each fragment."""


class Inbound(Protocol):
    """A message from one peer."""

    peer: int
    tag: int

    @property
    def data(self) -> torch.Tensor:
        """Where it is received."""

    @property
    def names(self) -> list[str]:
        """The full tensor of each fragment."""

    def unpack(self) -> list[int] | None:
        """Put it into its places; the checksum of each fragment, None where what came cannot be
        used.
        """


class Cancelled(RuntimeError):
    """The epoch is over."""


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
        self.steps = steps
        self.names: dict[int, list[str]] = {}
        """Of the fragments from each peer."""
        for step in steps:
            self.names.setdefault(step.peer, []).extend(step.names)
        self.sums = {
            peer: torch.empty(len(names), dtype=torch.int64, device=device)
            for peer, names in self.names.items()
        }
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
                    self._group.receive(theirs, peer, SUMS_TAG)
                    for peer, theirs in self.sums.items()
                ]


class GroupExchange:
    """What one rank does over a process group.

    Consumes: messages of its peers. Produces: messages to them, bytes in the rank's tensors.
    Waits for: its peers, until the deadline of each call. Unblocked by: them, their death, `abort`.
    """

    def __init__(
        self,
        form: FormGroup,
        rank: int,
        peers: Iterable[int],
        device: torch.device,
        connect_s: float,
        meeting: Meeting,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Meets the epoch's other ranks. `rank`: among them, source ranks first. `peers`: those it
        exchanges with.

        `device`: where weights lie, and messages if they carry them. `meeting`: where they find
        each other.
        """
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self._group = ProcessGroup(
            form.backend, meeting, rank, form.sources + form.ranks, connect_s=connect_s, clock=clock
        )
        device = torch.device("cpu") if form.backend in ONE_SIDED else device
        self._device, self._clock = device, clock
        self._over = meeting.over
        # One byte to each in the order of the ranks, which is the same for all: NCCL connects a
        # pair at its first message and waits for it, and pairs that wait for each other in a circle
        # would do so for ever.
        greeting = torch.zeros(1, dtype=torch.uint8, device=device)
        exchange = self._group.send if rank < form.sources else self._group.receive
        for peer in sorted(peers):
            self._group.wait(
                exchange(greeting, peer, GREETING_TAG), clock() + connect_s, clock, is_watched=False
            )

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
        return Arriving(self._group, steps, depth, self._device)

    def send(
        self, steps: Sequence[Outbound], known: Sums, depth: int, deadline: float
    ) -> TransferOutcome:
        """Send all steps, then to each peer the sums of what it was sent: those `known`, or made on
        the way.
        """
        return self._guarded(lambda: self._send(steps, known, depth, deadline))

    def receive(self, arriving: Arriving, deadline: float) -> TransferOutcome:
        """Receive all steps, put them into place, and compare the sums with the peers'."""
        return self._guarded(lambda: self._receive(arriving, deadline))

    def _guarded(self, move: Callable[[], TransferOutcome]) -> TransferOutcome:
        try:
            return move()
        except (RuntimeError, TimeoutError) as error:
            return TransferOutcome(BROKEN, f"{error}".splitlines()[0][:300])

    def _send(
        self, steps: Sequence[Outbound], known: Sums, depth: int, deadline: float
    ) -> TransferOutcome:
        works: list[Any] = []
        sums: dict[int, list[int]] = {}
        for number, step in enumerate(steps):
            if number >= depth:
                self._wait(works[number - depth], deadline)
            packed_sums = step.pack()
            works.append(self._group.send(step.data, step.peer, step.tag))
            sums.setdefault(step.peer, []).extend(step.known(known) or packed_sums or step.sums())
        sent_sums = {peer: _words(values).to(self._device) for peer, values in sums.items()}
        works += [self._group.send(theirs, peer, SUMS_TAG) for peer, theirs in sent_sums.items()]
        for work in works[max(0, len(steps) - depth) :]:
            self._wait(work, deadline)
        return TransferOutcome(WHOLE)

    def _receive(self, arriving: Arriving, deadline: float) -> TransferOutcome:
        sums: dict[int, list[int]] = {}
        bad: set[str] = set()
        for number, step in enumerate(arriving.steps):
            self._wait(arriving.works[number], deadline)
            if (unpacked := step.unpack()) is None:
                bad.update(step.names)
            sums.setdefault(step.peer, []).extend(unpacked or [0] * len(step.names))
            arriving.ask()
        for work in arriving.works[len(arriving.steps) :]:
            self._wait(work, deadline)
        for peer, theirs in arriving.sums.items():
            wrong = (theirs.cpu() != _words(sums[peer])).nonzero().flatten().tolist()
            bad.update(arriving.names[peer][at] for at in wrong)
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return (
            TransferOutcome(DAMAGED, f"other bytes than were sent in {sorted(bad)[:4]}")
            if bad
            else TransferOutcome(WHOLE)
        )

    def _numbers(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _wait(self, work: Any, deadline: float) -> None:
        self._group.wait(work, deadline, self._clock, is_watched=True)
        if self._over.is_set():
            raise Cancelled("the transfer was given up")


def _words(sums: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.array(sums, np.uint64).view(np.int64))
