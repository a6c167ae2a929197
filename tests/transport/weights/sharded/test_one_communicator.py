"""NCCL's part, as far as it can be shown without a GPU: which communicators the real ends ask for,
in which order a rank's messages go, and that no two ranks wait for each other, whatever the number
of readers.

A double stands in for torch's `ProcessGroupNCCL`: a message by itself goes over a communicator of
its pair of ranks, one of a batch over the group's, which all ranks make in a first collective; what
a rank begins is done in the order in which it began.
"""

from collections import defaultdict, deque

import numpy as np
import pytest
import torch

from transport.weights import Layout, Mesh
from transport.weights.executors.device import TransferDevice
from transport.weights.protocol.membership import Deadlines
from transport.weights.protocol.messages import Fenced, FormGroup, Join, StartTransfer
from transport.weights.protocol.ranks import (
    EndEpoch,
    ReaderRank,
    SourceRank,
)
from transport.weights.protocol.rounds import Coordinator
from transport.weights.sharded import process_group
from transport.weights.sharded.chunks import chunks_from, chunks_to, joint_plan
from transport.weights.sharded.process_group import Meeting
from transport.weights.sharded.steps import ChunkMessage, compiled
from transport.weights.sharded.transfer import DEPTH, GroupExchange

FOREVER = float("inf")
PACE = Deadlines()


class Work:
    """Done, and no longer counted, once it was waited for."""

    def __init__(self, nccl, tensor=None):
        self.nccl, self.tensor, self.waited = nccl, tensor, False
        nccl.under_way.append(self)

    def is_completed(self):
        return True

    def wait(self):
        self.waited = True
        self.nccl.most = max(
            self.nccl.most, sum(not work.waited for work in self.nccl.under_way) + 1
        )
        self.nccl.under_way = [work for work in self.nccl.under_way if not work.waited]


class Nccl:
    """One rank's end, which notes what it is asked for."""

    def __init__(self, rank):
        self.rank, self.communicators, self.messages = rank, [], []
        self.under_way, self.most = [], 0
        self._batch = False

    def _start_coalescing(self):
        self._batch = True

    def _end_coalescing(self):
        self._batch = False
        return Work(self, self._tensor)

    def allreduce(self, tensors):
        self._over("group")
        return Work(self)

    def send(self, tensors, peer, tag):
        return self._message(peer, *tensors)

    def recv(self, tensors, peer, tag):
        return self._message(peer, *tensors)

    def _message(self, peer, tensor):
        self._tensor = tensor
        self._over("group" if self._batch else (self.rank, peer))
        self.messages.append(peer)
        return None if self._batch else Work(self)

    def _over(self, communicator):
        if communicator not in self.communicators:
            assert self._batch is False or self.communicators, "all ranks take part in the first"
            self.communicators.append(communicator)


@pytest.fixture
def nccl(monkeypatch):
    """Groups by rank."""
    groups = {}
    monkeypatch.setattr(
        process_group,
        "_nccl",
        lambda store, rank, *rest: groups.setdefault(rank, Nccl(rank)),
    )
    monkeypatch.setattr(Meeting, "rendezvous", lambda *meeting: None)
    return groups


