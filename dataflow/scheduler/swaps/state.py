"""What a scheduler knows of the operators that took the place of others in its run."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from dataflow.folder.swaps import Swap


@dataclass(kw_only=True)
class Swaps:
    """Those that count, and the one that is being swapped in."""

    made: list[Swap] = field(default_factory=list)
    """In order; whatever worker starts runs the last of each of its nodes. Of those before it only
    the one is kept that it took the place of."""
    worker: str = ""
    """Which is being replaced by one with the last of them; empty: none is."""
    taken_back: str = ""
    """Why the last one does not count any more, while that worker starts without it."""

    @property
    def following(self) -> int:
        """The number of the next one."""
        return 1 + max((swap.number for swap in self.made), default=0)

    def to_plain(self) -> dict[str, Any]:
        """What the next scheduler takes up, for JSON."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "Swaps":
        """What `to_plain` gave."""
        return cls(**{**plain, "made": [Swap(**each) for each in plain["made"]]})
