"""Versions in collective rounds: the coordinator on source rank 0 says which group takes which
version when.

A group is a line of phases: gathering (ranks join) -> forming (all ranks of both sides make a
process group) -> idle -> transferring -> verified (its ranks adopt) -> idle. A transfer starts when
all source ranks have said that they have a version, and all of the group that they are ready: those
who have not are asked first (offered). Whoever does not answer before the phase's deadline, is
lost, or breaks a transfer ends the epoch, and that group alone gathers again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from transport.weights.protocol.messages import (
    BROKEN,
    DAMAGED,
    Committed,
    Denied,
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
from transport.weights.protocol.pace import Deadlines, FreezeWatch
from transport.weights.protocol.roster import Group, MemberRank, Outgoing, Phase, Roster, Sent


@dataclass(kw_only=True)
class _Source:
    """A rank of the trainer."""

    rank: int
    peer: bytes
    incarnation: int
    heard: float
    versions: set[int] = field(default_factory=set)


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
        writer: int,
        now: float,
        deadlines: Deadlines | None = None,
    ) -> None:
        """`ranks`, `key`, `layout`: of the trainer. `store`: prefix of the paths where process
        groups meet; empty: they meet over the coordinator's line.
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
        group = next(
            (group for group in self._groups.values() if group.epoch == message.epoch), None
        )
        if group is None or not message.epoch:
            return [(peer, Fenced(epoch=message.epoch, replaced=False))]
        return self._receive(group, peer, message, now)

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
                progress = f"{len(group.waiting)} of {len(self._all(group))} ranks had not answered"
                self.faults[group.name] = (
                    f"the deadline passed while {group.phase.value}: {progress}"
                )
                out += self._fence(group)
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
        return out + [
            entry for group in self._groups.values() for entry in self._gathered(group, now)
        ]

    def _staged(self, source: _Source, message: SourceHeartbeat, now: float) -> Outgoing:
        source.heard, source.versions = now, set(message.versions)
        return [entry for group in self._groups.values() for entry in self._offer(group, now)]

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

    def _others(self) -> set[bytes]:
        return {source.peer for source in self._sources.values()}

    def _all(self, group: Group) -> set[bytes]:
        return self._others() | group.peers

    def _heartbeats(self) -> Outgoing:
        beat = WriterHeartbeat(epoch=0, note=self._note)
        return [*((source.peer, beat) for source in self._sources.values()), *super()._heartbeats()]

    # A group's phases

    def _gathered(self, group: Group, now: float) -> Outgoing:
        first = group.seats.get(0)
        complete = first is not None and sorted(group.seats) == list(range(first.join.ranks))
        if (
            group.phase is not Phase.GATHERING
            or first is None
            or not complete
            or len(self._sources) < self._ranks
        ):
            return []
        out = self._begin(group)
        ends = [(peer, first.join.layout) for peer in self._others()] + [
            (peer, self._trainer) for peer in group.peers
        ]
        for peer, layout in ends:
            form = FormGroup(
                epoch=group.epoch,
                group=group.name,
                ranks=first.join.ranks,
                sources=self._ranks,
                layout=layout,
                store=self._store and f"{self._store}{group.epoch}",
                backend=self._backend,
                bucket_bytes=self._bucket_bytes,
                deltas=self._deltas,
            )
            out.append((peer, form))
        group.enter(Phase.FORMING, self._all(group), now + self.deadlines.form_s)
        return out

    def _receive(self, group: Group, peer: bytes, message: MemberMessage, now: float) -> Outgoing:
        match message:
            case FormResult() if group.phase is Phase.FORMING:
                return self._formed(group, peer, message, now)
            case Put():
                group.known[message.key] = message.value
                return [
                    (asking, _told(group, message.key))
                    for asking in sorted(group.asking.pop(message.key, set()))
                ]
            case GetValue() if message.key in group.known:
                return [(peer, _told(group, message.key))]
            case GetValue():
                group.asking.setdefault(message.key, set()).add(peer)
            case Ready() if message.round == group.round + 1:
                group.ready.add(peer)
                if group.phase is Phase.OFFERED and group.answered(peer):
                    group.enter(Phase.IDLE, set())
                    return self._offer(group, now)
            case TransferResult() if (
                group.phase is Phase.TRANSFERRING and message.round == group.round
            ):
                return self._transferred(group, peer, message, now)
            case Committed() | ReaderHeartbeat() if group.phase is Phase.VERIFIED:
                return self._adopted(group, peer, message, now)
        return []

    def _formed(self, group: Group, peer: bytes, message: FormResult, now: float) -> Outgoing:
        if message.fault:
            self.faults[group.name] = message.fault
            peers = sorted(group.peers) if message.mismatch else []
            return [*self._fence(group), *((end, Denied(reason=message.fault)) for end in peers)]
        if not group.answered(peer):
            return []
        group.enter(Phase.IDLE, set())
        return self._offer(group, now)

    def _offer(self, group: Group, now: float) -> Outgoing:
        version = self.newest
        if group.phase is not Phase.IDLE or version <= max(group.version, group.refused):
            return []
        if late := group.peers - group.ready:
            group.enter(Phase.OFFERED, late, now + self.deadlines.ready_s)
            offer = Offer(epoch=group.epoch, round=group.round + 1, version=version)
            return [(peer, offer) for peer in sorted(group.waiting)]
        group.round += 1
        group.offered, group.damage, group.sent, group.ready, group.began = (
            version,
            "",
            {},
            set(),
            now,
        )
        group.whole_bytes = 0
        group.enter(Phase.TRANSFERRING, self._all(group), now + self.deadlines.transfer_s)
        start = StartTransfer(epoch=group.epoch, round=group.round, version=version)
        return [
            (end, start) for end in sorted(group.waiting, key=lambda end: (end in group.peers, end))
        ]

    def _transferred(
        self, group: Group, peer: bytes, message: TransferResult, now: float
    ) -> Outgoing:
        if message.state == BROKEN:
            self.faults[group.name] = message.fault
            return self._fence(group)
        if source := self._source(peer):
            group.sent[source.rank] = message.sent
            group.whole_bytes += message.whole_bytes
            sent, whole = self.traffic
            self.traffic = (sent + sum(message.sent), whole + message.whole_bytes)
        if message.state == DAMAGED:
            group.damage = group.damage or message.fault
        if not group.answered(peer):
            return []
        if group.damage:
            group.refused = group.offered
            return self._end_round(group, now)
        pairs = tuple(tuple(group.sent[rank]) for rank in sorted(group.sent))
        self._sent[group.name] = Sent(
            group.offered, pairs, now - group.began, whole_bytes=group.whole_bytes
        )
        group.enter(Phase.VERIFIED, group.peers)
        return [(end, self._verified(group)) for end in sorted(group.waiting)]

    def _end_round(self, group: Group, now: float) -> Outgoing:
        """Without a version."""
        aborted = RoundAborted(epoch=group.epoch, round=group.round, fault=group.damage)
        group.enter(Phase.IDLE, set())
        return [*((end, aborted) for end in sorted(group.peers)), *self._offer(group, now)]

    def _adopted(
        self, group: Group, peer: bytes, message: Committed | ReaderHeartbeat, now: float
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
            return self._offer(group, now)
        is_known = isinstance(message, Committed) or message.verified == group.offered
        return [] if is_known else [(peer, self._verified(group))]

    def _verified(self, group: Group) -> Verified:
        return Verified(
            epoch=group.epoch, round=group.round, version=group.offered, note=self._note
        )


def _told(group: Group, key: str) -> StoredValue:
    return StoredValue(epoch=group.epoch, key=key, value=group.known[key])
