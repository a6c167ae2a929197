"""Laws of losses inside a step: how it is cut into micro-batches changes neither loss nor
gradient.
"""

from functools import partial

import numpy as np
import pyarrow as pa
import pytest
import torch
from trainer_rig import (
    gradient,
    group,
    reference_logprobs,
    rows_of,
    tiny_learner,
    tiny_llama,
    tiny_trainer,
)

from operators import losses
from operators.training.learner.loss_function import read_loss


def _columns(batch: pa.RecordBatch, *names: str) -> pa.RecordBatch:
    """The group with log-probabilities of other policies beside the generator's."""
    draw = np.random.default_rng(batch.column("group_id")[0].as_py())
    for name in names:
        given = [
            [
                old + float(draw.normal(0, 0.5)) * chosen
                for old, chosen in zip(row["logprobs"], row["mask"], strict=True)
            ]
            for row in batch.to_pylist()
        ]
        batch = batch.append_column(name, pa.array(given, pa.list_(pa.float32())))
    return batch


GROUPS = [
    _columns(group(number, size=4), "ref_logprobs", "proximal_logprobs", "teacher_logprobs")
    for number in range(5)
]
STEPS = {
    "gspo": (partial(losses.gspo, clip_low=0.3, clip_high=0.4), "rollout_means"),
    "sequence_truncated_is": (losses.sequence_truncated_is, "tokens"),
    "dpo": (losses.dpo, "rollout_means"),
    "distill": (losses.distill, "tokens"),
    "grpo with kl and entropy": (
        losses.with_entropy(losses.with_kl(losses.grpo), weight=0.1),
        "rollout_means",
    ),
    "one update": (losses.one_update(losses.icepop), "tokens"),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", STEPS)
def test_micro_batches_change_neither_loss_nor_gradient(name):
    loss, normalize = STEPS[name]
    rows = rows_of(*GROUPS, columns=read_loss(loss, "trainer").columns)
    found = []
    for limit in (10_000, 60, 1):
        learner = tiny_learner(
            tiny_trainer(loss=loss, normalize=normalize, micro_batch_tokens=limit)
        )
        found.append((*gradient(learner, rows)[:2], len(learner.begin(rows, 0))))
    assert found[0][1].abs().max() > 1e-4
    assert 1 == found[0][2] < found[1][2] <= found[2][2]
    for total, grad, _ in found[1:]:
        assert abs(total - found[0][0]) < 1e-5 * max(1.0, abs(total))
        assert torch.allclose(grad, found[0][1], atol=1e-5 * found[0][1].abs().max().item())


RATIOS = {
    **STEPS,
    "aipo": (losses.aipo, "tokens"),
    "grpo": (losses.grpo, "rollout_means"),
    "aipo_surrogate": (losses.aipo_surrogate, "tokens"),
    "decoupled_ppo": (losses.decoupled_ppo, "tokens"),
    "icepop": (losses.icepop, "tokens"),
    "truncated_is": (losses.truncated_is, "tokens"),
    "corrected": (losses.with_kl(losses.cispo, corrected=True), "tokens"),
}


@pytest.mark.parametrize("name", RATIOS)
def test_one_token_whose_ratio_overflows_costs_no_step(name):
    loss, normalize = RATIOS[name]
    columns = read_loss(loss, "trainer").columns
    batch = GROUPS[0]
    for column in ("logprobs", "proximal_logprobs", "ref_logprobs", "teacher_logprobs"):
        values = batch.column(column).to_pylist()
        at = batch.column("mask")[0].as_py().index(True)
        values[0][at] += (
            0.0
            if column.startswith(("ref", "teacher"))
            else -300.0
            if column == "logprobs"
            else -120.0
        )
        place = batch.schema.get_field_index(column)
        batch = batch.set_column(
            place, batch.schema.field(column), pa.array(values, batch.schema.field(column).type)
        )
    learner = tiny_learner(tiny_trainer(loss=loss, normalize=normalize))
    for part in learner.begin(rows_of(batch, *GROUPS[1:], columns=columns), 0):
        learner.micro(part)
    outcome = learner.end(0.0)
    assert outcome.culprit is None and outcome.grad_norm > 0
    assert all(np.isfinite(figure) for figure in outcome.measures.values() if figure is not None)


def test_a_group_is_never_cut_where_pairs_are_made_of_it():
    rows = rows_of(*GROUPS, columns=read_loss(losses.dpo, "trainer").columns)
    learner = tiny_learner(tiny_trainer(loss=losses.dpo, micro_batch_tokens=1))
    assert [part.rollouts.tolist() for part in learner.begin(rows, 0)] == np.arange(20).reshape(
        5, 4
    ).tolist()


def test_preference_through_the_trainer_is_that_computed_by_hand():
    module = tiny_llama()
    total = torch.zeros(())
    pairs = 0
    for batch in GROUPS:
        members = batch.to_pylist()
        best = max(members, key=lambda row: row["reward"])
        worst = min(members, key=lambda row: row["reward"])
        if best["reward"] == worst["reward"]:
            continue
        margins = [
            reference_logprobs(module, row["tokens"], row["mask"]).sum()
            - sum(x for x, chosen in zip(row["ref_logprobs"], row["mask"], strict=True) if chosen)
            for row in (best, worst)
        ]
        total = total + torch.log1p(torch.exp(-0.1 * (margins[0] - margins[1]))) / len(GROUPS)
        pairs += 1
    assert pairs > 1
    wanted = torch.cat(
        [grad.flatten() for grad in torch.autograd.grad(total, list(module.parameters()))]
    )
    learner = tiny_learner(
        tiny_trainer(loss=losses.dpo, normalize="rollout_means", micro_batch_tokens=60)
    )
    rows = rows_of(*GROUPS, columns=read_loss(losses.dpo, "trainer").columns)
    found, grad, _ = gradient(learner, rows)
    assert abs(found - total.item()) < 1e-5
    assert torch.allclose(grad, wanted, atol=1e-5 * wanted.abs().max().item())
