"""What a tracker's process, the keeper of all trackers, and the run say to each other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dataflow.system.messages import Codec, Plain

LONGEST = 600
"""Characters of a text for people."""

# From a tracker's process to its keeper


@dataclass(frozen=True)
class TrackerAt:
    """A sign of life."""

    call: str
    """Of the tracker, that begins now; empty: it waits for lines."""


@dataclass(frozen=True)
class TrackerSees:
    """Where to look."""

    text: str


@dataclass(frozen=True)
class TrackerToldOf:
    """A batch was taken in."""

    lines: int


@dataclass(frozen=True)
class TrackerFailed:
    """It ends."""

    call: str
    error: str


@dataclass(frozen=True)
class TrackerDone:
    """All is told; it ends."""


# From the keeper to a tracker's process, and from the run to the keeper


@dataclass(frozen=True)
class RunIsOver:
    """Tell what is left, and finish."""

    outcome: str
    """finished | stopped | failed | died."""


@dataclass(frozen=True)
class LeaveRun:
    """End, so that another goes on from there later: the run's disk is full, or nobody waits any
    more.
    """


# From the run to the keeper


@dataclass(frozen=True)
class KeepTrackers:
    """Which trackers of which run."""

    folder: str
    trackers: Sequence[Mapping[str, Plain]]
    limits: Mapping[str, Plain]
    path: Sequence[str]
    """Where modules are found."""
    parent: int
    """The process of the run."""


# From the keeper to the run


@dataclass(frozen=True)
class KeeperSays:
    """For people."""

    text: str


TRACKER_CODEC: Codec[Any] = Codec(
    "tracker",
    1,
    TrackerAt,
    TrackerSees,
    TrackerToldOf,
    TrackerFailed,
    TrackerDone,
    RunIsOver,
    LeaveRun,
)
KEEPER_CODEC: Codec[Any] = Codec("keeper", 1, KeepTrackers, RunIsOver, KeeperSays)
