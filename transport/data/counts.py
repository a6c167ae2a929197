"""What has crossed an edge, as one of its ends counts it: batches, rows and bytes of their
bodies.
"""

from dataclasses import dataclass, field
from typing import NamedTuple


class Crossed(NamedTuple):
    """So much of an edge."""

    batches: int = 0
    rows: int = 0
    bytes: int = 0


COUNTS_BYTES = 8 * len(Crossed._fields)
"""Of memory, for one `Crossed`: its numbers in their order, of 8 bytes each."""
_BATCHES, _ROWS, _BYTES = map(Crossed._fields.index, ("batches", "rows", "bytes"))


class EdgeCounts:
    """Sums that only grow, in memory that its owner may give.

    >>> counts = EdgeCounts()
    >>> counts.add(1, 8, 4096)
    >>> counts.add(1, 2, 1024)
    >>> counts.read()
    Crossed(batches=2, rows=10, bytes=5120)
    """

    def __init__(self, memory: memoryview | None = None) -> None:
        """memory: COUNTS_BYTES of it; None: its own."""
        self._cells = (memoryview(bytearray(COUNTS_BYTES)) if memory is None else memory).cast("q")

    def add(self, batches: int, rows: int, nbytes: int) -> None:
        """So much more."""
        cells = self._cells
        cells[_BATCHES] += batches
        cells[_ROWS] += rows
        cells[_BYTES] += nbytes

    def read(self) -> Crossed:
        """All so far; asked in any thread."""
        return Crossed(*self._cells.tolist())


@dataclass(frozen=True)
class EndCounts:
    """What one process counts of an edge that begins there, ends there, or both.

    What is sent is counted before it leaves, again each time that it is sent again; what is
    received, when it is here, though it had been here before; what is acknowledged, when its sender
    lets go of it. So at any time, whoever was killed meanwhile, if counts outlive their process,

        acknowledged <= received <= sent

    and all three are equal once all is acknowledged, where nothing had to be sent again.
    """

    sent: EdgeCounts = field(default_factory=EdgeCounts)
    received: EdgeCounts = field(default_factory=EdgeCounts)
    acknowledged: EdgeCounts = field(default_factory=EdgeCounts)
