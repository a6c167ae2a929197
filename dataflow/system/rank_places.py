"""Where the ranks of a trainer are that is spread over several hosts, and what those behind rank 0
are started with.
"""

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from dataflow.system.child import Child
    from dataflow.system.security import RunKeys


class StartsFar(Protocol):
    """Rank 0's line to the other hosts of its ranks."""

    def prepare(self, told: Mapping[str, Any]) -> None:
        """Have every other host make what `Spreads.follower` gives for this, in plain values."""

    def start(self, end: socket.socket, rank: int) -> "Child":
        """Start a rank on its host, which talks over this end of a socket pair as one that was
        forked here would.
        """


@dataclass(frozen=True, kw_only=True)
class RankPlaces:
    """Of all ranks, as one of them sees it."""

    hosts: tuple[str, ...]
    """By rank."""
    devices: tuple[str, ...]
    """By rank, torch's name of its device, on its host."""
    address: str
    """At which the others find this rank's host; gloo and NCCL listen there."""
    meets_at: str
    """Where rank 0 listens: there all meet, before they exchange anything; empty: all are on one
    host now."""
    keys: "RunKeys | None" = field(repr=False)
    """Of the run."""
    starts: StartsFar | None = None
    """Rank 0's; None for the others."""

    def is_far(self, rank: int) -> bool:
        """Whether a rank is on another host than rank 0."""
        return self.hosts[rank] != self.hosts[0]


@runtime_checkable
class Spreads(Protocol):
    """An operator whose ranks may be on several hosts."""

    def follower(self, context: Any, told: Mapping[str, Any]) -> Callable[[int, int], int]:
        """On a host behind rank 0's: what a fork runs that is a rank, given the number of its end
        of a socket pair and its rank, as forks of rank 0 do; its exit status. told: by rank 0, as
        `StartsFar.prepare` was.
        """
