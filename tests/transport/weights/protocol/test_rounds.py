"""Collective rounds under any schedule: messages late, ranks lost, frozen, restarted, groups that
come and go.
"""

import random
from collections import defaultdict, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transport.weights.protocol.membership import Deadlines
from transport.weights.protocol.messages import (
    BROKEN,
    CODEC,
    DAMAGED,
    WHOLE,
    Fenced,
    FormGroup,
    GetValue,
    Join,
    Put,
    Ready,
    StartTransfer,
    StoredValue,
    Verified,
)
from transport.weights.protocol.ranks import (
    EndEpoch,
    ReaderRank,
    SourceRank,
    TransferOutcome,
)
from transport.weights.protocol.rounds import EPOCHS, Coordinator
from transport.weights.protocol.segments import SegmentReader

PACE = Deadlines(heartbeat_s=1.0, gone_s=12.0, form_s=8.0, ready_s=5.0, transfer_s=6.0)


KEY, LAYOUT = b"key", {"shards": []}


LINE = 1_000_000


"""Coordinators are named by its multiples, so that an epoch tells which one gave it."""


def reader(name: str, rank: int, ranks: int, incarnation: int) -> ReaderRank:
    join = Join(
        group=name,
        rank=rank,
        ranks=ranks,
        incarnation=incarnation,
        attempt=1,
        writer=0,
        version=-1,
        key=KEY,
        layout=LAYOUT if rank == 0 else {},
    )
    return ReaderRank(join, PACE)


