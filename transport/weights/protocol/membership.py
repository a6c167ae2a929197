"""A reader's side of membership: joining until welcome, heartbeats from then on, joining again when
fenced; how often a writer and its readers speak, and how long they wait for each other.

A `GroupMember` is pure: every call takes what happened and the time, and returns the messages to
send, and what else is to be done. A `ReaderEnd` stands before one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from msgspec.structs import replace

from transport.errors import PeerGone, WaitTimeout
from transport.weights.errors import AddressTaken, LayoutMismatch, WeightError
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


Member = TypeVar("Member", bound=GroupMember)


class ReaderEnd(ABC, Generic[Member]):
    """A reader's end that has a seat at the writer: what it is told, and waiting for a version."""

    _member: Member

    def __init__(self, whose: str, clock: Callable[[], float]) -> None:
        """`whose`: for errors."""
        self._whose, self._clock, self._closed = whose, clock, False

    @property
    def version(self) -> int:
        """The version that the attached tensors hold, -1 for none."""
        return -1 if self._is_torn else self._member.version

    @property
    def epoch(self) -> int:
        """The epoch under which the writer let this reader in, 0 before."""
        return self._member.epoch

    @property
    def note(self) -> Note:
        """The newest note of the writer."""
        return dict(self._member.note)

    @property
    def silent_s(self) -> float:
        """Seconds since the writer was last heard; infinite if never."""
        return self._clock() - self._member.heard

    @abstractmethod
    def poll(self) -> object | None:
        """What may be adopted, or None. Never waits."""

    @abstractmethod
    def adopt(self) -> int:
        """Make it the attached tensors' value; the version now held."""

    def wait(self, version: int, timeout_s: float) -> int:
        """Poll and adopt until this version, or a newer one, is held; the version held.

        PeerGone when the writer was not heard in all that time, WaitTimeout when it was but had
        none.
        """
        begun = self._clock()
        while True:
            if self.poll():
                self.adopt()
            if self.version >= version:
                return self.version
            remaining_s = begun + timeout_s - self._clock()
            if remaining_s <= 0:
                break
            self._rest(min(remaining_s, 0.05))
        is_alive = self._member.heard >= begun
        progress = f"version {self.version}" if is_alive else "no word from the writer"
        hint = "at what holds the trainer up" if is_alive else "whether the trainer is alive"
        raise (WaitTimeout if is_alive else PeerGone)(
            f"{self._whose} waited {timeout_s:g} s for weights of version {version}; found"
            f" {progress}; look {hint}"
        )

    @property
    @abstractmethod
    def _is_torn(self) -> bool:
        """Whether a version was taken in half, by an error."""

    @abstractmethod
    def _rest(self, timeout_s: float) -> None:
        """Until there may be something to adopt, at most that long."""

    def _check(self) -> None:
        """Raise what ends this reader for good."""
        self._require_open()
        if self._member.replaced:
            raise AddressTaken(
                f"another process has taken the place of {self._whose}; found this one fenced off"
                " for good; give each reader its own name"
            )
        if self._member.denied:
            raise LayoutMismatch(
                f"{self._whose} cannot take the trainer's weights; {self._member.denied}"
            )

    def _require_open(self) -> None:
        if self._closed:
            raise WeightError("this reader is closed; found a call after close; make a new one")


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
