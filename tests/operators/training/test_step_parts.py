"""A step is computed while its groups are still on their way, and is the one that it would have
been.
"""

from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from rigs.operators import make_context
from trainer_rig import Rig, gradient, group, rig, rows_of, tiny_learner, tiny_llama, tiny_trainer

from dataflow.rules import STEP_PARTS
from operators.losses import grpo, with_entropy
from operators.trainer import Trainer
from operators.training.steps import StepMaker

GROUPS = [group(number, size=4, completion=3 + 8 * (number % 3)) for number in range(16)]


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def parted(**knobs) -> Trainer:
    """A step of eight groups, in micro-batches that are small enough for parts."""
    return tiny_trainer(**{"prompts_per_step": 8, "micro_batch_tokens": 80, **knobs})


def computed(world: Rig) -> int:
    """Micro-batches of the step under way that have been computed."""
    return world.runtime._learner._micros


def same_steps(one: Rig, other: Rig) -> None:
    """To the bit: weights, losses, norms, and the log-probabilities beside the rollouts."""
    assert one.plane.published.keys() == other.plane.published.keys() == {0, 1, 2}
    for version, tensors in one.plane.published.items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, other.plane.published[version][name]), (version, name)
    for mine, its in zip(one.folder.metrics, other.folder.metrics, strict=True):
        assert {mine[name] for name in ("loss", "grad_norm", "kl", "ratio_max")} == {
            its[name] for name in ("loss", "grad_norm", "kl", "ratio_max")
        }
    for step, table in one.folder.files.items():
        assert table.equals(other.folder.files[step])


