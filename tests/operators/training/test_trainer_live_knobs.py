"""A learner whose knobs change between steps, and rollouts that were sampled at unlike
temperatures.
"""

from functools import partial

import pyarrow as pa
import pytest
import torch
from trainer_rig import gradient, group, rows_of, tiny_learner, tiny_trainer

from dataflow.records import TEMPERATURE
from operators.losses import aipo
from operators.training.parallel.lead import dealt, in_order
from operators.training.steps import rank_knobs, take_knobs


def sampled(batch: pa.RecordBatch, temperature: float | None) -> pa.RecordBatch:
    """The same rows, which say at what temperature they were sampled."""
    return batch.append_column(TEMPERATURE, pa.array([temperature] * batch.num_rows, pa.float64()))


def test_each_rollout_is_trained_at_the_temperature_that_it_was_sampled_at() -> None:
    batches = [group(number, size=4, advantages=[1.0, -1.0, 0.5, -0.5]) for number in range(4)]
    total = 0
    for at in (0.5, 1.5):
        _, found, _ = gradient(tiny_learner(tiny_trainer(temperature=at)), rows_of(*batches))
        total = total + found / 2  # each has all tokens; together they have twice as many
    mixed = [sampled(batch, 0.5) for batch in batches]
    again = [
        group(number + 4, seed=number, size=4, advantages=[1.0, -1.0, 0.5, -0.5])
        for number in range(4)
    ]
    mixed += [sampled(batch, 1.5) for batch in again]
    learner = tiny_learner(tiny_trainer(temperature=3.0))
    rows = rows_of(*mixed)
    parts = learner.begin(rows, 0)
    temperatures = [set(rows.columns_R[TEMPERATURE][part.rollouts].tolist()) for part in parts]
    assert all(len(each) == 1 for each in temperatures)
    _, found, _ = gradient(learner, rows)
    torch.testing.assert_close(found, total, rtol=1e-4, atol=1e-6)


def test_rows_that_do_not_say_their_temperature_have_that_of_the_declaration() -> None:
    batch = group(0, size=4, advantages=[1.0, -1.0, 0.5, -0.5])
    _, wanted, _ = gradient(tiny_learner(tiny_trainer(temperature=0.7)), rows_of(batch))
    for silent in (sampled(batch, None), sampled(batch, 0.0), sampled(batch, 0.7)):
        _, found, _ = gradient(tiny_learner(tiny_trainer(temperature=0.7)), rows_of(silent))
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_micro_batches_that_are_dealt_to_ranks_do_not_mix_temperatures(ranks: int) -> None:
    batches = [
        sampled(group(n, size=4, advantages=[1.0, -1.0, 0.5, -0.5]), 0.5 + n % 2) for n in range(5)
    ]
    step = tiny_learner(tiny_trainer()).prepare(rows_of(*batches))
    shares = dealt(step, ranks, 40, False)
    assert len({len(share.counts) for share in shares}) == 1, "as many on each"
    found = []
    for share in shares:
        for part in in_order(share.counts):
            assert len(set(share.rows.columns_R[TEMPERATURE][part].tolist())) <= 1
            found += share.rows.rollout_ids_R[part].tolist()
    assert sorted(found) == sorted(step.rows.rollout_ids_R.tolist())


def test_a_learner_that_takes_knobs_does_what_one_does_that_was_declared_with_them() -> None:
    rows = rows_of(*(group(number, size=4, logprobs=-5.0) for number in range(3)))
    declared = tiny_trainer(loss=partial(aipo, rho=1.1), max_grad_norm=0.1, weight_decay=0.3)
    changed = tiny_trainer(loss=partial(aipo, rho=4.0))
    _, before, _ = gradient(tiny_learner(changed), rows)
    learner = tiny_learner(changed)
    take_knobs(learner, 0, 1, **rank_knobs(declared))
    assert learner.max_grad_norm == 0.1
    assert sorted(group["weight_decay"] for group in learner.optimizer.param_groups) == [0.0, 0.3]
    _, found, _ = gradient(learner, rows)
    _, wanted, _ = gradient(tiny_learner(declared), rows)
    assert torch.equal(found, wanted) and not torch.equal(found, before)
