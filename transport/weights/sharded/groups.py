"""What the coordinator knows of each rank and each reader group, and how long it waits for them."""

from __future__ import annotations

from dataclasses import dataclass, field

from transport.weights.sharded.words import Join


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """How often the ranks speak and how long each phase may take, in seconds."""

    beat_s: float = 0.5
    """Between two signs of life, in both directions."""
    silent_s: float = 20.0
    """A rank not heard for that long is gone."""
    form_s: float = 60.0
    """To plan, and to connect all ranks; also for the trainer's ranks to show up."""
    ready_s: float = 20.0
    """From an offer until every rank is ready."""
    transfer_s: float = 120.0
    """From the start of a transfer until every rank has proved its part."""


class Sleep:
    """Whether the process itself has not run for a while: frozen, or kept from its thread; nobody is late then."""

    def __init__(self, limit_s: float, now: float) -> None:
        """`limit_s`: what is shorter is no sleep."""
        self._limit_s, self._awake = limit_s, now

    def slept(self, now: float) -> float:
        """Seconds since the last call, 0 where they are less than the limit."""
        passed, self._awake = now - self._awake, now
        return passed if passed >= self._limit_s else 0.0


@dataclass(kw_only=True)
class SourceSeat:
    """A rank of the trainer."""

    peer: bytes
    incarnation: int
    heard: float
    versions: set[int] = field(default_factory=set)


@dataclass(kw_only=True)
class Seat:
    """A rank of a reader group."""

    peer: bytes
    join: Join
    version: int
    heard: float


@dataclass(kw_only=True)
class Group:
    """A reader group and the phase it is in."""

    name: str
    order: int
    """For the picture: groups in the order of joining."""
    seats: dict[int, Seat] = field(default_factory=dict)
    phase: str = "gathering"
    epoch: int = 0
    round: int = 0
    offered: int = -1
    """The version of the round."""
    version: int = -1
    """Held by all ranks."""
    refused: int = -1
    """The newest version found damaged."""
    waiting: set[bytes] = field(default_factory=set)
    """Peers whose answer ends the phase."""
    deadline: float = float("inf")
    early: set[bytes] = field(default_factory=set)
    """Destination ranks that are ready for the next round already."""
    damage: str = ""
    incarnations: dict[int, int] = field(default_factory=dict)
    """By rank, the latest that has come."""

    def enter(self, phase: str, waiting: set[bytes], deadline: float = float("inf")) -> None:
        """Go on to the next phase, which ends when all of `waiting` have answered."""
        self.phase, self.waiting, self.deadline = phase, waiting, deadline

    @property
    def peers(self) -> set[bytes]:
        """Of its ranks."""
        return {seat.peer for seat in self.seats.values()}
