"""A reader's side of membership: joining until welcome, heartbeats from then on, joining again when
fenced; and how often a writer and its readers speak, and how long they wait for each other.

Pure: every call takes what happened and the time, and returns the messages to send, and what else
is to be done.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from transport.weights.protocol.messages import (
    Denied,
    Fenced,
    GroupMessage,
    Join,
    Leave,
    Note,
    ReaderHeartbeat,
    Registered,
    SourceFailed,
    Welcome,
    WriterHeartbeat,
    WriterMessage,
)


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Of all ways to move versions."""

    heartbeat_s: float = 0.5
    """Between two signs of life, in both directions."""
    silent_s: float = 3.0
    """After that long without a message a reader is called silent."""
    gone_s: float = 120.0
    """After that long without a message a member is struck off; it may join again."""
    release_s: float = 5.0
    """A waiting version gives the readers this long to leave a segment before it is abandoned to
    them."""


@dataclass(frozen=True, kw_only=True)
class Deadlines(Timing):
    """Of collective rounds, whose ranks speak in a thread of their own, and where one that is gone
    holds up all.
    """

    gone_s: float = 20.0
    form_s: float = 60.0
    """To plan, and to connect all ranks; also for the trainer's ranks to show up."""
    ready_s: float = 20.0
    """From an offer until every rank is ready."""
    transfer_s: float = 120.0
    """From the start of a transfer until every rank has verified its part."""


class FreezeWatch:
    """Whether the process itself stood still for a while: stopped, or its thread was starved; then
    no peer counts as late.
    """

    def __init__(self, limit_s: float, now: float) -> None:
        """`limit_s`: what is shorter is no freeze."""
        self._limit_s, self._awake = limit_s, now

    def frozen_s(self, now: float) -> float:
        """Seconds since the last call, 0 where they are less than the limit."""
        passed, self._awake = now - self._awake, now
        return passed if passed >= self._limit_s else 0.0


class GroupMember(ABC):
    """One rank of a reader group. Subclasses take versions: `_receive`, and what ends with an
    epoch.
    """

    def __init__(self, join: Join, pace: Timing) -> None:
        """`join`: the first one."""
        self.pace = pace
        self.join = join
        """What is said until welcome."""
        self.version = -1
        """Computed with, -1 for none."""
        self.epoch = 0
        """Of this join, 0 while there is none."""
        self.replaced = False
        """Whether another process took the name, or the rank; then this one stays out."""
        self.denied = ""
        """Why this rank does not fit; then it stays out, too."""
        self.note: Note = {}
        """The writer's newest note."""
        self.heard = float("-inf")
        """When the writer was last heard, in seconds."""
        self._writer = 0
        """Of this join; that of the version stands in `join`."""
        self._sent = self._asked = float("-inf")

    def receive(self, message: WriterMessage, now: float) -> Sequence[Any]:
        """Take in one message of the writer; what to answer, and to do."""
        out: Sequence[Any] = []
        match message:
            case Welcome():
                if message.attempt != self.join.attempt or self.replaced:
                    return []
                out = self._welcomed(message)
                self.epoch, self._writer, self.note = message.epoch, message.writer, message.note
            case Fenced():
                if not (message.epoch == self.epoch if self.epoch else message.replaced):
                    return []
                out = self._fenced(message, now)
            case Denied():
                self.denied = message.reason
            case Registered() | SourceFailed():
                return []
            case _ if message.epoch != self.epoch:
                return []
            case WriterHeartbeat():
                self.note = message.note
            case _:
                out = self._receive(message)
        self.heard = now
        return out

    def tick(self, now: float) -> list[Join | ReaderHeartbeat]:
        """What is due at this time: a Join until welcome, a heartbeat from then on."""
        if self.replaced or self.denied or now - self._sent < self.pace.heartbeat_s:
            return []
        self._sent = now
        if self.epoch:
            version = self.version if self.join.writer == self._writer else -1
            return [ReaderHeartbeat(epoch=self.epoch, version=version, verified=self._verified)]
        self._asked = now
        return [self.join]

    def hold(self, version: int, writer: int) -> None:
        """This version of that writer is computed with from now on."""
        self.version, self.join = version, replace(self.join, version=version, writer=writer)

    def leaving(self) -> Leave:
        """This rank goes."""
        return Leave(epoch=self.epoch)

    @property
    def _verified(self) -> int:
        return -1

    @abstractmethod
    def _welcomed(self, message: Welcome) -> Sequence[Any]:
        """A Welcome has come: to a new epoch, or to this one again."""

    @abstractmethod
    def _ended(self) -> Sequence[Any]:
        """The epoch is over."""

    @abstractmethod
    def _receive(self, message: GroupMessage) -> Sequence[Any]:
        """A message of this epoch."""

    def _fenced(self, message: Fenced, now: float) -> Sequence[Any]:
        out = self._ended()
        self.epoch = 0
        self.replaced = self.replaced or message.replaced
        self.join = replace(self.join, attempt=self.join.attempt + 1)
        # At once after an epoch that has lasted; what ends as soon as it begins is tried once a
        # heartbeat.
        self._sent = self._asked
        return [*out, *self.tick(now)]


@dataclass(frozen=True, kw_only=True)
class VerifiedOffer:
    """A version that the first rank has verified and holds still."""

    version: int
    segment: str
    """Tells it from every other that was offered under its number: where it lies, or with whom and
    when it came."""
    layout: Mapping[str, Any] | None = None
    """The writer's, in plain values, where the others need one to find their slices, and it is
    another than before."""
