"""One rank's part in the rounds, of a trainer or of a reader group, without sockets, clocks,
threads or torch.

Both take what happens (a message, the time, the end of some work) and return the messages to send
to the coordinator and the work to begin, in order. Work is done elsewhere, and its end is told by
`formed` and `transferred`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from transport.weights.protocol.membership import Deadlines, FreezeWatch, GroupMember
from transport.weights.protocol.messages import (
    WHOLE,
    WITHDRAWN,
    Committed,
    Denied,
    Fenced,
    FormGroup,
    FormResult,
    GroupMessage,
    Join,
    Leave,
    MemberMessage,
    Offer,
    Ready,
    Register,
    Registered,
    RoundAborted,
    SourceFailed,
    SourceHeartbeat,
    StartTransfer,
    TransferResult,
    Verified,
    Welcome,
    WriterMessage,
)


@dataclass(frozen=True)
class TransferOutcome:
    """How that ended."""

    state: str
    """whole | damaged | broken."""
    fault: str = ""
    sent: Sequence[int] = ()
    """Of a source rank: bytes of weights, by rank of the epoch's readers."""
    whole: Sequence[int] = ()
    """Of a source rank: what these would have been without deltas."""


@dataclass(frozen=True)
class GroupVersion:
    """A version that every rank of the group has its part of."""

    version: int
    epoch: int
    """Of the group."""
    writer: int
    """Whose version it is."""


@dataclass(frozen=True, kw_only=True)
class EndEpoch:
    """Work: this epoch is over; end what runs for it, without waiting."""

    epoch: int


Action = MemberMessage | FormGroup | StartTransfer | EndEpoch
"""A message to the coordinator; or work: to plan and make the process group, to send or receive one
version, to end an epoch."""
Actions = list[Action]


class SourceRank:
    """A trainer's rank: it keeps a version for as long as a transfer needs it."""

    def __init__(
        self,
        rank: int,
        ranks: int,
        key: bytes,
        deadlines: Deadlines,
        now: float,
        *,
        incarnation: int = 0,
    ) -> None:
        self.failure = ""
        """Why nothing can be sent; empty when all is well."""
        self.versions: set[int] = set()
        """Those that may be asked for."""
        self.join = Register(rank=rank, ranks=ranks, key=key, incarnation=incarnation, writer=0)
        self._deadlines = deadlines
        self._registered = False
        self._turns: dict[int, StartTransfer | None] = {}
        """By epoch, what is under way."""
        self._sent, self.heard = float("-inf"), now
        """When the coordinator was last heard, in seconds."""
        self._watch = FreezeWatch(deadlines.gone_s / 2, now)

    @property
    def kept(self) -> set[int]:
        """Versions that transfers need; their memory must not change."""
        return {turn.version for turn in self._turns.values() if turn}

    def receive(self, message: WriterMessage, now: float) -> Actions:
        """Take in one message of the coordinator."""
        self.heard = now
        match message:
            case Registered():
                self._registered, self.failure = True, message.failure
                self.join = replace(self.join, writer=message.writer)
                return [SourceHeartbeat(versions=sorted(self.versions))]
            case Denied() | SourceFailed():
                self.failure = message.reason
            case Fenced(epoch=0):
                self._registered = False
                return [self.join]
            case FormGroup():
                self._turns[message.epoch] = None
                return [message]
            case Fenced() if message.epoch in self._turns:
                del self._turns[message.epoch]
                return [EndEpoch(epoch=message.epoch)]
            case StartTransfer() if (
                message.epoch in self._turns and self._turns[message.epoch] is None
            ):
                if message.version not in self.versions:
                    fault = f"source rank {self.join.rank} has version {message.version} no longer"
                    return [
                        TransferResult(
                            epoch=message.epoch, round=message.round, state=WITHDRAWN, fault=fault
                        )
                    ]
                self._turns[message.epoch] = message
                return [message]
        return []

    def tick(self, now: float) -> Actions:
        """What is due at this time: a sign of life."""
        self.heard = min(now, self.heard + self._watch.frozen_s(now))
        if now - self.heard >= self._deadlines.gone_s and not self.failure:
            self.failure = (
                f"rank 0, which coordinates, has said nothing for {self._deadlines.gone_s:g} s"
            )
        if now - self._sent < self._deadlines.heartbeat_s:
            return []
        self._sent = now
        return [SourceHeartbeat(versions=sorted(self.versions)) if self._registered else self.join]

    def hold(self, versions: set[int]) -> Actions:
        """From now on these versions can be sent, and no others."""
        self.versions = set(versions)
        return [SourceHeartbeat(versions=sorted(versions))] if self._registered else []

    def formed(self, epoch: int, fault: str, misfit: str) -> Actions:
        """The process group stands, or does not."""
        return [FormResult(epoch=epoch, fault=fault, misfit=misfit)] if epoch in self._turns else []

    def transferred(self, epoch: int, round: int, outcome: TransferOutcome) -> Actions:
        """A transfer has ended; its version is not needed any more."""
        turn = self._turns.get(epoch)
        if turn is None or turn.round != round:
            return []
        self._turns[epoch] = None
        return [
            TransferResult(
                epoch=epoch,
                round=round,
                state=outcome.state,
                fault=outcome.fault,
                sent=[*outcome.sent],
                whole=[*outcome.whole],
            )
        ]

    def give_up(self) -> Actions:
        """End every transfer that still needs a version: its memory is about to change."""
        out: Actions = []
        fault = "the trainer waits no longer for this transfer"
        for turn in [turn for turn in self._turns.values() if turn]:
            del self._turns[turn.epoch]
            out += [
                EndEpoch(epoch=turn.epoch),
                TransferResult(epoch=turn.epoch, round=turn.round, state=WITHDRAWN, fault=fault),
            ]
        return out

    def leaving(self) -> Leave:
        """This rank goes."""
        return Leave(epoch=0)


