"""What rank 0 of a trainer and the hosts of its other ranks say to each other, and what ranks put
where they meet.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from dataflow.system.messages import Codec, Plain

CHUNK_BYTES = 1 << 20
"""Of what two ranks say to each other, at a time."""

# From the process on another host


@dataclass(frozen=True)
class Here:
    """It is there, and hears."""

    host: str
    attempt: int
    """Of its worker."""


@dataclass(frozen=True)
class Started:
    """A rank has a process."""

    rank: int
    pid: int


@dataclass(frozen=True)
class Ended:
    """It has ended; all that it said was passed on."""

    rank: int
    status: int


@dataclass(frozen=True)
class Failed:
    """No rank can be started there: why, for people."""

    error: str


# From rank 0


@dataclass(frozen=True)
class Prepare:
    """Make what ranks run, from this."""

    told: Mapping[str, Plain]


@dataclass(frozen=True)
class Start:
    """Start a rank."""

    rank: int


@dataclass(frozen=True)
class Hangup:
    """Nothing more is said to a rank."""

    rank: int


@dataclass(frozen=True)
class Kill:
    """End a rank."""

    rank: int


@dataclass(frozen=True)
class Alive:
    """Asks nothing; it cannot be sent where nobody is."""


@dataclass(frozen=True)
class Over:
    """All is over."""


# Both ways


@dataclass(frozen=True)
class Bytes:
    """What a rank, or rank 0, says to the other: a part of its stream."""

    rank: int
    data: bytes


# From a rank that is to meet the others


@dataclass(frozen=True)
class Set:
    """Keep a value, unless `adds`: then add this number to it."""

    ticket: int
    key: str
    value: bytes
    adds: int | None = None


@dataclass(frozen=True)
class Get:
    """Tell these values; wait until all are there, or tell at once what is."""

    ticket: int
    keys: Sequence[str]
    waits: bool


@dataclass(frozen=True)
class Delete:
    """Forget a value."""

    ticket: int
    key: str


# To it


@dataclass(frozen=True)
class StoredValues:
    """The values that are there."""

    ticket: int
    values: Mapping[str, bytes]


ToRankZero: TypeAlias = Here | Started | Ended | Failed | Bytes | Set | Get | Delete
FromRankZero: TypeAlias = Prepare | Start | Hangup | Kill | Alive | Over | Bytes | StoredValues

TO_RANK_ZERO: Codec[ToRankZero] = Codec(
    "dataflow.to-rank-zero", 1, Here, Started, Ended, Failed, Bytes, Set, Get, Delete
)
FROM_RANK_ZERO: Codec[FromRankZero] = Codec(
    "dataflow.from-rank-zero", 1, Prepare, Start, Hangup, Kill, Alive, Over, Bytes, StoredValues
)
