"""Moves one version between this rank and its peers of one process group, and proves it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from transport.weights.sharded.process_group import ProcessGroup
from transport.weights.sharded.staging import Sums
from transport.weights.sharded.words import BROKEN, DAMAGED, WHOLE, Form

DEPTH = 4
"""Messages under way at once, at least."""
GREETING_TAG, SUMS_TAG = 0, 1 << 30
"""Of the first message to each peer, and of the last of a transfer: the checksums of all pieces, int64."""
BASE_TAG, SIZES_TAG = (1 << 30) + 2, (1 << 30) + 3
"""Before a transfer with deltas: the version that the receiver has, int64[1], and the size of each message's delta."""


@dataclass(frozen=True)
class Outcome:
    """How a transfer ended."""

    state: str
    """whole | damaged | broken."""
    fault: str = ""


class Outbound(Protocol):
    """A message to one peer."""

    peer: int
    tag: int

    @property
    def data(self) -> torch.Tensor:
        """Its bytes, once packed."""

    def pack(self) -> list[int] | None:
        """Make it ready to be sent; the checksum of each piece, None where they are not known yet."""

    def known(self, sums: Sums) -> list[int] | None:
        """The checksums made earlier, None for none."""

    def sums(self) -> list[int]:
        """The checksum of each piece."""


class Inbound(Protocol):
    """A message from one peer."""

    peer: int
    tag: int

    @property
    def data(self) -> torch.Tensor:
        """Where it is received."""

    @property
    def names(self) -> list[str]:
        """The full tensor of each piece."""

    def unpack(self) -> list[int] | None:
        """Put it into its places; the checksum of each piece, None where what came cannot be used."""


class Cancelled(RuntimeError):
    """The epoch is over."""


