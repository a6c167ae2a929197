"""Versions in collective rounds: the coordinator on source rank 0 says which readers take which
version when.

A reader is a group of ranks. Those that are complete form one epoch with the trainer's ranks: one
process group, so one communicator of each rank whatever the number of readers. In an epoch one
transfer is under way at a time. It starts when all source ranks have a version, for all readers
that lack it and have room; who is asked for room, or still adopts the version before, takes part in
the next one. A reader that comes when an epoch is there waits for the end of its transfer; then all
form another. Whoever is lost, does not answer before a deadline or breaks a transfer ends the
epoch, and all that live form another: nobody waits for one that is gone, and a version under way is
sent again.

Readers whose epochs break twice in a row form two epochs, half of them in each, and so on, until
whoever breaks them is alone; those that then take a version go together again. There are at most
`EPOCHS` at a time. Where one-sided executors move the bytes, and a process group carries words
between processes of one machine, each reader has its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from transport.weights.protocol.membership import Deadlines, FreezeWatch
from transport.weights.protocol.messages import (
    BROKEN,
    DAMAGED,
    WITHDRAWN,
    Committed,
    Denied,
    EpochReader,
    Fenced,
    FormGroup,
    FormResult,
    GetValue,
    Join,
    Leave,
    MemberMessage,
    Offer,
    Put,
    ReaderHeartbeat,
    Ready,
    Register,
    Registered,
    RoundAborted,
    SourceFailed,
    SourceHeartbeat,
    StartTransfer,
    StoredValue,
    TransferResult,
    Verified,
    WriterHeartbeat,
)
from transport.weights.protocol.roster import (
    Epoch,
    Group,
    MemberRank,
    Outgoing,
    Phase,
    Roster,
    Sent,
)


@dataclass(kw_only=True)
class _Source:
    """A rank of the trainer."""

    rank: int
    peer: bytes
    incarnation: int
    heard: float
    versions: set[int] = field(default_factory=set)


EPOCHS = 4
"""At most, between a trainer and all its readers."""
GATHER_BEATS = 2
"""Heartbeats that an epoch waits for the other readers that are known."""


class Coordinator(Roster):
    """Who is in, and what each group does."""

    def __init__(
        self,
        ranks: int,
        key: bytes,
        layout: Mapping[str, Any],
        store: str,
        *,
        backend: str = "gloo",
        bucket_bytes: int = 16 << 20,
        deltas: bool = False,
        joint: bool = True,
        writer: int,
        now: float,
        deadlines: Deadlines | None = None,
    ) -> None:
        """`ranks`, `key`, `layout`: of the trainer. `store`: prefix of the paths where process
        groups meet; empty: they meet over the coordinator's line. `joint`: whether readers share an
        epoch.
        """
        self.deadlines = deadlines or Deadlines()
        super().__init__(writer, {}, self.deadlines)
        self.failure = ""
        """Which source rank is missing, and why; empty when all are there or may still come."""
        self._sent: dict[str, Sent] = {}
        self.traffic = (0, 0)
        """Bytes of weights that all source ranks have sent to all groups, and what these would be
        without deltas."""
        self._ranks, self._key, self._trainer, self._store = ranks, key, dict(layout), store
        self._backend, self._bucket_bytes, self._deltas = backend, bucket_bytes, deltas
        self._joint = joint
        self._alive: dict[int, Epoch] = {}
        self._sources: dict[int, _Source] = {}
        self._left: set[int] = set()
        self._begun = now
        self._watch = FreezeWatch(self.deadlines.gone_s / 2, now)

    @property
    def sent(self) -> dict[str, Sent]:
        """By reader group that is known, of the newest version that it has had whole."""
        return {name: sent for name, sent in self._sent.items() if name in self._groups}

    @property
    def newest(self) -> int:
        """The newest version that every source rank can send, -1 for none."""
        if len(self._sources) < self._ranks:
            return -1
        return max(
            set.intersection(*(source.versions for source in self._sources.values())), default=-1
        )

    def receive(self, peer: bytes, message: MemberMessage, now: float) -> Outgoing:
        """Answer one message of one rank."""
        if isinstance(message, Register):
            return self._register(peer, message, now)
        source = self._source(peer)
        if isinstance(message, SourceHeartbeat):
            return (
                self._staged(source, message, now)
                if source
                else [(peer, Fenced(epoch=0, replaced=False))]
            )
        if source is None or isinstance(message, Join):
            return super().receive(peer, message, now)
        source.heard = now
        if isinstance(message, Leave):
            return self._source_leaves(source)
        epoch = self._alive.get(message.epoch)
        if epoch is None:
            return [(peer, Fenced(epoch=message.epoch, replaced=False))]
        return self._answered(epoch, peer, None, message, now)

    def tick(self, now: float) -> Outgoing:
        """The messages due at this time: signs of life, and the end of whatever passed its
        deadline.
        """
        frozen_s = self._watch.frozen_s(now)
        self._begun += frozen_s
        ends: list[_Source | MemberRank] = [*self._sources.values()]
        ends += [seat for group in self._groups.values() for seat in group.seats.values()]
        for end in ends:
            end.heard = min(now, end.heard + frozen_s)
        gone = [
            source.peer
            for source in self._sources.values()
            if now - source.heard >= self.pace.gone_s
        ]
        out = [
            reply
            for peer in gone
            for reply in self._strike(peer, f"it has said nothing for {self.pace.gone_s:g} s")
        ]
        for group in list(self._groups.values()):
            group.deadline += frozen_s
            if now >= group.deadline:
                count = len(self._sources) + len(group.seats)
                self.faults[group.name] = _late(group.phase, len(group.waiting), count)
                out += self._fence(group)
        for epoch in list(self._alive.values()):
            epoch.deadline += frozen_s
            if now >= epoch.deadline and epoch.number in self._alive:
                count = len(self._sources) + len(epoch.peers)
                out += self._break(epoch, _late(epoch.phase, len(epoch.waiting), count))
        out += self._gather(now)
        absent = sorted(set(range(self._ranks)) - set(self._sources) - self._left)
        if absent and not self.failure and now - self._begun >= self.deadlines.form_s:
            out += self._fail(
                f"ranks {absent[:8]} have not shown up within {self.deadlines.form_s:g} s"
            )
        return out + super().tick(now)

    # The trainer's ranks

    def _register(self, peer: bytes, message: Register, now: float) -> Outgoing:
        if (message.ranks, message.key) != (
            self._ranks,
            self._key,
        ) or not 0 <= message.rank < self._ranks:
            same = "the same" if message.key == self._key else "another"
            difference = (
                f"rank {message.rank} of {message.ranks} with {same} layout, where rank 0 is one of"
                f" {self._ranks}"
            )
            reason = f"the trainer's ranks differ; found {difference}; start them all alike"
            return [(peer, Denied(reason=reason))]
        before, out = self._sources.get(message.rank), Outgoing()
        if message.writer not in (0, self._writer) or (
            before and before.peer != peer and message.incarnation < before.incarnation
        ):
            difference = f"rank {message.rank} of the trainer that was there before"
            reason = f"a trainer starts with all its ranks; found {difference}; end it"
            return [(peer, Denied(reason=reason))]
        if before is None or before.peer != peer:
            for group in list(self._groups.values()) if before else ():
                out += self._fence(group)
            self._sources[message.rank] = _Source(
                rank=message.rank, peer=peer, incarnation=message.incarnation, heard=now
            )
            self._left.discard(message.rank)
            if len(self._sources) == self._ranks and self.failure:
                self.failure = ""
                out += [(source.peer, SourceFailed(reason="")) for source in self._sources.values()]
        out.append((peer, Registered(writer=self._writer, failure=self.failure)))
        return out + self._gather(now)

    def _staged(self, source: _Source, message: SourceHeartbeat, now: float) -> Outgoing:
        source.heard, source.versions = now, set(message.versions)
        return [
            entry for epoch in list(self._alive.values()) for entry in self._advance(epoch, now)
        ]

    def _source_leaves(self, source: _Source) -> Outgoing:
        """In order, at the end of the run: no failure, but nothing can be sent any more."""
        self._left.add(source.rank)
        del self._sources[source.rank]
        return [entry for group in list(self._groups.values()) for entry in self._fence(group)]

    def _strike(self, peer: bytes, why: str) -> Outgoing:
        if source := self._source(peer):
            del self._sources[source.rank]
            return self._fail(f"rank {source.rank} of {self._ranks} is gone: {why}")
        return super()._strike(peer, why)

    def _fail(self, why: str) -> Outgoing:
        """A source rank is missing: no group can be served until all are there again."""
        self.failure = why
        out = [entry for group in list(self._groups.values()) for entry in self._fence(group)]
        return out + [(source.peer, SourceFailed(reason=why)) for source in self._sources.values()]

    def _source(self, peer: bytes) -> _Source | None:
        return next((source for source in self._sources.values() if source.peer == peer), None)

    # A group's ranks

    def _unfit(self, group: Group, join: Join, now: float) -> str:
        if not join.key:
            return (
                "this writer sends by rounds; found a reader of segments; open both ends by one"
                " executor"
            )
        siblings = [seat for rank, seat in group.seats.items() if rank != join.rank]
        differ = any(
            (seat.join.ranks, seat.join.key) != (join.ranks, join.key) for seat in siblings
        )
        if not differ or all(now - seat.heard >= 2 * self.pace.heartbeat_s for seat in siblings):
            return ""
        difference = (
            f"rank {join.rank} of {join.ranks}, beside ranks of {siblings[0].join.ranks} or of"
            " another layout"
        )
        return f"group '{group.name}' differs; found {difference}; start them all alike"

    def _heartbeats(self) -> Outgoing:
        beat = WriterHeartbeat(epoch=0, note=self._note)
        return [*((peer, beat) for peer in self._sender_peers), *super()._heartbeats()]

    @property
    def _sender_peers(self) -> set[bytes]:
        return {source.peer for source in self._sources.values()}

    # Epochs

    def _gathered(self, group: Group, now: float) -> Outgoing:
        return self._gather(now)

    def _gather(self, now: float) -> Outgoing:
        """Begin epochs of groups that wait for one; end those that such groups should be in."""
        waits = len(self._alive) > 1 or any(not group.epoch for group in self._groups.values())
        if len(self._sources) < self._ranks or not waits:
            return []
        out, patience_s = self._merged(), GATHER_BEATS * self.pace.heartbeat_s
        parts: dict[int, list[Group]] = {}
        for group in self._groups.values():
            parts.setdefault(group.part if self._joint else group.order, []).append(group)
        for groups in parts.values():
            complete = [group for group in groups if not group.epoch and group.is_complete]
            for group in complete:
                group.complete_at = min(group.complete_at, now)
            waited = now - min((group.complete_at for group in complete), default=now)
            is_late = waited >= patience_s
            alive = next((group.epoch for group in groups if group.epoch), 0)
            if complete and alive:
                epoch = self._alive[alive]
                is_late = is_late and now - epoch.idle_at >= patience_s
                if epoch.phase is Phase.IDLE and (is_late or not epoch.is_adopting):
                    out += self._end(epoch)
                    for group in complete:  # they wait for the others, who come at once
                        group.complete_at = now
            elif complete and (is_late or len(complete) == len(groups)):
                for group in groups:
                    if not group.seats:
                        del self._groups[group.name]
                out += self._form(complete, now)
        return out

    def _merged(self) -> Outgoing:
        """End epochs that need not be apart any more."""
        sound = [
            epoch
            for epoch in self._alive.values()
            if self._joint
            and epoch.phase is Phase.IDLE
            and epoch.is_sound
            and not epoch.is_adopting
        ]
        if len(sound) < 2:
            return []
        for epoch in sound:
            for group in epoch.groups:
                group.part = 0
        return [entry for epoch in sound for entry in self._end(epoch)]

    def _form(self, groups: list[Group], now: float) -> Outgoing:
        number = self._next_epoch()
        epoch = Epoch(
            number=number, groups=groups, waiting=set(), deadline=now + self.deadlines.form_s
        )
        self._alive[number] = epoch
        out = [entry for group in groups for entry in self._begin(group, number)]
        for group in groups:
            group.enter(Phase.FORMING, set())
        epoch.waiting = self._sender_peers | epoch.peers
        layouts = {group.seats[0].join.key: group.seats[0].join.layout for group in groups}
        numbers = {key: number for number, key in enumerate(layouts, 1)}
        form = FormGroup(
            epoch=number,
            sources=self._ranks,
            readers=[
                EpochReader(
                    name=group.name,
                    ranks=group.seats[0].join.ranks,
                    layout=numbers[group.seats[0].join.key],
                )
                for group in groups
            ],
            layouts=[self._trainer, *layouts.values()],
            store=self._store and f"{self._store}{number}",
            backend=self._backend,
            bucket_bytes=self._bucket_bytes,
            deltas=self._deltas,
        )
        return out + [(peer, form) for peer in sorted(epoch.waiting)]

    def _fence(self, group: Group) -> Outgoing:
        epoch = self._alive.get(group.epoch)
        return self._end(epoch) if epoch else []

    def _end(self, epoch: Epoch) -> Outgoing:
        """All its ranks that live join again."""
        del self._alive[epoch.number]
        peers = self._sender_peers | epoch.peers
        for group in epoch.groups:
            group.end()
        return [(peer, Fenced(epoch=epoch.number, replaced=False)) for peer in sorted(peers)]

    def _break(self, epoch: Epoch, fault: str) -> Outgoing:
        """End it, as it did not do what it was for."""
        groups = epoch.groups
        for group in groups:
            self.faults[group.name] = fault
            group.faults += 1
        parts = {group.part for group in self._groups.values()}
        often = max(group.faults for group in groups) > 1
        if self._joint and often and len(groups) > 1 and len(parts) < EPOCHS:
            apart = min(set(range(EPOCHS)) - parts)
            for group in groups[len(groups) // 2 :]:
                group.part = apart
        return self._end(epoch)

    def _receive(self, group: Group, peer: bytes, message: MemberMessage, now: float) -> Outgoing:
        epoch = self._alive[group.epoch]
        match message:
            case Ready() if message.round == group.round:
                group.ready.add(peer)
                if group.phase is Phase.OFFERED and group.answered(peer):
                    group.enter(Phase.IDLE, set())
                    return self._advance(epoch, now)
                return []
            case Committed() | ReaderHeartbeat() if group.phase is Phase.VERIFIED:
                return self._adopted(epoch, group, peer, message, now)
        return self._answered(epoch, peer, group, message, now)

    def _answered(
        self, epoch: Epoch, peer: bytes, group: Group | None, message: MemberMessage, now: float
    ) -> Outgoing:
        """Of a rank in this epoch; `group`: of a reader's."""
        match message:
            case FormResult() if epoch.phase is Phase.FORMING:
                return self._formed(epoch, peer, message, now)
            case Put():
                epoch.known[message.key] = message.value
                return [
                    (asking, _told(epoch, message.key))
                    for asking in sorted(epoch.asking.pop(message.key, set()))
                ]
            case GetValue() if message.key in epoch.known:
                return [(peer, _told(epoch, message.key))]
            case GetValue():
                epoch.asking.setdefault(message.key, set()).add(peer)
            case TransferResult() if (
                epoch.phase is Phase.TRANSFERRING and message.round == epoch.round
            ):
                return self._transferred(epoch, peer, group, message, now)
        return []

    def _formed(self, epoch: Epoch, peer: bytes, message: FormResult, now: float) -> Outgoing:
        if misfit := self._groups.get(message.misfit):
            self.faults[misfit.name] = message.fault
            denied = [(end, Denied(reason=message.fault)) for end in sorted(misfit.peers)]
            del self._groups[misfit.name]
            return [*denied, *self._end(epoch)]  # who is denied does not come again
        if message.fault:
            return self._break(epoch, message.fault)
        epoch.waiting.discard(peer)
        if epoch.waiting:
            return []
        epoch.rest(now)
        for group in epoch.groups:
            group.enter(Phase.IDLE, set())
        return self._advance(epoch, now)

    def _advance(self, epoch: Epoch, now: float) -> Outgoing:
        """Start what can be started."""
        out = self._gather(now) if epoch.phase is Phase.IDLE else []
        version = self.newest
        if epoch.number not in self._alive or epoch.phase is not Phase.IDLE:
            return out
        behind = [
            group
            for group in epoch.groups
            if group.phase is Phase.IDLE and version > max(group.version, group.refused)
        ]
        for group in behind:
            if late := group.peers - group.ready:
                group.enter(Phase.OFFERED, late, now + self.deadlines.ready_s)
                offer = Offer(epoch=epoch.number, version=version)
                out += [(peer, offer) for peer in sorted(late)]
        taking = [group for group in behind if group.phase is Phase.IDLE]
        return out + self._start(epoch, version, taking, now) if taking else out

    def _start(self, epoch: Epoch, version: int, taking: list[Group], now: float) -> Outgoing:
        epoch.round, epoch.version, epoch.taking = epoch.round + 1, version, taking
        for group in taking:
            group.round, group.offered, group.began = epoch.round, version, now
            group.damage, group.sent, group.whole_bytes, group.ready = "", {}, 0, set()
            group.enter(Phase.TRANSFERRING, set())
        readers = {peer for group in taking for peer in group.peers}
        epoch.waiting = self._sender_peers | readers
        epoch.phase, epoch.deadline = Phase.TRANSFERRING, now + self.deadlines.transfer_s
        start = StartTransfer(
            epoch=epoch.number,
            round=epoch.round,
            version=version,
            readers=[group.name for group in taking],
        )
        return [
            (end, start) for end in sorted(epoch.waiting, key=lambda end: (end in readers, end))
        ]

    def _transferred(
        self,
        epoch: Epoch,
        peer: bytes,
        group: Group | None,
        message: TransferResult,
        now: float,
    ) -> Outgoing:
        if message.state == BROKEN:
            return self._break(epoch, message.fault)
        if message.state == WITHDRAWN:
            self.faults |= {group.name: message.fault for group in epoch.groups}
            return self._end(epoch)
        if source := self._source(peer):
            self._count(epoch, source, message)
        if group and message.state == DAMAGED:
            group.damage = group.damage or message.fault
        epoch.waiting.discard(peer)
        if epoch.waiting:
            return []
        out: Outgoing = []
        for group in epoch.taking:
            out += self._ended(epoch, group, now)
        epoch.rest(now)
        return out + self._advance(epoch, now)

    def _count(self, epoch: Epoch, source: _Source, message: TransferResult) -> None:
        first = 0
        for group in epoch.groups:
            columns = slice(first, first + len(group.seats))
            first = columns.stop
            group.sent[source.rank] = message.sent[columns]
            group.whole_bytes += sum(message.whole[columns])
        sent, whole = self.traffic
        self.traffic = (sent + sum(message.sent), whole + sum(message.whole))

    def _ended(self, epoch: Epoch, group: Group, now: float) -> Outgoing:
        """Its transfer."""
        group.faults = 0
        if group.damage:
            group.refused = epoch.version
            aborted = RoundAborted(epoch=epoch.number, round=epoch.round, fault=group.damage)
            group.enter(Phase.IDLE, set())
            return [(end, aborted) for end in sorted(group.peers)]
        pairs = tuple(tuple(group.sent[rank]) for rank in sorted(group.sent))
        self._sent[group.name] = Sent(
            epoch.version, pairs, now - group.began, whole_bytes=group.whole_bytes
        )
        group.enter(Phase.VERIFIED, group.peers)
        return [(end, self._verified(group)) for end in sorted(group.waiting)]

    def _adopted(
        self,
        epoch: Epoch,
        group: Group,
        peer: bytes,
        message: Committed | ReaderHeartbeat,
        now: float,
    ) -> Outgoing:
        """A destination rank reports the version that it computes with; a missed `Verified` is sent
        again.
        """
        if message.version == group.offered:
            sent = self._sent[group.name]
            if isinstance(message, Committed):
                sent = replace(
                    sent,
                    held_s=max(sent.held_s, message.held_s),
                    taken_s=max(sent.taken_s, message.taken_s),
                )
            have_all = group.answered(peer)
            self._sent[group.name] = (
                replace(sent, committed_s=now - group.began) if have_all else sent
            )
            if not have_all:
                return []
            group.enter(Phase.IDLE, set())
            return self._advance(epoch, now)
        is_known = isinstance(message, Committed) or message.verified == group.offered
        return [] if is_known else [(peer, self._verified(group))]

    def _verified(self, group: Group) -> Verified:
        return Verified(
            epoch=group.epoch, round=group.round, version=group.offered, note=self._note
        )


def _told(epoch: Epoch, key: str) -> StoredValue:
    return StoredValue(epoch=epoch.number, key=key, value=epoch.known[key])


def _late(phase: Phase, late: int, count: int) -> str:
    return f"the deadline passed while {phase.value}: {late} of {count} ranks had not answered"
