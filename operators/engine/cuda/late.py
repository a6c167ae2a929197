"""Flags of rows that ended, read a step after they were written, so that the host never waits for
the newest step.

While the device does step t, the host reads the flags of step t - 1. A row that ended there has
drawn a token too many by then, which is cut off. With no lag, flags are read at once and nothing is
cut.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from dataflow.records import AnyArray


@dataclass(frozen=True)
class _Step:
    tickets: AnyArray
    flags: torch.Tensor
    checksum: torch.Tensor | None
    done: torch.cuda.Event | None


class LateFlags:
    """The flags of the last steps, oldest first."""

    def __init__(self, device: torch.device, slots: int, lag: int) -> None:
        """Flags of up to `slots` rows come back `lag` steps, 0 or 1, after they were pushed."""
        self.lag = lag
        self._cuda = device.type == "cuda"
        self._room = torch.zeros(lag + 1, slots, dtype=torch.bool, pin_memory=self._cuda)
        self._checksums = torch.zeros(lag + 1, dtype=torch.int64, pin_memory=self._cuda)
        self.checksum = 0
        """The last that came."""
        self._steps: deque[_Step] = deque()
        self._pushed = 0
        self._side = torch.cuda.Stream(device) if self._cuda else None  # type: ignore[no-untyped-call]
        self._read: torch.cuda.Event | None = None

    def push(
        self, tickets: AnyArray, flags: torch.Tensor, checksum: torch.Tensor | None = None
    ) -> None:
        """Add the flags bool [n] of the newest step; `tickets` int64 [n] name their rows. checksum:
        a number, int64 [], that comes with them.
        """
        assert len(self._steps) <= self.lag, "the flags of earlier steps are to be read first"
        turn = self._pushed % (self.lag + 1)
        room = self._room[turn, : len(flags)]
        room.copy_(flags, non_blocking=True)
        if checksum is not None:
            checksum = self._checksums[turn].copy_(checksum, non_blocking=True)
        done = None
        if self._cuda:
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(torch.cuda.current_stream(flags.device))
        self._steps.append(_Step(tickets.copy(), room, checksum, done))
        self._pushed += 1

    def due(self) -> AnyArray:
        """Tickets flagged `lag` steps ago, int64; a ticket that has left meanwhile may be among
        them.
        """
        return self._flagged(self.lag)

    def rest(self) -> AnyArray:
        """Tickets flagged in the newest step, if they have not been read: waits for the device."""
        return self._flagged(0)

    @contextlib.contextmanager
    def behind(self) -> Iterator[None]:
        """What is read inside waits for the step whose flags were read last, and not for the
        newest.
        """
        if self._side is None or self._read is None:
            yield
            return
        self._side.wait_event(self._read)
        with torch.cuda.stream(self._side):
            yield

    def _flagged(self, behind: int) -> AnyArray:
        if len(self._steps) <= behind:
            return np.zeros(0, np.int64)
        step = self._steps.popleft()
        if step.done is not None:
            step.done.synchronize()
            self._read = step.done
        if step.checksum is not None:
            self.checksum = int(step.checksum)
        flagged: AnyArray = step.tickets[step.flags.numpy()]
        return flagged
