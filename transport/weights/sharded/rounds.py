"""The coordinator on source rank 0: which group takes which version when, without sockets, clocks or torch.

A group is a line of phases: gathering (ranks join) -> forming (all ranks of both sides make a process group) -> idle
-> offered (everybody gets ready) -> moving (the transfer) -> proved (its ranks adopt) -> idle. Whoever does not
answer before the phase's deadline, is lost, or breaks a transfer ends the epoch, and that group alone gathers again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transport.weights.protocol.handshake import ReaderStatus
from transport.weights.protocol.messages import Note
from transport.weights.sharded.groups import Deadlines, Group, Seat, Sleep, SourceSeat
from transport.weights.sharded.words import (
    BROKEN,
    DAMAGED,
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

Outgoing = list[tuple[bytes, CoordinatorWord]]
"""Words with the peer that each is for."""


class Coordinator:
    """Who is in, and what each group does. Every call returns the words to send."""

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
        """`ranks`, `key`, `layout`: of the trainer. `store`: prefix of the paths where process groups meet."""
        self.deadlines = deadlines or Deadlines()
        self.failure = ""
        """Which source rank is missing, and why; empty when all are there or may still come."""
        self.faults: dict[str, str] = {}
        """What last ended an epoch, by the group's name."""
        self._ranks, self._key, self._layout, self._store = ranks, key, dict(layout), store
        self._writer, self._epochs = writer, writer
        self._backend, self._bucket_bytes, self._deltas = backend, bucket_bytes, deltas
        self._sources: dict[int, SourceSeat] = {}
        self._left: set[int] = set()
        self._groups: dict[str, Group] = {}
        self._note: Note = {}
        self._told_at, self._begun, self._joined = float("-inf"), now, 0
        self._sleep = Sleep(self.deadlines.silent_s / 2, now)

    @property
    def newest(self) -> int:
        """The newest version that every source rank can send, -1 for none."""
        if len(self._sources) < self._ranks:
            return -1
        return max(set.intersection(*(source.versions for source in self._sources.values())), default=-1)

    def receive(self, peer: bytes, word: MemberWord, now: float) -> Outgoing:
        """Answer one word of one rank."""
        match word:
            case Enrol():
                return self._enrol(peer, word, now)
            case Staged():
                return self._staged(peer, word, now)
            case Join():
                return self._join(peer, word, now)
        source = next((source for source in self._sources.values() if source.peer == peer), None)
        groups = [g for g in self._groups.values() if peer in g.peers or (source and g.epoch == word.epoch)]
        if isinstance(word, Bye):
            return self._source_leaves(peer) if source else [e for group in groups for e in self._leave(group, peer)]
        if not word.epoch or not groups or groups[0].epoch != word.epoch:
            return [(peer, Fenced(epoch=word.epoch, replaced=False))] if isinstance(word, Beat | Formed | Done) else []
        group = groups[0]
        ends: list[SourceSeat | Seat] = [source] if source else [*group.seats.values()]
        for end in ends:
            if end.peer == peer:
                end.heard = now
        match word:
            case Formed() if group.phase == "forming":
                return self._formed(group, peer, word, now)
            case Ready() if group.phase == "offered" and word.round == group.round:
                return self._ready(group, {peer}, now)
            case Ready() if group.phase in ("idle", "proved") and word.round == group.round + 1:
                group.early.add(peer)
            case Gone() if group.phase == "offered" and word.round == group.round and source:
                source.versions.discard(word.version)
                return self._void(group, now)
            case Done() if group.phase == "moving" and word.round == group.round:
                return self._done(group, peer, word, now)
            case Committed() if source is None:
                return self._holds(group, peer, word.version, now)
            case Beat() if source is None:
                if group.phase == "proved" and group.offered not in (word.version, word.whole):
                    return [(peer, self._whole(group))]
                return self._holds(group, peer, word.version, now)
        return []

    def lost(self, peer: bytes, now: float) -> Outgoing:
        """The transport says that this peer is gone."""
        return self._strike(peer, "its connection is closed")

    def tell(self, note: Note) -> None:
        """Replace the note; it goes out at the next `tick`."""
        self._note = dict(note)
        self._told_at = float("-inf")

    def tick(self, now: float) -> Outgoing:
        """What is due at this time: signs of life, and the end of what has passed its deadline."""
        out: Outgoing = []
        limit = self.deadlines.silent_s
        slept = self._sleep.slept(now)
        self._begun += slept
        ends: list[SourceSeat | Seat] = [*self._sources.values()]
        ends += [seat for group in self._groups.values() for seat in group.seats.values()]
        for end in ends:
            end.heard = min(now, end.heard + slept)
            if now - end.heard >= limit:
                out += self._strike(end.peer, f"it has said nothing for {limit:g} s")
        for group in list(self._groups.values()):
            group.deadline += slept
            if now >= group.deadline:
                found = f"{len(group.waiting)} of {len(self._all(group))} ranks had not answered"
                self.faults[group.name] = f"the deadline passed while {group.phase}: {found}"
                out += self._fence(group)
        absent = sorted(set(range(self._ranks)) - set(self._sources) - self._left)
        if absent and not self.failure and now - self._begun >= self.deadlines.form_s:
            out += self._fail(f"ranks {absent[:8]} have not shown up within {self.deadlines.form_s:g} s")
        if now - self._told_at >= self.deadlines.beat_s:
            self._told_at = now
            peers = [source.peer for source in self._sources.values()]
            peers += [seat.peer for group in self._groups.values() for seat in group.seats.values()]
            out += [(peer, Told(note=self._note)) for peer in peers]
        return out

    def status(self, now: float) -> tuple[ReaderStatus, ...]:
        """Every reader group, in the order of joining."""
        return tuple(
            ReaderStatus(
                name=group.name, epoch=group.epoch, version=group.version, state=self._state(group),
                silent_s=max((now - seat.heard for seat in group.seats.values()), default=0.0),
            )
            for group in sorted(self._groups.values(), key=lambda group: group.order)
        )  # fmt: skip

    # Ranks come and go

    def _enrol(self, peer: bytes, word: Enrol, now: float) -> Outgoing:
        if (word.ranks, word.key) != (self._ranks, self._key) or not 0 <= word.rank < self._ranks:
            same = "the same" if word.key == self._key else "another"
            found = f"rank {word.rank} of {word.ranks} with {same} layout, where rank 0 is one of {self._ranks}"
            return [(peer, Denied(reason=f"the trainer's ranks differ; found {found}; start them all alike"))]
        known, out = self._sources.get(word.rank), Outgoing()
        if word.writer not in (0, self._writer) or (
            known and known.peer != peer and word.incarnation < known.incarnation
        ):
            found = f"rank {word.rank} of the trainer that was there before"
            return [(peer, Denied(reason=f"a trainer starts with all its ranks; found {found}; end it"))]
        if known is None or known.peer != peer:
            for group in list(self._groups.values()) if known else ():
                out += self._fence(group)
            self._sources[word.rank] = SourceSeat(peer=peer, incarnation=word.incarnation, heard=now)
            self._left.discard(word.rank)
            if len(self._sources) == self._ranks and self.failure:
                self.failure = ""
                out += [(source.peer, Failed(reason="")) for source in self._sources.values()]
        out.append((peer, Enrolled(writer=self._writer, failure=self.failure)))
        return out + self._form_all(now)

    def _staged(self, peer: bytes, word: Staged, now: float) -> Outgoing:
        source = next((source for source in self._sources.values() if source.peer == peer), None)
        if source is None:
            return [(peer, Fenced(epoch=0, replaced=False))]
        source.heard = now
        source.versions = set(word.versions)
        return [entry for group in self._groups.values() for entry in self._offer(group, now)]

    def _join(self, peer: bytes, word: Join, now: float) -> Outgoing:
        group = self._groups.get(word.group)
        if group is None:
            self._joined += 1
            group = self._groups[word.group] = Group(name=word.group, order=self._joined)
        if word.incarnation < group.incarnations.get(word.rank, word.incarnation):
            return [(peer, Fenced(epoch=0, replaced=True))]
        group.incarnations[word.rank] = word.incarnation
        mine = group.seats.get(word.rank)
        if mine and mine.peer == peer and mine.join.attempt == word.attempt:
            mine.heard = now
            return []
        out: Outgoing = []
        others = [seat for rank, seat in group.seats.items() if rank != word.rank]
        if any((seat.join.ranks, seat.join.key) != (word.ranks, word.key) for seat in others):
            if any(now - seat.heard < 2 * self.deadlines.beat_s for seat in others):
                found = f"rank {word.rank} of {word.ranks}, beside ranks of {others[0].join.ranks} or of another layout"
                return [(peer, Denied(reason=f"group '{word.group}' differs; found {found}; start them all alike"))]
            out += self._fence(group)
        if mine and mine.peer != peer:
            out.append((mine.peer, Fenced(epoch=group.epoch, replaced=True)))
            del group.seats[word.rank]
        if group.epoch:
            out += self._fence(group)
        group.seats[word.rank] = Seat(peer=peer, join=word, version=word.version, heard=now)
        return out + self._form(group, now)

    def _leave(self, group: Group, peer: bytes) -> Outgoing:
        group.seats = {rank: seat for rank, seat in group.seats.items() if seat.peer != peer}
        out = self._fence(group)
        if not any(g.name == group.name and g.seats for g in self._groups.values()):
            self._groups.pop(group.name, None)
        return out

    def _source_leaves(self, peer: bytes) -> Outgoing:
        """In order, at the end of the run: no failure, but nothing can be sent any more."""
        self._left |= {rank for rank, source in self._sources.items() if source.peer == peer}
        self._sources = {rank: source for rank, source in self._sources.items() if source.peer != peer}
        return [entry for group in list(self._groups.values()) for entry in self._fence(group)]

    def _strike(self, peer: bytes, why: str) -> Outgoing:
        for rank, source in self._sources.items():
            if source.peer == peer:
                del self._sources[rank]
                return self._fail(f"rank {rank} of {self._ranks} is gone: {why}")
        out: Outgoing = []
        for group in list(self._groups.values()):
            if peer in group.peers:
                self.faults[group.name] = f"a rank is gone: {why}"
                group.seats = {rank: seat for rank, seat in group.seats.items() if seat.peer != peer}
                out += [(peer, Fenced(epoch=group.epoch, replaced=False)), *self._fence(group)]
                if not group.seats:
                    self._groups.pop(group.name, None)
        return out

    def _fail(self, why: str) -> Outgoing:
        """A source rank is missing: no group can be served until all are there again."""
        self.failure = why
        out = [entry for group in list(self._groups.values()) for entry in self._fence(group)]
        return out + [(source.peer, Failed(reason=why)) for source in self._sources.values()]

    def _fence(self, group: Group) -> Outgoing:
        """End the group's epoch; its ranks that live join again, under the next one."""
        epoch, told = group.epoch, group.peers
        if not epoch:
            return []
        group.seats, group.epoch, group.version, group.early = {}, 0, -1, set()
        group.enter("gathering", set())
        told |= {source.peer for source in self._sources.values()}
        return [(peer, Fenced(epoch=epoch, replaced=False)) for peer in sorted(told)]

    # A group's phases

    def _form_all(self, now: float) -> Outgoing:
        return [entry for group in self._groups.values() for entry in self._form(group, now)]

    def _form(self, group: Group, now: float) -> Outgoing:
        first = group.seats.get(0)
        complete = first is not None and sorted(group.seats) == list(range(first.join.ranks))
        if group.phase != "gathering" or first is None or not complete or len(self._sources) < self._ranks:
            return []
        self._epochs += 1
        group.epoch, group.round, group.refused = self._epochs, 0, -1
        held = {seat.version if seat.join.writer == self._writer else -1 for seat in group.seats.values()}
        group.version = held.pop() if len(held) == 1 else -1
        out: Outgoing = []
        ends = [(source.peer, 0, first.join.layout) for source in self._sources.values()]
        ends += [(seat.peer, seat.join.attempt, self._layout) for seat in group.seats.values()]
        for peer, attempt, layout in ends:
            form = Form(
                epoch=group.epoch, group=group.name, attempt=attempt, ranks=first.join.ranks, sources=self._ranks,
                writer=self._writer, layout=layout, store=f"{self._store}{group.epoch}",
                backend=self._backend, bucket_bytes=self._bucket_bytes, deltas=self._deltas,
            )  # fmt: skip
            out.append((peer, form))
        group.enter("forming", {peer for peer, _, _ in ends}, now + self.deadlines.form_s)
        return out

    def _formed(self, group: Group, peer: bytes, word: Formed, now: float) -> Outgoing:
        if word.fault:
            self.faults[group.name] = word.fault
            denied = [(end, Denied(reason=word.fault)) for end in sorted(group.peers)] if word.mismatch else []
            return [*self._fence(group), *denied]
        group.waiting.discard(peer)
        if group.waiting:
            return []
        group.enter("idle", set())
        welcome = Welcome(epoch=group.epoch, note=self._note)
        return [*((end, welcome) for end in sorted(group.peers)), *self._offer(group, now)]

    def _offer(self, group: Group, now: float) -> Outgoing:
        version = self.newest
        if group.phase != "idle" or version <= max(group.version, group.refused):
            return []
        group.round += 1
        group.offered, group.damage = version, ""
        group.enter("offered", self._all(group), now + self.deadlines.ready_s)
        offer = Offer(epoch=group.epoch, round=group.round, version=version)
        early, group.early = group.early, set()
        return [*((peer, offer) for peer in sorted(group.waiting)), *self._ready(group, early, now)]

    def _ready(self, group: Group, peers: set[bytes], now: float) -> Outgoing:
        group.waiting -= peers
        if group.waiting:
            return []
        group.enter("moving", self._all(group), now + self.deadlines.transfer_s)
        return [(end, Go(epoch=group.epoch, round=group.round)) for end in sorted(group.waiting)]

    def _done(self, group: Group, peer: bytes, word: Done, now: float) -> Outgoing:
        if word.state == BROKEN:
            self.faults[group.name] = word.fault
            return self._fence(group)
        if word.state == DAMAGED:
            group.damage = group.damage or word.fault
        group.waiting.discard(peer)
        if group.waiting:
            return []
        if group.damage:
            group.refused = group.offered
            return self._void(group, now)
        group.enter("proved", group.peers)
        return [(end, self._whole(group)) for end in sorted(group.waiting)]

    def _void(self, group: Group, now: float) -> Outgoing:
        void = Void(epoch=group.epoch, round=group.round, fault=group.damage)
        group.enter("idle", set())
        return [*((end, void) for end in sorted(self._all(group))), *self._offer(group, now)]

    def _holds(self, group: Group, peer: bytes, version: int, now: float) -> Outgoing:
        """A destination rank computes with this version."""
        for seat in group.seats.values():
            if seat.peer == peer:
                seat.version = version
        if group.phase != "proved" or version != group.offered:
            return []
        group.waiting.discard(peer)
        if group.waiting:
            return []
        group.version = group.offered
        group.enter("idle", set())
        return self._offer(group, now)

    def _whole(self, group: Group) -> Whole:
        return Whole(epoch=group.epoch, round=group.round, version=group.offered, note=self._note)

    def _all(self, group: Group) -> set[bytes]:
        return {source.peer for source in self._sources.values()} | group.peers

    def _state(self, group: Group) -> str:
        if group.phase == "idle":
            newest = self.newest
            return "refused" if newest >= 0 and newest == group.refused else (
                "committed" if group.version >= 0 else "joined")  # fmt: skip
        return {"offered": "offered", "moving": "taking", "proved": "taking"}.get(group.phase, "joined")
