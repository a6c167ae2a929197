"""All ranks of a reader take the same version or none does, whatever happens between the two halves
of taking it.
"""

import random

import pytest
import torch

from transport.weights import FlatLayout, Layout, Mesh
from transport.weights.layout.rank_slices import layout_of_slices
from transport.weights.protocol.messages import Verified
from transport.weights.protocol.ranks import ReaderRank

from ..sharded_rig import Group, Trainer, full, shards, until

FULL = {"rows": ((8, 6), "float32"), "columns": ((4, 6), "float32"), "fused": ((8, 3), "float32")}


WHOLE = {"norm": ((5,), "float32"), "scale": ((), "float32")}


SLICES = [
    {
        "rows": ((8, 6), 0, ((0, 4),)),
        "columns": ((4, 6), 1, ((0, 3),)),
        "fused": ((8, 3), 0, ((0, 2), (4, 6))),
    },
    {
        "rows": ((8, 6), 0, ((4, 8),)),
        "columns": ((4, 6), 1, ((3, 6),)),
        "fused": ((8, 3), 0, ((2, 4), (6, 8))),
    },
]


SOURCE = Layout.fsdp(FULL | WHOLE, 2)


def local(rank: int) -> dict[str, torch.Tensor]:
    tensors = {name: torch.zeros(shape) for name, (shape, _) in WHOLE.items()}
    for name, (shape, dim, runs) in SLICES[rank].items():
        size = list(shape)
        size[dim] = sum(last - first for first, last in runs)
        tensors[name] = torch.zeros(size)
    return {name: tensors[name] for name in FULL | WHOLE}


TARGET = layout_of_slices(FlatLayout.of(local(0)), SLICES)


@pytest.fixture
def address(tmp_path):
    return f"ipc://{tmp_path}/w"


class AllOrNone(Group):
    """A reader group whose first rank leads the others, as an engine of several ranks does."""

    between = staticmethod(lambda: None)
    """What happens when all hold a version and none has taken it."""

    def adopt(self) -> None:
        first, *others = self.readers
        offer = first.verify() if first.poll() else None
        if offer is None:
            return
        entered = [each.enter(offer.segment, offer.version) for each in others]
        if not all(entered):
            for each in self.readers:
                each.decline()
            return
        self.between()
        assert {each.adopt() for each in self.readers} == {offer.version}

    def value(self) -> float:
        """What all ranks hold of the first element of what is whole at each."""
        found = {float(mine["norm"][0].detach()) for mine in self.tensors}
        assert len(found) == 1, "ranks compute with different versions"
        return found.pop()

    def holds(self, tensors) -> bool:
        return all(
            torch.equal(mine[name].detach(), wanted)
            for rank, mine in enumerate(self.tensors)
            for name, wanted in shards(TARGET, rank, tensors).items()
        )


def publish(trainer: Trainer, version: int, seed: int) -> dict[str, torch.Tensor]:
    tensors = full(SOURCE, seed)
    for rank, writer in enumerate(trainer.writers):
        writer.publish(version, shards(SOURCE, rank, tensors))
    return tensors


def test_the_slices_of_all_ranks_are_a_layout_whichever_of_them_makes_it():
    assert layout_of_slices(FlatLayout.of(local(1)), SLICES) == TARGET
    assert TARGET.ranks == 2
    for rank in range(2):
        expected = {name: (tuple(tensor.shape), "float32") for name, tensor in local(rank).items()}
        assert TARGET.local(rank) == expected
    cuts = {"rows": (0,), "columns": (1,)}
    plain = Layout.cut({name: FULL[name] for name in cuts}, Mesh.of(2), lambda name: cuts[name])
    assert TARGET.only(cuts) == plain
    tensors = full(TARGET, 1)
    for rank, rows in ((0, [0, 1, 4, 5]), (1, [2, 3, 6, 7])):
        assert torch.equal(shards(TARGET, rank, tensors)["fused"], tensors["fused"][rows])


def test_a_layout_of_one_rank_without_slices_is_whole():
    tensors = {name: torch.zeros(shape) for name, (shape, _) in (FULL | WHOLE).items()}
    assert layout_of_slices(FlatLayout.of(tensors), [{}]) == Layout.whole(FULL | WHOLE)


def test_ranks_take_what_all_hold_though_the_trainer_dies_and_another_reuses_its_number(
    address,
):
    trainers, group = [Trainer(SOURCE, address)], AllOrNone(TARGET, address)
    expected = publish(trainers[0], 1, seed=1)

    def another() -> None:
        group.between = AllOrNone.between
        epoch = group.readers[0].epoch
        trainers.pop().close()
        trainers.append(Trainer(SOURCE, address))
        publish(trainers[0], 1, seed=2)
        until(
            lambda: all(each.poll() and each.epoch != epoch for each in group.readers), trainers[0]
        )

    group.between = another
    try:
        until(lambda: group.versions == {1}, group)
        assert group.holds(expected)
        until(lambda: group.holds(full(SOURCE, 2)), group)
        assert group.versions == {1}
        later = publish(trainers[0], 2, seed=3)
        until(lambda: group.versions == {2}, group)
        assert group.holds(later)
        assert {each.use for reader in group.readers for each in reader._buffers._buffers} <= {
            "front",
            "free",
        }
    finally:
        group.close()
        trainers[0].close()


def test_a_version_that_one_rank_has_not_heard_of_is_taken_by_none_until_it_has(
    address, monkeypatch
):
    deaf, dropped, receive = {1}, [], ReaderRank._receive

    def hearing(self, message):
        if isinstance(message, Verified) and self.join.rank in deaf:
            dropped.append(message)
            return []
        return receive(self, message)

    monkeypatch.setattr(ReaderRank, "_receive", hearing)
    trainer, group = Trainer(SOURCE, address), AllOrNone(TARGET, address)
    try:
        tensors = publish(trainer, 1, seed=1)
        until(lambda: dropped and group.readers[0].poll())
        group.adopt()
        assert group.versions == {-1} and group.value() == 0
        deaf.clear()
        until(lambda: group.versions == {1}, group)
        assert group.holds(tensors)
    finally:
        group.close()
        trainer.close()


def test_a_version_that_was_let_go_of_is_offered_again_and_wakes_its_loop(address):
    trainer, group = Trainer(SOURCE, address), AllOrNone(TARGET, address)
    try:
        publish(trainer, 1, seed=1)
        until(lambda: group.readers[0].poll())
        assert group.readers[0].verify().version == 1
        group.readers[0].decline()
        assert group.readers[0].socket.recv(1), "a loop that sleeps looks again"
        assert group.readers[0].poll().version == 1
        until(lambda: group.versions == {1}, group)
    finally:
        group.close()
        trainer.close()


@pytest.mark.slow
def test_under_trainers_that_come_and_go_at_any_moment_no_two_ranks_hold_different_versions(
    address,
):
    dice = random.Random(5)
    trainers, group, seed, taken = [Trainer(SOURCE, address)], AllOrNone(TARGET, address), 0, set()
    version = 0

    def something() -> None:
        nonlocal seed, version
        if dice.random() < 0.3:
            trainers.pop().close()
            trainers.append(Trainer(SOURCE, address))
            version = dice.randrange(version + 1)
        seed, version = seed + 1, version + 1
        publish(trainers[0], version, seed)

    group.between = lambda: something() if dice.random() < 0.5 else None
    try:
        for _ in range(40):
            something()
            before = group.value()
            until(lambda before=before: group.value() != before, group)
            taken.add(group.value())
    finally:
        group.close()
        trainers[0].close()
    assert len(taken) > 20