class Exchange:
    """What one rank does over a process group.

    Consumes: messages of its peers. Produces: messages to them, bytes in the rank's tensors.
    Waits for: its peers, until the deadline of each call. Unblocked by: them, their death, `abort`.
    """

    def __init__(
        self,
        form: Form,
        rank: int,
        peers: Iterable[int],
        device: torch.device,
        connect_s: float,
        stop: threading.Event,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Meets the epoch's other ranks. `rank`: among them, source ranks first. `peers`: those it exchanges with.

        `device`: where messages lie. `stop`: set by whoever gives the epoch up, while they meet or later."""
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self._group = ProcessGroup(
            form.backend, form.store, rank, form.sources + form.ranks, connect_s=connect_s, stop=stop,
            clock=clock,
        )  # fmt: skip
        self._device, self._clock = device, clock
        self._stop = stop
        # One byte to each in the order of the ranks, which is the same for all: NCCL connects a pair at its first
        # message and waits for it, and pairs that wait for each other in a circle would do so for ever.
        greeting = torch.zeros(1, dtype=torch.uint8, device=device)
        exchange = self._group.send if rank < form.sources else self._group.receive
        for peer in sorted(peers):
            self._group.wait(exchange(greeting, peer, GREETING_TAG), clock() + connect_s, clock, is_watched=False)

    def abort(self) -> None:
        """End what runs, from another thread."""
        self._stop.set()
        self._group.abort()

    def bases(self, peers: Iterable[int], deadline: float) -> dict[int, int]:
        """What each receiver of the next transfer has told: the version that deltas may stand on, -1 for none."""
        told = {peer: self._numbers([-1]) for peer in peers}
        works = [self._group.receive(number, peer, BASE_TAG) for peer, number in told.items()]
        for work in works:
            self._wait(work, deadline)
        return {peer: int(number) for peer, number in told.items()}

    def announce(self, sizes: Mapping[int, Sequence[int]], deadline: float) -> None:
        """Tell each receiver the sizes of its messages' deltas."""
        told = {peer: self._numbers(found) for peer, found in sizes.items()}
        works = [self._group.send(numbers, peer, SIZES_TAG) for peer, numbers in told.items()]
        for work in works:
            self._wait(work, deadline)

    def sizes(self, bases: Mapping[int, int], counts: Mapping[int, int], deadline: float) -> dict[int, list[int]]:
        """Tell each sender what version deltas may stand on; what each `announce` has told of its messages.

        `counts`: how many messages each sends."""
        mine = {peer: self._numbers([base]) for peer, base in bases.items()}
        told = {peer: self._numbers([0] * counts[peer]) for peer in bases}
        works = [self._group.send(number, peer, BASE_TAG) for peer, number in mine.items()]
        works += [self._group.receive(numbers, peer, SIZES_TAG) for peer, numbers in told.items()]
        for work in works:
            self._wait(work, deadline)
        return {peer: numbers.tolist() for peer, numbers in told.items()}

    def send(self, steps: Sequence[Outbound], known: Sums, depth: int, deadline: float) -> Outcome:
        """Send all steps, then to each peer the sums of what it was sent: those `known`, or made on the way."""
        return self._guarded(lambda: self._send(steps, known, depth, deadline))

    def receive(self, steps: Sequence[Inbound], depth: int, deadline: float) -> Outcome:
        """Receive all steps, put them into place, and compare the sums with the peers'."""
        return self._guarded(lambda: self._receive(steps, depth, deadline))

    def _guarded(self, move: Callable[[], Outcome]) -> Outcome:
        try:
            return move()
        except (RuntimeError, TimeoutError) as error:
            return Outcome(BROKEN, f"{error}".splitlines()[0][:300])

    def _send(self, steps: Sequence[Outbound], known: Sums, depth: int, deadline: float) -> Outcome:
        works: list[Any] = []
        sums: dict[int, list[int]] = {}
        for number, step in enumerate(steps):
            if number >= depth:
                self._wait(works[number - depth], deadline)
            found = step.pack()
            works.append(self._group.send(step.data, step.peer, step.tag))
            sums.setdefault(step.peer, []).extend(step.known(known) or found or step.sums())
        proofs = {peer: _words(found).to(self._device) for peer, found in sums.items()}
        works += [self._group.send(proof, peer, SUMS_TAG) for peer, proof in proofs.items()]
        for work in works[max(0, len(steps) - depth) :]:
            self._wait(work, deadline)
        return Outcome(WHOLE)

    def _receive(self, steps: Sequence[Inbound], depth: int, deadline: float) -> Outcome:
        names: dict[int, list[str]] = {}
        for step in steps:
            names.setdefault(step.peer, []).extend(step.names)
        proofs = {
            peer: torch.empty(len(found), dtype=torch.int64, device=self._device) for peer, found in names.items()
        }
        works = [self._group.receive(step.data, step.peer, step.tag) for step in steps[:depth]]
        sums: dict[int, list[int]] = {}
        bad: set[str] = set()
        for number, step in enumerate(steps):
            self._wait(works[number], deadline)
            if (made := step.unpack()) is None:
                bad.update(step.names)
            sums.setdefault(step.peer, []).extend(made or [0] * len(step.names))
            if number + depth < len(steps):
                step = steps[number + depth]
                works.append(self._group.receive(step.data, step.peer, step.tag))
        for peer, proof in proofs.items():
            self._wait(self._group.receive(proof, peer, SUMS_TAG), deadline)
        for peer, proof in proofs.items():
            wrong = (proof.cpu() != _words(sums[peer])).nonzero().flatten().tolist()
            bad.update(names[peer][at] for at in wrong)
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return Outcome(DAMAGED, f"other bytes than were sent in {sorted(bad)[:4]}") if bad else Outcome(WHOLE)

    def _numbers(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _wait(self, work: Any, deadline: float) -> None:
        self._group.wait(work, deadline, self._clock, is_watched=True)
        if self._stop.is_set():
            raise Cancelled("the transfer was given up")


def _words(sums: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.array(sums, np.uint64).view(np.int64))