class ReaderRank(GroupMember):
    """A rank of a reader group: it takes part in rounds while it has a buffer free, and sees whole
    versions only.
    """

    def __init__(self, join: Join, deadlines: Deadlines) -> None:
        super().__init__(join, deadlines)
        self.offer = -1
        """The version that may be adopted, -1 for none."""
        self.refused = ""
        """What was found in the last version, if it was damaged."""
        self._connecting = self._whole = False
        self._round, self._arriving = 0, -1
        """The last round, and its version until that may be adopted, or never will be."""

    def formed(self, epoch: int, fault: str, misfit: str) -> Actions:
        """The process group stands, or does not."""
        if epoch != self.epoch:
            return []
        result = FormResult(epoch=epoch, fault=fault, misfit=misfit)
        return [result] if fault else [self._ready_ahead(), result]

    def transferred(self, epoch: int, round: int, outcome: TransferOutcome) -> Actions:
        """A transfer has ended."""
        if epoch != self.epoch or not self._in(round):
            return []
        self._whole = outcome.state == WHOLE
        return [TransferResult(epoch=epoch, round=round, state=outcome.state, fault=outcome.fault)]

    @property
    def offered(self) -> GroupVersion | None:
        """What may be adopted, if anything."""
        return GroupVersion(self.offer, self.epoch, self._writer) if self.offer >= 0 else None

    def adopted(
        self, group_version: GroupVersion, held_s: float = 0.0, taken_s: float = 0.0
    ) -> Actions:
        """This version is computed with from now on, though its epoch may be over; the buffer of
        the one before is free. held_s: how long that has kept the rank's loop. taken_s: since it
        began to arrive.
        """
        self.hold(group_version.version, group_version.writer)
        if self.offered != group_version:
            return []
        self.offer = -1
        done = Committed(
            epoch=self.epoch, version=group_version.version, held_s=held_s, taken_s=taken_s
        )
        return [self._ready_ahead(), done]

    @property
    def _verified(self) -> int:
        return self.offer

    def _welcomed(self, message: Welcome) -> Actions:
        return self._ended() if message.epoch != self.epoch else []

    def _ended(self) -> Actions:
        out: Actions = [EndEpoch(epoch=self.epoch)] if self.epoch else []
        self.offer, self._connecting, self._whole = -1, False, False
        self._round, self._arriving = 0, -1
        return out

    def _receive(self, message: GroupMessage) -> Actions:
        match message:
            case FormGroup() if not self._connecting:
                self._connecting = True
                return [message]
            case Offer() if self._arriving < 0 and self.offer < 0:
                return [self._ready_ahead()]
            case StartTransfer() if (
                self._arriving < 0 and self.offer < 0 and message.round > self._round
            ):
                self._round, self._arriving, self._whole = message.round, message.version, False
                return [message]
            case RoundAborted() if self._in(message.round):
                self.refused, self._arriving = message.fault, -1
                return [self._ready_ahead()]
            case Verified() if self._in(message.round) and self._whole:
                self.offer, self.note, self.refused, self._arriving = (
                    message.version,
                    message.note,
                    "",
                    -1,
                )
        return []

    def _ready_ahead(self) -> Ready:
        """Announce a free buffer for the next round before its version is known: saves a round
        trip.
        """
        return Ready(epoch=self.epoch, round=self._round)

    def _in(self, round: int) -> bool:
        return round == self._round and self._arriving >= 0