class World:
    """All ranks and the wires between them; each wire keeps its order, and nothing else is
    promised.
    """

    def __init__(self, seed: int, sources: int, groups: dict[str, int]) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.sources, self.line = sources, 1
        self.coordinator = Coordinator(
            sources, KEY, LAYOUT, "s", writer=LINE, now=0.0, deadlines=PACE
        )
        self.sizes = groups
        self.ranks: dict[bytes, SourceRank | ReaderRank] = {}
        self.wires: dict[tuple[bytes, bool], deque] = defaultdict(deque)
        self.work: list[tuple[bytes, object]] = []
        self.begun: dict[tuple[int, int], set[bytes]] = defaultdict(set)
        self.frozen: set[bytes] = set()
        self.members: dict[int, set[bytes]] = defaultdict(set)
        self.ready: dict[tuple[int, bytes], int] = {}
        """After which round of an epoch a reader's rank last said that it has room."""
        self.took: dict[tuple[int, bytes], int] = defaultdict(int)
        """Its last round."""
        self.taking: dict[tuple[int, int], set[bytes]] = {}
        """All who take part in a round."""
        self.columns: dict[int, int] = {}
        """Ranks of readers in an epoch."""
        self.moved: dict[tuple[int, int], set[bytes]] = defaultdict(set)
        self.open: dict[int, int] = {}
        self.damage: set[tuple[int, int]] = set()
        """(line, version)"""
        self.seen: dict[bytes, list[tuple[int, int]]] = defaultdict(list)
        self.latest, self.count = -1, 0
        self.lines: dict[bytes, int] = {}
        """Of each trainer's rank."""
        for rank in range(sources):
            self.lines[b"source%d" % rank] = self.line
            self.ranks[b"source%d" % rank] = SourceRank(rank, sources, KEY, PACE, 0.0)
        for name in groups:
            for rank in range(groups[name]):
                self.start(name, rank)

    def peers(self, name: str) -> list[bytes]:
        return [p for p in self.ranks if p.startswith(name.encode() + b"/")]

    def start(self, name: str, rank: int) -> None:
        self.count += 1
        for old in [p for p in self.peers(name) if p.startswith(b"%s/%d/" % (name.encode(), rank))]:
            self.kill(old)
        peer = b"%s/%d/%d" % (name.encode(), rank, self.count)
        self.ranks[peer] = reader(name, rank, self.sizes[name], self.count)

    def restart_source(self, peer: bytes, *, leave: bool) -> None:
        """A trainer's rank other than the first ends, in order or not, and a new process takes its
        place.
        """
        old = self.ranks[peer]
        rank = old.join.rank
        if rank == 0:
            self.restart_trainer(linger=leave)
            return
        if leave:
            self.act(peer, [old.leaving()])
        self.kill(peer)
        self.start_source(rank)

    def start_source(self, rank: int) -> None:
        self.count += 1
        peer = b"source%d/%d" % (rank, self.count)
        self.ranks[peer] = SourceRank(
            rank, self.sources, KEY, PACE, self.now, incarnation=self.count
        )
        self.ranks[peer].hold({self.latest} - {-1})
        self.lines[peer] = self.line

    def restart_trainer(self, *, linger: bool) -> None:
        """Rank 0 dies, and all others at once or a while later; a new trainer goes on from up to
        two versions before.

        Ranks of the dead trainer that `linger` still speak, with the new coordinator too.
        """
        for peer in [p for p, rank in self.ranks.items() if isinstance(rank, SourceRank)]:
            if not linger or self.ranks[peer].join.rank == 0:
                self.kill(peer)
        self.line += 1
        self.coordinator = Coordinator(
            self.sources, KEY, LAYOUT, "s", writer=LINE * self.line, now=self.now, deadlines=PACE
        )
        self.latest = max(0, self.latest - self.random.randrange(3))
        for rank in range(self.sources):
            self.start_source(rank)

    def kill(self, peer: bytes) -> None:
        self.ranks.pop(peer, None)
        self.frozen.discard(peer)
        self.work = [(p, w) for p, w in self.work if p != peer]
        self.wires.pop((peer, True), None)

    def act(self, peer: bytes, actions) -> None:
        for action in actions:
            if isinstance(action, EndEpoch):
                self.work = [
                    (p, w) for p, w in self.work if p != peer or self.epoch(w) != action.epoch
                ]
            elif isinstance(action, FormGroup | StartTransfer):
                if isinstance(action, StartTransfer):
                    key = action.epoch, action.round
                    self.begun[key].add(peer)
                    # Nobody sends what it does not have.
                    rank = self.ranks[peer]
                    assert (
                        isinstance(rank, ReaderRank) or action.version in rank.versions & rank.kept
                    )
                    # Never two rounds of one epoch at once.
                    assert not [
                        w
                        for p, w in self.work
                        if p == peer and isinstance(w, StartTransfer) and w.epoch == key[0]
                    ]
                self.work.append((peer, action))
            else:
                if isinstance(action, Ready):
                    self.ready[action.epoch, peer] = action.round
                self.wires[peer, False].append(CODEC.decode(CODEC.encode(action)))

    @staticmethod
    def epoch(work) -> int:
        return work.epoch

    def send(self, out) -> None:
        for peer, message in out:
            if isinstance(message, FormGroup):
                self.members[message.epoch].add(peer)
                self.columns[message.epoch] = message.size - message.sources
                assert len(self.coordinator._alive) <= EPOCHS
            if isinstance(message, StartTransfer):
                self.starts(message)
            if isinstance(message, Verified):
                key = message.epoch, message.round
                assert self.moved[key] == self.taking[key], "whole before all were done"
                name = peer.split(b"/")[0].decode()
                told = self.coordinator.sent[name]
                assert told.version == message.version
                assert told.pair_bytes == ((message.version,) * self.sizes[name],) * self.sources
                assert (message.epoch // LINE, message.version) not in self.damage
                assert {self.lines[p] for p in self.members[message.epoch] if p in self.lines} == {
                    self.line
                }
            if peer in self.ranks:
                self.wires[peer, True].append(CODEC.decode(CODEC.encode(message)))
            elif self.random.random() < 0.5:
                self.send(self.coordinator.lost(peer))

    def starts(self, message: StartTransfer) -> None:
        """Nobody is in a transfer before all who receive have room, and nobody in two at once; it
        is of the newest version that all who send have.
        """
        key = message.epoch, message.round
        if key in self.taking:
            return
        known = [source.versions for source in self.coordinator._sources.values()]
        assert message.version == max(set.intersection(*known))
        readers = {
            peer
            for peer in self.members[message.epoch]
            if peer.split(b"/")[0].decode() in message.readers
        }
        for peer in readers:
            assert self.ready[message.epoch, peer] == self.took[message.epoch, peer]
            self.took[message.epoch, peer] = message.round
        sources = {peer for peer in self.members[message.epoch] if peer.startswith(b"source")}
        self.taking[key] = readers | sources
        earlier = [other for other in self.taking if other[0] == key[0] and other[1] < key[1]]
        assert all(self.moved[other] == self.taking[other] for other in earlier)

    def deliver(self) -> bool:
        ready = [
            key
            for key, wire in self.wires.items()
            if wire and key[0] not in (self.frozen if key[1] else ())
        ]
        if not ready:
            return False
        peer, to_rank = self.random.choice(sorted(ready))
        message = self.wires[peer, to_rank].popleft()
        if to_rank:
            self.act(peer, self.ranks[peer].receive(message, self.now))
        else:
            self.send(self.coordinator.receive(peer, message, self.now))
        return True

    def end_of_work(self) -> bool:
        possible = [(p, w) for p, w in self.work if p not in self.frozen and self.may_end(w)]
        if not possible:
            return False
        peer, work = self.random.choice(possible)
        self.work.remove((peer, work))
        rank = self.ranks[peer]
        if isinstance(work, FormGroup):
            self.act(peer, rank.formed(work.epoch, "", ""))
            return True
        lost = not self.taking[work.epoch, work.round] <= set(self.ranks)
        state = BROKEN if lost else WHOLE
        damaged = (work.epoch // LINE, work.version) in self.damage
        if state == WHOLE and damaged and isinstance(rank, ReaderRank):
            state = DAMAGED
        if state != BROKEN:
            self.moved[work.epoch, work.round].add(peer)
        sent = [work.version] * self.columns[work.epoch]
        outcome = TransferOutcome(state, "" if state == WHOLE else "bad", sent, sent)
        self.act(peer, rank.transferred(work.epoch, work.round, outcome))
        return True

    def may_end(self, work) -> bool:
        """A transfer ends once all take part, or when one of them is dead; one who waits for a
        frozen rank is stuck.
        """
        if isinstance(work, FormGroup):
            return True
        everybody = self.taking[work.epoch, work.round]
        return self.begun[work.epoch, work.round] == everybody or not everybody <= set(self.ranks)

    def tick(self, seconds: float) -> None:
        self.now += seconds
        for peer, rank in list(self.ranks.items()):
            if peer not in self.frozen:
                self.act(peer, rank.tick(self.now))
        self.send(self.coordinator.tick(self.now))

    def publish(self, version: int) -> None:
        self.latest = version
        for peer, rank in self.ranks.items():
            if self.lines.get(peer) == self.line and peer not in self.frozen:
                kept = rank.versions | {version}  # of two buffers the one that is free is filled
                while len(kept) > 2:
                    free = kept - {version} - rank.kept
                    kept.discard(min(free or kept - {version}))
                self.act(peer, rank.hold(kept))

    def adopt(self, peer: bytes) -> None:
        rank = self.ranks[peer]
        if isinstance(rank, ReaderRank) and rank.offer >= 0 and peer not in self.frozen:
            found = rank.epoch // LINE, rank.offer
            assert not self.seen[peer] or found >= self.seen[peer][-1], "a reader went back"
            assert found not in self.damage
            self.seen[peer].append(found)
            self.act(peer, rank.adopted(rank.offered))

    def calm(self) -> None:
        """Nothing bad happens any more: let everything end."""
        self.frozen.clear()
        for _ in range(60):
            for _ in range(3000):
                if not (self.deliver() | self.end_of_work()):
                    break
            for peer in list(self.ranks):
                self.adopt(peer)
            self.tick(1.0)


def storm(world: World, steps: int, *, faults: bool) -> None:
    names = list(world.sizes)
    for _ in range(steps):
        dice = world.random.random()
        peer = world.random.choice(sorted(world.ranks))
        if dice < 0.55:
            world.deliver()
        elif dice < 0.75:
            world.end_of_work()
        elif dice < 0.83:
            world.adopt(peer)
        elif dice < 0.90:
            world.tick(world.random.choice([0.1, 1.0, 2.0]))
        elif dice < 0.95:
            version = max(0, world.latest) + 1
            if world.random.random() < 0.2:
                world.damage.add((world.line, version))
            world.publish(version)
        elif faults:
            name = world.random.choice(names)
            kind = world.random.choice(["kill", "freeze", "thaw", "start", "leave"])
            if kind == "start":
                world.start(name, world.random.randrange(world.sizes[name]))
            elif isinstance(world.ranks[peer], SourceRank):
                world.restart_source(peer, leave=kind == "leave")
            else:
                if kind == "kill":
                    world.kill(peer)
                elif kind == "freeze":
                    world.frozen.add(peer)
                elif kind == "thaw":
                    world.frozen.discard(peer)
                else:
                    world.act(peer, [world.ranks[peer].leaving()])
                    world.tick(0.1)
    world.publish(world.latest + 1)
    world.publish(world.latest + 1)


def holds(world: World, name: str) -> set[int]:
    """Its versions, of the trainer that lives."""
    assert {seen[-1][0] for peer in world.peers(name) if (seen := world.seen[peer])} <= {world.line}
    return {world.ranks[peer].version for peer in world.peers(name)}


@settings(max_examples=60)
@given(
    seed=st.integers(0, 1 << 30),
    sources=st.integers(1, 3),
    one=st.integers(1, 3),
    other=st.integers(1, 2),
    faults=st.booleans(),
)
def test_under_any_schedule_no_rule_is_broken_and_complete_groups_get_the_newest(
    seed, sources, one, other, faults
):
    world = World(seed, sources, {"one": one, "other": other})
    storm(world, 600, faults=faults)
    world.calm()
    assert world.coordinator.failure == ""
    for name, size in world.sizes.items():
        if len(world.peers(name)) == size:
            assert holds(world, name) == {world.latest}, (name, world.coordinator.status(world.now))


def calm_world(sources=2, **groups) -> World:
    world = World(7, sources, groups)
    world.publish(1)
    world.calm()
    assert all(holds(world, name) == {1} for name in groups)
    return world


def test_a_frozen_group_does_not_hold_up_another():
    world = calm_world(slow=2, fast=2)
    frozen = world.peers("slow")[1]
    for version in (2, 3, 4):
        world.frozen.add(frozen)
        world.publish(version)
        for _ in range(2000):
            if holds(world, "fast") == {version}:
                break
            if not (world.deliver() | world.end_of_work()):
                world.tick(0.5)
            for peer in world.peers("fast"):
                world.adopt(peer)
        assert holds(world, "fast") == {version}
    assert 1 in holds(world, "slow")
    world.calm()
    assert holds(world, "slow") == {4}


def test_readers_share_one_epoch_and_one_that_comes_late_or_again_costs_nobody_a_version():
    world = calm_world(one=2, other=1, third=1)

    def epochs() -> set[int]:
        return {status.epoch for status in world.coordinator.status(world.now)}

    (before,) = epochs()
    world.start("other", 0)
    for version in (2, 3):
        world.publish(version)
        world.calm()
        assert all(holds(world, name) == {version} for name in world.sizes)
        assert len(epochs()) == 1 and len(world.coordinator._alive) == 1
    assert epochs() != {before}
    world.kill(world.peers("one")[1])
    world.publish(4)
    world.calm()
    assert holds(world, "other") == holds(world, "third") == {4}
    assert holds(world, "one") == {3}


@pytest.mark.parametrize("where", ["transferring", "forming"])
def test_one_that_lives_and_breaks_every_epoch_is_soon_alone_and_the_others_go_on(where):
    names = [f"reader-{number}" for number in range(6)]
    world = calm_world(**dict.fromkeys(names, 1))
    for culprit in ("reader-0", "reader-3", "reader-5"):
        if where == "forming":
            world.start(culprit, 0)
        rank = world.ranks[world.peers(culprit)[0]]
        if where == "transferring":
            broken = TransferOutcome(BROKEN, "bad cable")
            rank.transferred = lambda epoch, round, _, real=rank.transferred, broken=broken: real(
                epoch, round, broken
            )
        else:
            rank.formed = lambda epoch, *_, real=rank.formed: real(epoch, "bad cable", "")
        version = world.latest + 1
        world.publish(version)
        world.calm()
        assert all(holds(world, name) == {version} for name in names if name != culprit)
        assert holds(world, culprit) != {version}
        assert world.coordinator.faults[culprit] == "bad cable"
        vars(rank).pop("transferred", None)
        vars(rank).pop("formed", None)
        world.calm()
        assert holds(world, culprit) == {version}
        world.publish(version + 1)
        world.calm()
        assert all(holds(world, name) == {version + 1} for name in names)
        assert len(world.coordinator._alive) == 1


def test_a_reader_whose_layout_does_not_fit_is_denied_and_the_others_form_without_it():
    world = calm_world(sources=2, one=2)
    world.sizes["misfit"] = 1
    world.start("misfit", 0)
    (stranger,) = world.peers("misfit")
    formed = [world.ranks[peer] for peer in (b"source0", b"source1")]
    for source in formed:
        source.formed = lambda epoch, fault, _, real=source.formed: real(
            epoch, *(("bad shape", "misfit") if stranger in world.members[epoch] else ("", ""))
        )
    world.publish(2)
    world.calm()
    assert holds(world, "one") == {2}
    assert world.ranks[stranger].denied == world.coordinator.faults["misfit"] == "bad shape"


def test_a_version_nobody_took_is_skipped():
    world = calm_world(only=2)
    for version in range(2, 9):
        world.publish(version)
    world.calm()
    assert all(
        [version for _, version in world.seen[peer]] in ([1, 8], [1, 2, 8])
        for peer in world.peers("only")
    )


def test_a_damaged_version_is_refused_by_the_whole_group_and_the_next_one_taken():
    world = calm_world(only=2)
    world.damage.add((1, 2))
    world.publish(2)
    world.calm()
    assert holds(world, "only") == {1}
    assert world.coordinator.status(world.now)[0].state == "refused"
    world.publish(3)
    world.calm()
    assert holds(world, "only") == {3}


def test_no_rank_sees_a_version_before_all_of_its_group_have_it():
    world = calm_world(only=2)
    first, second = world.peers("only")
    world.publish(2)
    for _ in range(400):
        world.deliver()
        mine = [(p, w) for p, w in world.work if p != second]
        if mine:
            kept, world.work = world.work, mine
            world.end_of_work()
            world.work = world.work + [(p, w) for p, w in kept if p == second]
    assert world.ranks[first].offer == -1
    world.calm()
    assert holds(world, "only") == {2}


def test_a_lost_source_rank_is_reported_to_the_others_and_forgiven_when_it_is_back():
    world = calm_world(sources=3, only=1)
    world.kill(b"source2")
    world.tick(1.0)
    for _ in range(40):
        world.tick(1.0)
        while world.deliver() | world.end_of_work():
            pass
    assert "rank 2 of 3" in world.coordinator.failure
    assert "rank 2 of 3" in world.ranks[b"source0"].failure
    world.ranks[b"source2"] = SourceRank(2, 3, KEY, PACE, world.now)
    world.publish(5)
    world.calm()
    assert world.ranks[b"source0"].failure == ""
    assert holds(world, "only") == {5}


def test_a_source_rank_that_leaves_in_order_is_no_failure():
    world = calm_world(sources=2, only=1)
    world.act(b"source1", [world.ranks[b"source1"].leaving()])
    while world.deliver():
        pass
    world.kill(b"source1")
    for _ in range(40):
        world.tick(1.0)
        while world.deliver() | world.end_of_work():
            pass
    assert world.coordinator.failure == "" and world.ranks[b"source0"].failure == ""
    assert holds(world, "only") == {1}


def test_a_restarted_rank_replaces_the_old_one_and_the_old_one_stays_out():
    world = calm_world(only=2)
    old = next(p for p in world.peers("only") if p.startswith(b"only/0"))
    twin = world.ranks[old]
    world.count += 1
    world.ranks[b"only/0/new"] = reader("only", 0, 2, world.count)
    world.calm()
    assert twin.replaced
    world.publish(2)
    world.calm()
    assert world.ranks[b"only/0/new"].version == 2


def test_ranks_that_describe_another_trainer_are_denied():
    world = calm_world(only=1)
    stranger = SourceRank(1, 4, b"other", PACE, world.now)
    world.ranks[b"stranger"] = stranger
    world.calm()
    assert "differ" in stranger.failure


def test_a_reader_of_segments_is_denied_and_no_group_is_formed_for_it():
    world = calm_world(only=1)
    [(_, denied)] = world.coordinator.receive(b"stranger", SegmentReader("s").join, world.now)
    assert "found a reader of segments" in denied.reason
    assert [status.name for status in world.coordinator.status(world.now)] == ["only"]


def test_a_rank_of_a_dead_trainer_is_denied_and_sends_nothing_to_the_next_ones_readers():
    world = calm_world(sources=2, only=1)
    old = world.ranks[b"source1"]
    world.restart_trainer(linger=True)
    second = next(peer for peer in world.ranks if peer.startswith(b"source1/"))
    world.kill(second)
    world.calm()
    assert "the trainer that was there before" in old.failure
    assert not any(
        line == world.line for peer in world.peers("only") for line, _ in world.seen[peer]
    )
    world.start_source(1)
    world.publish(4)
    world.calm()
    assert holds(world, "only") == {4}


def test_a_group_that_holds_a_dead_trainers_version_has_not_the_new_ones_of_the_same_number():
    world = calm_world(sources=1, only=2)
    world.restart_trainer(linger=False)
    world.ranks[next(peer for peer in world.ranks if b"source" in peer)].hold({1})
    peers = world.peers("only")
    while min(world.ranks[peer].offer for peer in peers) < 0:
        if not (world.deliver() | world.end_of_work()):
            world.tick(PACE.heartbeat_s)
    for _ in range(3):
        world.tick(PACE.heartbeat_s)
        while world.deliver():
            pass
    assert world.coordinator.status(world.now)[0].state == "taking"
    for peer in peers:
        world.adopt(peer)
    while world.deliver():
        pass
    assert world.coordinator.status(world.now)[0].state == "committed"


def test_a_rank_of_a_dead_trainer_that_had_met_nobody_makes_way_for_its_successor():
    world = calm_world(sources=2, only=1)
    world.restart_trainer(linger=False)
    late = world.ranks[b"late"] = SourceRank(1, 2, KEY, PACE, world.now)
    world.calm()
    assert "the trainer that was there before" in late.failure
    world.publish(4)
    world.calm()
    assert holds(world, "only") == {4}


def test_a_trainer_that_was_frozen_for_long_calls_nobody_late():
    world = calm_world(sources=2, only=2)
    status = world.coordinator.status(world.now)[0]
    world.now += 10 * PACE.gone_s
    world.tick(0.0)
    while world.deliver() | world.end_of_work():
        pass
    assert world.coordinator.status(world.now)[0].epoch == status.epoch
    assert not any(rank.failure for rank in world.ranks.values() if isinstance(rank, SourceRank))
    world.publish(2)
    world.calm()
    assert holds(world, "only") == {2}


def test_versions_that_are_kept_for_a_round_are_released_when_the_trainer_gives_up_waiting():
    world = calm_world(sources=1, only=1)
    world.publish(2)
    source = world.ranks[b"source0"]
    while not source.kept:
        world.deliver()
    world.act(b"source0", source.give_up())
    assert source.kept == set()
    world.calm()
    assert holds(world, "only") == {2}


@pytest.mark.parametrize(
    "payload",
    [b"", b"\x80", b"\xff", CODEC.encode(Ready(epoch=1, round=2))[:-1], b"\x81\xa4kind\xa2no"],
)
def test_damaged_messages_are_an_error_with_three_parts(payload):
    from transport.weights import MessageError

    with pytest.raises(MessageError, match="; found.*; run the same release"):
        CODEC.decode(payload)


def test_no_rank_enters_a_transfer_before_all_have_said_ready():
    world = calm_world(only=2)
    before = set(world.begun)
    world.frozen.add(b"source1")
    world.publish(2)
    while world.deliver() | world.end_of_work():
        pass
    assert set(world.begun) == before, (
        "a collective would have waited for the one that is not there"
    )
    world.frozen.clear()
    world.frozen.add(forget_ready(world, "only"))
    world.publish(3)
    while world.deliver() | world.end_of_work():
        pass
    assert set(world.begun) == before
    world.calm()
    assert holds(world, "only") == {3}


def forget_ready(world: World, name: str) -> bytes:
    """A rank whose word that it is ready was lost on the way."""
    peer = world.peers(name)[1]
    world.coordinator._groups[name].ready.discard(peer)
    return peer


def test_a_rank_whose_ready_was_lost_is_asked_and_the_version_taken():
    world = calm_world(only=2)
    epoch = world.ranks[forget_ready(world, "only")].epoch
    world.publish(2)
    world.calm()
    assert holds(world, "only") == {2} and world.ranks[world.peers("only")[1]].epoch == epoch


def test_a_version_that_its_source_has_no_longer_ends_the_epoch_and_the_newest_is_taken():
    world = calm_world(only=2)
    world.publish(2)
    for source in (b"source0", b"source1"):
        while wire := world.wires[source, False]:
            world.send(world.coordinator.receive(source, wire.popleft(), world.now))
    assert world.coordinator.status(world.now)[0].state == "taking"
    world.ranks[b"source1"].hold({3})
    world.ranks[b"source0"].hold({2, 3})
    world.latest = 3
    world.calm()
    assert "source rank 1 has version 2 no longer" in world.coordinator.faults["only"]
    assert holds(world, "only") == {3}


def test_a_round_that_a_rank_does_not_answer_ends_at_its_deadline_and_says_in_what():
    world = calm_world(only=2)
    world.frozen.add(forget_ready(world, "only"))
    world.publish(2)
    for _ in range(int(PACE.ready_s) + 2):
        while world.deliver() | world.end_of_work():
            pass
        world.tick(1.0)
    assert "the deadline passed while offered: 1 of 4 ranks" in world.coordinator.faults["only"]


def test_ranks_tell_each_other_where_they_are_once_it_is_known_and_in_their_epoch_alone():
    world = calm_world(sources=2, one=2)
    coordinator, (first, second) = world.coordinator, world.peers("one")
    epoch = world.ranks[first].epoch

    def says(peer: bytes, message: Put | GetValue) -> list:
        return coordinator.receive(peer, message, world.now)

    assert (
        says(first, GetValue(epoch=epoch, key="k"))
        == says(b"source1", GetValue(epoch=epoch, key="k"))
        == []
    )
    told = StoredValue(epoch=epoch, key="k", value=b"at")
    assert says(second, Put(epoch=epoch, key="k", value=b"at")) == [
        (first, told),
        (b"source1", told),
    ]
    assert says(second, GetValue(epoch=epoch, key="k")) == [(second, told)]
    says(first, GetValue(epoch=epoch, key="never put"))
    world.restart_source(b"source1", leave=False)
    world.start_source(1)
    world.calm()
    after = world.ranks[first].epoch
    assert after > epoch
    assert says(first, GetValue(epoch=after, key="k")) == [], "it was put in an epoch that is over"
    assert says(second, Put(epoch=after, key="never put", value=b"at")) == [], (
        "and that was asked there"
    )
    for stale in (Put(epoch=epoch, key="k", value=b"old"), GetValue(epoch=epoch, key="k")):
        assert says(second, stale) == [(second, Fenced(epoch=epoch, replaced=False))]
