"""One rank's part in the rounds, of a trainer or of a reader group, without sockets, clocks, threads or torch.

Both take what happens (a word, the time, the end of some work) and return the words to send to the coordinator and the
work to begin, in order. Work is done elsewhere, and its end is told by `formed` and `moved`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from transport.weights.protocol.messages import Note
from transport.weights.sharded.groups import Deadlines, Sleep
from transport.weights.sharded.words import (
    BROKEN,
    WHOLE,
    Beat,
    Bye,
    Committed,
    CoordinatorWord,
    Denied,
    Done,
    Enrol,
    Enrolled,
    Failed,
    Fenced,
    Form,
    Formed,
    Go,
    Gone,
    Join,
    MemberWord,
    Offer,
    Ready,
    Staged,
    Told,
    Void,
    Welcome,
    Whole,
)


@dataclass(frozen=True, kw_only=True)
class Connect:
    """Work: plan, and make the process group."""

    form: Form


@dataclass(frozen=True, kw_only=True)
class Move:
    """Work: send or receive one version."""

    epoch: int
    round: int
    version: int


@dataclass(frozen=True, kw_only=True)
class Abort:
    """Work: this epoch is over; end what runs for it, without waiting."""

    epoch: int


Work = Connect | Move | Abort
Actions = list[MemberWord | Work]


@dataclass(kw_only=True)
class _Turn:
    """What a source rank does for one group."""

    round: int = 0
    version: int = -1
    """Kept for the round, -1 for none."""
    moving: bool = False


class Source:
    """A trainer's rank: it keeps a version for as long as a round needs it."""

    def __init__(
        self, rank: int, ranks: int, key: bytes, deadlines: Deadlines, now: float, *, incarnation: int = 0
    ) -> None:
        self.failure = ""
        """Why nothing can be sent; empty when all is well."""
        self.versions: set[int] = set()
        """Those that rounds may ask for."""
        self._enrol = Enrol(rank=rank, ranks=ranks, key=key, incarnation=incarnation, writer=0)
        self._deadlines = deadlines
        self._enrolled = False
        self._turns: dict[int, _Turn] = {}
        self._sent, self._heard = float("-inf"), now
        self._sleep = Sleep(deadlines.silent_s / 2, now)

    @property
    def kept(self) -> set[int]:
        """Versions that rounds need; their memory must not change."""
        return {turn.version for turn in self._turns.values()} - {-1}

    def receive(self, word: CoordinatorWord, now: float) -> Actions:
        """Take in one word of the coordinator."""
        self._heard = now
        match word:
            case Enrolled():
                self._enrolled, self.failure = True, word.failure
                self._enrol = replace(self._enrol, writer=word.writer)
                return [Staged(versions=sorted(self.versions))]
            case Denied():
                self.failure = word.reason
            case Failed():
                self.failure = word.reason
            case Fenced(epoch=0):
                self._enrolled = False
                return [self._enrol]
            case Form():
                self._turns[word.epoch] = _Turn()
                return [Connect(form=word)]
            case Fenced() if word.epoch in self._turns:
                del self._turns[word.epoch]
                return [Abort(epoch=word.epoch)]
            case Offer() if word.epoch in self._turns:
                if word.version not in self.versions:
                    return [Gone(epoch=word.epoch, round=word.round, version=word.version)]
                self._turns[word.epoch] = _Turn(round=word.round, version=word.version)
                return [Ready(epoch=word.epoch, round=word.round)]
            case Go() if (turn := self._turn(word.epoch, word.round)) and not turn.moving:
                turn.moving = True
                return [Move(epoch=word.epoch, round=word.round, version=turn.version)]
            case Void() if (turn := self._turn(word.epoch, word.round)) and not turn.moving:
                turn.version = -1
        return []

    def tick(self, now: float) -> Actions:
        """What is due at this time: a sign of life."""
        self._heard = min(now, self._heard + self._sleep.slept(now))
        if now - self._heard >= self._deadlines.silent_s and not self.failure:
            self.failure = f"rank 0, which coordinates, has said nothing for {self._deadlines.silent_s:g} s"
        if now - self._sent < self._deadlines.beat_s:
            return []
        self._sent = now
        return [Staged(versions=sorted(self.versions)) if self._enrolled else self._enrol]

    def hold(self, versions: set[int]) -> Actions:
        """From now on these versions can be sent, and no others."""
        self.versions = set(versions)
        return [Staged(versions=sorted(versions))] if self._enrolled else []

    def formed(self, epoch: int, fault: str, mismatch: bool) -> Actions:
        """The process group stands, or does not."""
        return [Formed(epoch=epoch, fault=fault, mismatch=mismatch)] if epoch in self._turns else []

    def moved(self, epoch: int, round: int, state: str, fault: str) -> Actions:
        """A transfer has ended; its version is not needed any more."""
        turn = self._turn(epoch, round)
        if turn is None:
            return []
        turn.version, turn.moving = -1, False
        return [Done(epoch=epoch, round=round, state=state, fault=fault)]

    def give_up(self) -> Actions:
        """End every round that still needs a version: its memory is about to change."""
        out: Actions = []
        for epoch, turn in [(epoch, turn) for epoch, turn in self._turns.items() if turn.version >= 0]:
            del self._turns[epoch]
            fault = "the trainer waits no longer for this transfer"
            out += [Abort(epoch=epoch), Done(epoch=epoch, round=turn.round, state=BROKEN, fault=fault)]
        return out

    def leaving(self) -> Actions:
        """This rank goes."""
        return [Bye(epoch=0)]

    def _turn(self, epoch: int, round: int) -> _Turn | None:
        turn = self._turns.get(epoch)
        return turn if turn and turn.round == round and turn.version >= 0 else None