LOSSES = {
    "aipo": {},
    "rollout_means": {"loss": with_entropy(grpo, weight=0.1), "normalize": "rollout_means"},
    "rollouts": {"normalize": "rollouts", "skip_zero_advantage": False},
    "whitened": {"whiten": True},
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_step_whose_groups_come_one_by_one_is_that_of_groups_that_came_together(
    tmp_path: Path, name: str
) -> None:
    worlds = []
    for way in ("together", "one by one", "backwards"):
        (tmp_path / way).mkdir()
        world = rig(tmp_path / way, parted(**LOSSES[name]))
        if way == "together":
            world.push(*GROUPS)
        for batch in {"one by one": GROUPS, "backwards": GROUPS[::-1]}.get(way, ()):
            world.push(batch)
            world.run()
        world.run()
        worlds.append(world)
    for other in worlds[1:]:
        same_steps(worlds[0], other)
    assert worlds[1].acks == sorted(worlds[1].acks) and len(worlds[1].acks) == len(GROUPS)


@pytest.mark.parametrize(("whiten", "is_early"), [(False, True), (True, False)])
def test_what_is_there_of_a_step_is_computed_unless_the_loss_reads_all_of_it(
    tmp_path: Path, whiten: bool, is_early: bool
) -> None:
    world = rig(tmp_path, parted(whiten=whiten))
    for batch in GROUPS[:7]:
        world.push(batch)
        world.run()
    assert (computed(world) > 0) == is_early
    assert world.runtime.pending() == 0, "it waits for more, and says so"
    assert not world.folder.metrics and not world.acks
    world.push(GROUPS[7])
    world.run()
    assert [line["step"] for line in world.folder.metrics] == [1]


def test_a_step_has_no_more_parts_than_are_worth_it() -> None:
    for limit, most in ((80, STEP_PARTS), (100_000, 1)):
        context = make_context(node="trainer", columns={"prompts": {}})
        trainer = parted(micro_batch_tokens=limit, skip_zero_advantage=False)
        making = StepMaker(trainer, context, tiny_learner(trainer), 0)
        making.take_all(pa.Table.from_batches(GROUPS[:8]))
        assert 1 <= len(making.learner.parts) <= most
        assert (len(making.learner.parts) > 1) == (most > 1)


def test_groups_that_are_dropped_on_the_way_make_room_for_those_after_them(tmp_path: Path) -> None:
    failed = group(3, size=4, error="judge: hung")
    given = [*GROUPS[:3], failed, *GROUPS[4:9]]
    worlds = []
    for way in ("together", "one by one"):
        (tmp_path / way).mkdir()
        world = rig(tmp_path / way, parted())
        for batches in [given] if way == "together" else [[batch] for batch in given]:
            world.push(*batches)
            world.run()
        worlds.append(world)
    for world in worlds:
        assert world.ledger.steps == {1: ([0, 1, 2, 4, 5, 6, 7, 8], {3: "failed"})}
    assert worlds[0].folder.metrics[0]["loss"] == worlds[1].folder.metrics[0]["loss"]


@pytest.mark.parametrize("message", ["drain", "end"])
def test_a_step_that_will_not_be_whole_leaves_nothing_behind(tmp_path: Path, message: str) -> None:
    module = tiny_llama()
    before = {name: weight.detach().clone() for name, weight in module.named_parameters()}
    world = rig(tmp_path, parted(), module=module)
    for batch in GROUPS[:6]:
        world.push(batch)
        world.run()
    assert computed(world) > 0
    world.runtime.tell({message: True})
    world.run()
    assert world.runtime.status()["done"] == 1
    assert all(torch.equal(before[name], weight) for name, weight in module.named_parameters())
    assert not world.ledger.steps and not world.folder.rollouts
    if message == "drain":
        assert not world.acks and not world.ledger.drops, "they are in flight, for a resume"
    else:
        assert world.ledger.drops == dict.fromkeys(range(6), "too few for a step")


def test_a_step_that_is_made_again_from_its_file_has_the_bits_of_the_one_that_began_early(
    tmp_path: Path,
) -> None:
    world = rig(tmp_path, parted(loss=partial(noisy, scale=0.1)))
    for batch in GROUPS[:8]:
        world.push(batch)
        world.run()
    context = make_context(node="trainer", columns={"prompts": {}})
    trainer = parted(loss=partial(noisy, scale=0.1))
    making = StepMaker(trainer, context, tiny_learner(trainer), 0)
    making.take_all(world.folder.files[1])
    while making.micro_batches:
        making.micro()
        torch.rand(7)  # somebody else's
    outcome = making.end(1e-2)
    assert outcome.loss == world.folder.metrics[0]["loss"]
    for name, weight in making.learner.parameters.items():
        assert torch.equal(weight, world.plane.published[1][name]), name


def noisy(new_logprobs, advantage, scale=1.0):
    """Draws random numbers."""
    return -(advantage + scale * torch.rand_like(new_logprobs)) * new_logprobs


def test_a_step_that_is_given_up_early_does_not_touch_the_next(tmp_path: Path) -> None:
    context = make_context(node="trainer", columns={"prompts": {}})
    trainer = parted()
    losses = []
    for is_disturbed in (False, True):
        making = StepMaker(trainer, context, tiny_learner(trainer), 0)
        if is_disturbed:
            for batch in GROUPS[8:13]:
                making.take(batch, is_last=False)
            making.micro()
            making.abandon()
        making.take_all(pa.Table.from_batches(GROUPS[:8]))
        while making.micro_batches:
            making.micro()
        outcome = making.end(1e-2)
        losses.append((outcome.loss, outcome.grad_norm))
    assert losses[0] == losses[1]


@pytest.mark.parametrize("normalize", ["tokens", "rollouts", "rollout_means"])
def test_sums_that_are_divided_at_the_end_are_those_divided_at_the_beginning(
    normalize: str,
) -> None:
    """In float64, beside one backward pass of the loss with its divisor."""
    trainer = parted(normalize=normalize, skip_zero_advantage=False)
    rows = rows_of(*GROUPS[:8])
    learner = tiny_learner(trainer, tiny_llama().double())
    learner.open(0)
    for batch in GROUPS[:8]:
        for micro_batch in learner.add(rows_of(batch)):
            learner.micro(micro_batch)
    learner.max_grad_norm = float("inf")
    outcome = learner.end(0.0)
    parts = torch.cat([weight.grad.flatten() for weight in learner.parameters.values()])
    loss, whole, norm = gradient(tiny_learner(trainer, tiny_llama().double()), rows)
    torch.testing.assert_close(parts, whole, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose([outcome.loss, outcome.grad_norm], [loss, norm], rtol=1e-9)


def test_where_no_node_runs_ahead_a_step_waits_for_the_cores_that_its_groups_take(
    tmp_path: Path,
) -> None:
    world = rig(tmp_path, parted(), max_staleness=0)
    for batch in GROUPS[:7]:
        world.push(batch)
        world.run()
    assert computed(world) == 0
    world.push(GROUPS[7])
    world.run()
    assert [line["step"] for line in world.folder.metrics] == [1]
