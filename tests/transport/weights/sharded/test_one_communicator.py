"""NCCL's part, as far as it can be shown without a GPU: which communicators the real ends ask for,
in which order a rank's messages go, and that no two ranks wait for each other.

A double stands in for torch's `ProcessGroupNCCL`: a message by itself goes over a communicator of
its pair of ranks, one of a batch over the group's, which all ranks make in a first collective; what
a rank begins is done in the order in which it began.
"""

import numpy as np
import pytest
import torch

from transport.weights import Layout, Mesh, reshard
from transport.weights.executors.device import TransferDevice
from transport.weights.protocol.messages import FormGroup
from transport.weights.sharded import process_group
from transport.weights.sharded.chunks import chunks_between
from transport.weights.sharded.rendezvous import Meeting
from transport.weights.sharded.steps import compiled
from transport.weights.sharded.transfer import DEPTH, GroupExchange

FOREVER = float("inf")
EPOCH = 5


class Work:
    """Done, and no longer counted, once it was waited for."""

    def __init__(self, nccl):
        self.nccl, self.waited = nccl, False
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
        return Work(self)

    def allreduce(self, tensors):
        self._over("group")
        return Work(self)

    def send(self, tensors, peer, tag):
        return self._message(peer)

    def recv(self, tensors, peer, tag):
        return self._message(peer)

    def _message(self, peer):
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


def transferred(source, destination, rank, bucket_bytes=64):
    """Rank `rank` of the group, source ranks first, does its part of a transfer."""
    plan, sends = reshard(source, destination), rank < source.ranks
    form = FormGroup(
        epoch=EPOCH,
        group="generator-0",
        ranks=destination.ranks,
        sources=source.ranks,
        layout={},
        store="",
        backend="nccl",
        bucket_bytes=bucket_bytes,
    )
    own = rank if sends else rank - source.ranks
    if sends:
        chunks = {
            source.ranks + to: chunks_between(plan, own, to, bucket_bytes)
            for to in plan.receivers(own, form.epoch)
        }
    else:
        chunks = {
            of: chunks_between(plan, of, own, bucket_bytes) for of in plan.senders(own, form.epoch)
        }
    local = (source if sends else destination).local(own)
    tensors = {name: torch.zeros(shape) for name, (shape, _) in local.items()}
    device = TransferDevice()
    exchange = GroupExchange(form, rank, device, 1.0, Meeting(), lambda: 0.0)
    steps = compiled(chunks, tensors, sending=sends, depth=DEPTH, device=device)
    if sends:
        exchange.send(steps, None, DEPTH, FOREVER)
    else:
        exchange.receive(exchange.expect(steps, DEPTH), FOREVER)
    return [step.peer for step in steps]


@pytest.mark.parametrize("ranks", [64, pytest.param(512, marks=pytest.mark.slow)])
def test_a_rank_has_one_communicator_and_few_messages_under_way_with_however_many(nccl, ranks):
    tensors = {"up": ((4096, 64), "float32"), "down": ((1024, 64), "float32")}
    source = Layout.fsdp(tensors, ranks)
    mesh = Mesh.of(ranks // 8, 8)
    generators = Layout.cut(tensors, mesh, lambda name: (None, 0 if name == "up" else 1))
    plan = reshard(source, generators)
    for rank in (0, ranks // 2, ranks - 1, ranks, ranks + ranks // 3, 2 * ranks - 1):
        peers = transferred(source, generators, rank)
        own = (
            [ranks + to for to in plan.receivers(rank, EPOCH)]
            if rank < ranks
            else plan.senders(rank - ranks, EPOCH)
        )
        assert len(own) == ranks
        assert list(dict.fromkeys(peers)) == own, "peer by peer, in the order of the matchings"
        assert nccl[rank].communicators == ["group"]
        sums = len(own)
        assert nccl[rank].messages == [*peers, *own], "messages, and the sums behind them"
        assert nccl[rank].most <= DEPTH + sums


@pytest.mark.parametrize(
    ("sources", "mesh", "cuts"),
    [
        (4, (1,), (0,)),
        (5, (3,), (0,)),
        (8, (4, 2), (None, 1)),
        (3, (2, 4), (None, 0)),
    ],
)
def test_no_two_ranks_wait_for_each_other(nccl, sources, mesh, cuts):
    """All ranks' messages, each of which waits until both ends have come to it."""
    tensors = dict.fromkeys("abc", ((24, 16), "float32")) | {"norm": ((7,), "float32")}
    source = Layout.fsdp(tensors, sources)
    destination = Layout.cut(
        tensors, Mesh.of(*mesh), lambda name: cuts if name != "norm" else (None,) * len(mesh)
    )
    ranks = sources + destination.ranks
    for rank in range(ranks):
        transferred(source, destination, rank, bucket_bytes=128)
    left = {rank: list(nccl[rank].messages) for rank in range(ranks)}
    assert sum(map(len, left.values())) > 2 * np.count_nonzero(
        reshard(source, destination).pair_bytes
    )
    while any(left.values()):
        going = [
            (rank, left[rank][0])
            for rank in range(sources)
            if left[rank] and left[left[rank][0]][:1] == [rank]
        ]
        assert going, {rank: peers[:3] for rank, peers in left.items()}
        for rank, peer in going:
            assert left[rank].pop(0) == peer and left[peer].pop(0) == rank