class Destination:
    """A rank of a reader group: it takes part in rounds while it has a buffer free, and sees whole versions only."""

    def __init__(
        self,
        group: str,
        rank: int,
        ranks: int,
        key: bytes,
        layout: dict[str, object],
        deadlines: Deadlines,
        incarnation: int,
    ) -> None:
        self.version = -1
        """Computed with, -1 for none."""
        self.offer = -1
        """The whole version that may be adopted, -1 for none."""
        self.epoch = 0
        """Of this join, 0 while there is none."""
        self.joined = False
        self.replaced = False
        self.denied = ""
        """Why this rank does not fit; then it stays out."""
        self.refused = ""
        """What was found in the last version, if it was damaged."""
        self.note: Note = {}
        self.heard = float("-inf")
        """When the coordinator was last heard."""
        self._join = (group, rank, ranks, incarnation, key, layout if rank == 0 else {})
        self._deadlines = deadlines
        self._attempt = 1
        self._writer = self._forming = 0
        """The coordinator that `version` is from, and that of this join."""
        self._round, self._moving = Offer(epoch=0, round=0, version=-1), False
        self._proved = False
        self._sent = self._asked = float("-inf")

    def receive(self, word: CoordinatorWord, now: float) -> Actions:
        """Take in one word of the coordinator."""
        self.heard = now
        match word:
            case Told():
                self.note = word.note
            case Denied():
                self.denied = word.reason
            case Form() if word.attempt == self._attempt and not self.epoch and not self.replaced:
                self.epoch, self._forming = word.epoch, word.writer
                return [Connect(form=word)]
            case Welcome() if word.epoch == self.epoch:
                self.joined, self.note = True, word.note
                return [self._ready_ahead()]
            case Fenced() if word.epoch == self.epoch:
                return self._fenced(word, now)
            case Offer() if word.epoch == self.epoch and not self._moving and self.offer < 0:
                self._round, self._proved = word, False
                return [Ready(epoch=word.epoch, round=word.round)]
            case Go() if self._in(word.epoch, word.round) and not self._moving:
                self._moving = True
                return [Move(epoch=word.epoch, round=word.round, version=self._round.version)]
            case Void() if self._in(word.epoch, word.round):
                self.refused = word.fault
                self._round = Offer(epoch=word.epoch, round=word.round, version=-1)
                return [self._ready_ahead()]
            case Whole() if self._in(word.epoch, word.round) and self._proved:
                self.offer, self.note, self.refused = word.version, word.note, ""
                self._round = Offer(epoch=word.epoch, round=word.round, version=-1)
        return []

    def tick(self, now: float) -> Actions:
        """What is due at this time: a sign of life."""
        if self.replaced or self.denied or now - self._sent < self._deadlines.beat_s:
            return []
        self._sent = now
        if self.epoch:
            held = self.version if self._writer == self._forming else -1
            return [Beat(epoch=self.epoch, version=held, whole=self.offer)]
        self._asked = now
        group, rank, ranks, incarnation, key, layout = self._join
        return [
            Join(
                group=group, rank=rank, ranks=ranks, incarnation=incarnation, attempt=self._attempt,
                writer=self._writer, version=self.version, key=key, layout=layout,
            )
        ]  # fmt: skip

    def formed(self, epoch: int, fault: str, mismatch: bool) -> Actions:
        """The process group stands, or does not."""
        return [Formed(epoch=epoch, fault=fault, mismatch=mismatch)] if epoch == self.epoch else []

    def moved(self, epoch: int, round: int, state: str, fault: str) -> Actions:
        """A transfer has ended."""
        if not self._in(epoch, round):
            return []
        self._moving, self._proved = False, state == WHOLE
        return [Done(epoch=epoch, round=round, state=state, fault=fault)]

    def adopted(self, version: int) -> Actions:
        """This version, offered a while ago, is computed with from now on; the buffer of the one before is free."""
        self.version, self._writer = version, self._forming
        if self.offer != version:
            return []
        self.offer = -1
        return [Committed(epoch=self.epoch, version=version), self._ready_ahead()]

    def leaving(self) -> Actions:
        """This rank goes."""
        return [Bye(epoch=self.epoch)]

    def _ready_ahead(self) -> Ready:
        """A buffer is free for the next round, whatever version that brings: saves the time of asking."""
        return Ready(epoch=self.epoch, round=self._round.round + 1)

    def _fenced(self, word: Fenced, now: float) -> Actions:
        out: Actions = [Abort(epoch=word.epoch)] if self.epoch else []
        self.epoch, self.joined, self.offer, self._moving, self._proved = 0, False, -1, False, False
        self._round = Offer(epoch=0, round=0, version=-1)
        self.replaced = self.replaced or word.replaced
        self._attempt += 1
        # At once after an epoch that has lasted; what ends as soon as it begins is tried once a beat.
        self._sent = self._asked
        return out + self.tick(now)

    def _in(self, epoch: int, round: int) -> bool:
        return epoch == self.epoch and round == self._round.round and self._round.version >= 0