class Edge:
    """A trainer's ranks, those of its readers and their coordinator, whose messages arrive at
    once.
    """

    def __init__(self, source, readers):
        self.source, self.now = source, 0.0
        self.coordinator = Coordinator(
            source.ranks,
            source.key,
            source.to_plain(),
            "s",
            backend="nccl",
            bucket_bytes=64,
            writer=1,
            now=0.0,
        )
        self.members, self.communicators = {}, defaultdict(set)
        self.most = 0
        """Communicators that a rank ever had at a time."""
        self.form, self.starts = None, []
        self._waiting, self._delivers = deque(), False
        for rank in range(source.ranks):
            self.members[b"source/%d" % rank] = SourceRank(
                rank, source.ranks, source.key, PACE, 0.0
            )
        for name, layout in readers.items():
            self.join(name, layout)

    def join(self, name, layout):
        for rank in range(layout.ranks):
            join = Join(
                group=name,
                rank=rank,
                ranks=layout.ranks,
                incarnation=0,
                attempt=1,
                writer=0,
                version=-1,
                key=layout.key,
                layout=layout.to_plain() if rank == 0 else {},
            )
            self.members[b"%s/%d" % (name.encode(), rank)] = ReaderRank(join, PACE)

    def publish(self, version):
        for peer, member in self.members.items():
            if isinstance(member, SourceRank):
                self.act(peer, member.hold({version}))

    def beats(self, count):
        for _ in range(count):
            self.now += PACE.heartbeat_s
            for peer, member in self.members.items():
                self.act(peer, member.tick(self.now))
            self.deliver(self.coordinator.tick(self.now))

    def act(self, peer, actions):
        for action in actions:
            if isinstance(action, FormGroup):
                self.communicators[peer].add(action.epoch)
                self.most = max(self.most, len(self.communicators[peer]))
                self.act(peer, self.members[peer].formed(action.epoch, "", ""))
            elif isinstance(action, EndEpoch):
                self.communicators[peer].discard(action.epoch)
            elif not isinstance(action, StartTransfer):
                self.deliver(self.coordinator.receive(peer, action, self.now))

    def deliver(self, out):
        """Messages in their order, and behind them those that they lead to."""
        self._waiting += out
        if self._delivers:
            return
        self._delivers = True
        while self._waiting:
            peer, message = self._waiting.popleft()
            if isinstance(message, FormGroup):
                self.form = message
            if isinstance(message, StartTransfer):
                self.starts.append(message)
            assert not isinstance(message, Fenced) or not message.replaced
            self.act(peer, self.members[peer].receive(message, self.now))
        self._delivers = False


def transferred(form, plan, rank, taking):
    """A rank of the process group does its part of a transfer to these readers; its messages'
    peers.
    """
    sends = rank < form.sources
    if sends:
        chunks = chunks_from(plan, form, rank)
        tensors = local(plan.plans[0].source, rank)
        columns = [form.sources + column for name in taking for column in form.columns[name]]
    else:
        name, columns = next(
            (name, columns)
            for name, columns in form.columns.items()
            if rank - form.sources in columns
        )
        chunks = chunks_to(plan, form, name, columns.index(rank - form.sources))
        reader, own = plan.at(rank - form.sources)
        tensors = local(reader.destination, own)
    device = TransferDevice()
    exchange = GroupExchange(form, rank, device, 1.0, Meeting(), lambda: 0.0)
    steps = compiled(chunks, tensors, sending=sends, depth=DEPTH, device=device)
    if sends:  # all are compiled once, whoever takes part
        steps = [step for step in steps if step.peer in columns]
        exchange.send(steps, None, DEPTH, FOREVER)
    else:
        exchange.receive(exchange.expect(steps, DEPTH), FOREVER)
    return [step.peer for step in steps]


def local(layout, rank):
    return {name: torch.zeros(shape) for name, (shape, _) in layout.local(rank).items()}


