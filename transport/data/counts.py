"""What has crossed an edge, as one of its ends counts it: batches, rows and bytes of their bodies."""

from dataclasses import dataclass, field
from typing import TypeAlias

Crossed: TypeAlias = tuple[int, int, int]
"""Batches, rows, bytes."""
CELLS = 3
CELL_BYTES = 8
COUNTS_BYTES = CELLS * CELL_BYTES


class EdgeCounts:
    """Sums that only grow, in memory that its owner may give.

    >>> counts = EdgeCounts()
    >>> counts.add(1, 8, 4096)
    >>> counts.add(1, 2, 1024)
    >>> counts.read()
    (2, 10, 5120)
    """

    def __init__(self, memory: memoryview | None = None) -> None:
        """memory: COUNTS_BYTES of it; None: its own."""
        self._cells = (memoryview(bytearray(COUNTS_BYTES)) if memory is None else memory).cast("q")

    def add(self, batches: int, rows: int, nbytes: int) -> None:
        """So much more."""
        cells = self._cells
        cells[0] += batches
        cells[1] += rows
        cells[2] += nbytes

    def read(self) -> Crossed:
        """All so far; asked in any thread."""
        cells = self._cells
        return cells[0], cells[1], cells[2]


@dataclass(frozen=True)
class EndCounts:
    """What one process counts of an edge that begins there, ends there, or both.

    What is sent is counted before it leaves, again each time that it is sent again; what is received, when it is here,
    though it had been here before; what is acknowledged, when its sender lets go of it. So at any time, whoever was
    killed meanwhile, if counts outlive their process,

        acknowledged <= received <= sent

    and all three are equal once all is acknowledged, where nothing had to be sent again.
    """

    sent: EdgeCounts = field(default_factory=EdgeCounts)
    received: EdgeCounts = field(default_factory=EdgeCounts)
    acknowledged: EdgeCounts = field(default_factory=EdgeCounts)
