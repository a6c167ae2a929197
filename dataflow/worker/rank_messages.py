"""What rank 0 of a trainer and the hosts of its other ranks say to each other, what ranks put
where they meet, and the pipe that carries a rank's bytes.
"""

import contextlib
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import zmq

from dataflow.system.messages import Codec, LifeMessage, Message, Plain

CHUNK_BYTES = 1 << 20
"""Of what two ranks say to each other, at a time."""

# From the process on another host


class Here(LifeMessage):
    """It is there, and hears; the life is its worker's."""

    host: str


class Started(Message):
    """A rank has a process."""

    rank: int
    pid: int


class Ended(Message):
    """It has ended; all that it said was passed on."""

    rank: int
    status: int


class Failed(Message):
    """No rank can be started there: why, for people."""

    error: str


# From rank 0


class Prepare(Message):
    """Make what ranks run, from this."""

    told: Mapping[str, Plain]


class Start(Message):
    """Start a rank."""

    rank: int


class Hangup(Message):
    """Nothing more is said to a rank."""

    rank: int


class Kill(Message):
    """End a rank."""

    rank: int


class Alive(Message):
    """Asks nothing; it cannot be sent where nobody is."""


class Over(Message):
    """All is over."""


# Both ways


class Bytes(Message):
    """What a rank, or rank 0, says to the other: a part of its stream."""

    rank: int
    data: bytes


# From a rank that is to meet the others


class Set(Message):
    """Keep a value, unless `adds`: then add this number to it."""

    ticket: int
    key: str
    value: bytes
    adds: int | None = None


class Get(Message):
    """Tell these values; wait until all are there, or tell at once what is."""

    ticket: int
    keys: Sequence[str]
    waits: bool


class Delete(Message):
    """Forget a value."""

    ticket: int
    key: str


# To it


class StoredValues(Message):
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


# This process's end of a socket pair with a rank here, or with rank 0: bytes to it, and bytes from
# it.


@dataclass
class RankPipe:
    """One end, which never blocks, and what is under way through it."""

    end: socket.socket
    out: bytearray = field(default_factory=bytearray)
    """Bytes that the other side has not taken yet."""
    speaks: bool = True
    """Whether the other side may still say something."""

    @property
    def wanted(self) -> int:
        """What a poller is to look for; 0: nothing."""
        return (zmq.POLLIN if self.speaks else 0) | (zmq.POLLOUT if self.out else 0)

    def give(self) -> None:
        """Hand over what the other side takes now; for one that is gone nothing stays."""
        try:
            while self.out:
                del self.out[: self.end.send(self.out[:CHUNK_BYTES])]
        except BlockingIOError:
            pass
        except OSError:
            self.out.clear()

    def take(self) -> Iterator[bytes]:
        """What the other side has sent; finally empty, once it will send no more."""
        with contextlib.suppress(BlockingIOError):
            while self.speaks:
                try:
                    data = self.end.recv(CHUNK_BYTES)
                except ConnectionResetError:
                    data = b""
                self.speaks = bool(data)
                yield data