@pytest.mark.parametrize("ranks", [64, pytest.param(512, marks=pytest.mark.slow)])
def test_a_rank_has_one_communicator_and_few_messages_under_way_with_however_many(nccl, ranks):
    tensors = {"up": ((4096, 64), "float32"), "down": ((1024, 64), "float32")}
    source = Layout.fsdp(tensors, ranks)
    generator = Layout.cut(tensors, Mesh.of(8), lambda name: (0 if name == "up" else 1,))
    edge = Edge(source, {f"generator-{number}": generator for number in range(ranks // 8)})
    edge.beats(6)
    assert len(edge.coordinator.status(edge.now)) == ranks // 8
    assert edge.most == 1 and len(set().union(*edge.communicators.values())) == 1
    edge.publish(1)
    assert len(edge.starts) == edge.form.size == 2 * ranks, "all take part in one transfer"
    form = edge.form
    plan = joint_plan(form)
    assert plan.rounds.max() + 1 == ranks
    for rank in (0, ranks // 2, ranks - 1, ranks, ranks + ranks // 3, 2 * ranks - 1):
        peers = transferred(form, plan, rank, form.columns)
        own = (
            [ranks + to for to in plan.receivers(rank)]
            if rank < ranks
            else plan.senders(rank - ranks)
        )
        assert len(own) == ranks
        assert list(dict.fromkeys(peers)) == own, "peer by peer, round by round"
        assert nccl[rank].communicators == ["group"]
        sums = len(own)
        assert nccl[rank].messages == [*peers, *own], "messages, and the sums behind them"
        assert nccl[rank].most <= DEPTH + sums


CUT = {
    "one": ((1,), (0,)),
    "three": ((3,), (0,)),
    "mesh": ((4, 2), (None, 1)),
    "two": ((2, 4), (None, 0)),
}


@pytest.mark.parametrize(
    ("sources", "readers", "taking"),
    [
        (4, ["one"], ["one"]),
        (5, ["three"], ["three"]),
        (8, ["mesh"], ["mesh"]),
        (3, ["two"], ["two"]),
        (4, ["one", "three", "mesh", "two"], ["one", "three", "mesh", "two"]),
        (5, ["one", "three", "mesh", "two"], ["three", "two"]),
        (3, ["mesh", "two", "one"], ["one"]),
    ],
)
def test_no_two_ranks_wait_for_each_other(nccl, sources, readers, taking):
    """All ranks' messages, each of which waits until both ends have come to it."""
    tensors = dict.fromkeys("abc", ((24, 16), "float32")) | {"norm": ((7,), "float32")}
    layouts = {}
    for name in readers:
        mesh, cuts = CUT[name]
        layouts[name] = Layout.cut(
            tensors,
            Mesh.of(*mesh),
            lambda of, mesh=mesh, cuts=cuts: cuts if of != "norm" else (None,) * len(mesh),
        )
    edge = Edge(Layout.fsdp(tensors, sources), layouts)
    edge.beats(6)
    form = edge.form
    plan = joint_plan(form)
    ranks = [*range(sources), *(sources + at for name in taking for at in form.columns[name])]
    for rank in ranks:
        transferred(form, plan, rank, taking)
    left = {rank: list(nccl[rank].messages) for rank in ranks}
    columns = [at - sources for at in ranks[sources:]]
    assert sum(map(len, left.values())) >= 4 * np.count_nonzero(plan.pair_bytes[:, columns])
    while any(left.values()):
        going = [
            (rank, left[rank][0])
            for rank in range(sources)
            if left[rank] and left[left[rank][0]][:1] == [rank]
        ]
        assert going, {rank: peers[:3] for rank, peers in left.items()}
        for rank, peer in going:
            assert left[rank].pop(0) == peer and left[peer].pop(0) == rank


def test_no_bucket_is_packed_while_a_message_that_lies_in_it_is_under_way(nccl, monkeypatch):
    """Messages to some of the readers use other buckets in turn than those to all."""
    shapes = {"a": (24, 16), "b": (7, 5), "c": (9, 2)}
    wide, narrow = (
        {name: (shape, dtype) for name, shape in shapes.items()}
        for dtype in ("float32", "bfloat16")
    )
    readers = {name: Layout.fsdp(narrow, ranks) for name, ranks in [("a", 1), ("b", 3), ("c", 2)]}
    edge = Edge(Layout.fsdp(wide, 2), readers)
    edge.beats(6)
    pack, packed = ChunkMessage.pack, []

    def checked(step, sums):
        under_way = [work for work in nccl[1].under_way if not work.waited]
        assert step.data.data_ptr() not in {work.tensor.data_ptr() for work in under_way}
        packed.append(step)
        return pack(step, sums)

    monkeypatch.setattr(ChunkMessage, "pack", checked)
    for taking in (["a", "b", "c"], ["a", "c"], ["b", "c"], ["b"], ["c"]):
        packed.clear()
        transferred(edge.form, joint_plan(edge.form), 1, taking)
        assert len(packed) > DEPTH


def test_a_reader_that_comes_late_goes_into_the_others_communicator_and_no_version_is_lost(nccl):
    tensors = {"a": ((24, 16), "float32")}
    edge = Edge(Layout.fsdp(tensors, 2), {"first": Layout.fsdp(tensors, 3)})
    edge.beats(3)
    before = edge.form
    edge.join("late", Layout.fsdp(tensors, 2))
    edge.beats(6)
    assert [reader.name for reader in before.readers] == ["first"]
    assert [reader.name for reader in edge.form.readers] == ["first", "late"]
    assert edge.most == 1
    assert {len(epochs) for epochs in edge.communicators.values()} == {1}
    edge.publish(4)
    assert {(start.version, tuple(start.readers)) for start in edge.starts} == {
        (4, ("first", "late"))
    }
