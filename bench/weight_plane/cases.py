"""What the weight-plane bench measures: cases, jobs, what an end of a system is given, what came of
it. No torch.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

PATIENCE_S = 60.0
"""Longest wait of one process for the other."""
COLUMNS = 256
"""Of every tensor."""
Lap = tuple[int, int, int]
"""Of one step: when the system's turn before it began (monotonic ns), how long that took, and both
together (ns)."""


@dataclass(frozen=True)
class Case:
    """What travels."""

    mib: int
    tensors: int

    @property
    def shape(self) -> tuple[int, int]:
        """Of each tensor, in float32; all are alike, so the size asked for may be missed by a few
        bytes.
        """
        return (max(1, (self.mib << 20) // (4 * self.tensors * COLUMNS)), COLUMNS)

    @property
    def nbytes(self) -> int:
        """Bytes of a version."""
        return self.tensors * prod(self.shape) * 4

    @property
    def names(self) -> list[str]:
        """In the order in which they travel."""
        return [f"layers.{number}.weight" for number in range(self.tensors)]

    def __str__(self) -> str:
        return f"{self.mib} MiB in {self.tensors} tensor{'s' * (self.tensors > 1)}"


@dataclass(frozen=True, kw_only=True)
class Job:
    """One system on one case, in processes of its own."""

    system: str
    case: Case
    updates: int
    """Counted updates of each kind, at most."""
    seconds: float
    """When they have taken that long, it is enough; one of each kind is always made."""


@dataclass(frozen=True, kw_only=True)
class Seat:
    """What one end of a system is given."""

    case: Case
    tensors: Mapping[str, torch.Tensor]
    """The trainer's weights, or the parameters that the reader computes with."""
    words: Connection
    """To the other end, for what the system has to say."""
    folder: Path
    """For sockets, closed to others."""
    memory: Path
    """For files in shared memory."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """One version's way; moments in monotonic ns."""

    called_ns: int
    """When publish was called."""
    held_ns: int
    """How long publish, and the trainer's turns until the version was taken, held it (ns)."""
    visible_ns: int
    """When the reader's parameters held it."""
    laps: list[Lap]
    """The reader's, from before the call until the version was taken."""


@dataclass
class UpdateTimes:
    """What one pair of processes measured, an entry per counted update."""

    busy_s: list[float] = field(default_factory=list)
    """From the call to publish until the reader computes with the version, while both compute."""
    waiting_s: list[float] = field(default_factory=list)
    """The same while both only wait."""
    trainer_stall_ms: list[float] = field(default_factory=list)
    reader_stall_ms: list[float] = field(default_factory=list)
    reader_held_ms: list[float] = field(default_factory=list)
    reader_quiet_ms: list[float] = field(default_factory=list)

    def count(self, update: Update, busy: bool) -> None:
        """Add one update."""
        (self.busy_s if busy else self.waiting_s).append(
            (update.visible_ns - update.called_ns) / 1e9
        )
        if busy:
            stall_ms, held_ms, quiet_ms = stalls(update.laps, update.called_ns, update.visible_ns)
            self.trainer_stall_ms.append(update.held_ns / 1e6)
            self.reader_stall_ms.append(stall_ms)
            self.reader_held_ms.append(held_ms)
            self.reader_quiet_ms.append(quiet_ms)


def stalls(laps: list[Lap], called_ns: int, visible_ns: int) -> tuple[float, float, float]:
    """What an update did to the reader's steps, in ms.

    (how much longer than usual the longest took, the longest turn, how much longer the longest
    before the call took)
    """
    before = [took for began, _, took in laps if began + took <= called_ns]
    during = [
        (turn, took)
        for began, turn, took in laps
        if began + took > called_ns and began <= visible_ns
    ]
    usual = statistics.median(before)
    longest = max(took for _, took in during)
    return (
        (longest - usual) / 1e6,
        max(turn for turn, _ in during) / 1e6,
        (max(before) - usual) / 1e6,
    )
