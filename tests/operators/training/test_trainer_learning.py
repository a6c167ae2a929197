"""Laws of one step: packing, padding, micro-batches and skipping change neither loss nor
gradient.
"""

import functools

import numpy as np
import pyarrow as pa
import pytest
import torch
from trainer_rig import (
    VOCABULARY,
    gradient,
    group,
    reference_logprobs,
    rows_of,
    tiny_learner,
    tiny_llama,
    tiny_trainer,
)
from transformers import GPT2Config, GPT2LMHeadModel

from dataflow.errors import OperatorError, RecordError
from operators.losses import aipo, grpo
from operators.trainer import learning_rate
from operators.training.learner.learner import vanishes_without_advantage
from operators.training.learner.loss_function import read_loss
from operators.training.learner.policy import Policy
from operators.training.learner.rows import pack, step_rows, usable

GROUPS = [group(number, size=4) for number in range(5)]


def tiny_gpt2() -> GPT2LMHeadModel:
    """Learned positions, and layer norms that stay in float64 where Llama's go through float32."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=2, n_head=4, initializer_range=0.2
    )
    return GPT2LMHeadModel(config).eval()


def _by_hand(
    module: torch.nn.Module, groups: list[pa.RecordBatch], normalize: str
) -> tuple[float, torch.Tensor]:
    """AIPO's loss and gradient, one rollout at a time through the model's own attention."""
    rows = [row for batch in groups for row in batch.to_pylist() if row["error"] is None]
    tokens = sum(sum(row["mask"]) for row in rows)
    loss = torch.zeros(())
    for row in rows:
        new = reference_logprobs(module, row["tokens"], row["mask"])
        old = torch.tensor(
            [x for x, chosen in zip(row["logprobs"], row["mask"], strict=True) if chosen]
        )
        weight = (new.detach() - old).exp().clamp(max=4.0)
        divisor = {"tokens": tokens, "rollouts": len(rows), "rollout_means": len(rows) * len(new)}[
            normalize
        ]
        loss = loss - (weight * row["advantage"] * new).sum() / divisor
    grads = torch.autograd.grad(loss, list(dict(module.named_parameters()).values()))
    return loss.item(), torch.cat([grad.flatten() for grad in grads])


@pytest.mark.parametrize("normalize", ["tokens", "rollouts", "rollout_means"])
def test_loss_and_gradient_are_those_computed_by_hand(normalize):
    wanted_loss, wanted = _by_hand(tiny_llama(), GROUPS, normalize)
    loss, found, norm = gradient(tiny_learner(tiny_trainer(normalize=normalize)), rows_of(*GROUPS))
    assert abs(loss - wanted_loss) < 1e-5 * max(1, abs(wanted_loss))
    assert torch.allclose(found, wanted, atol=1e-5 * wanted.abs().max().item())
    assert abs(norm - wanted.norm().item()) < 1e-4 * norm


@pytest.mark.parametrize("loss", [aipo, grpo])
@pytest.mark.parametrize("micro_batch_tokens", [1, 40, 10_000])
@pytest.mark.parametrize("packed", [True, False])
def test_micro_batches_and_padding_change_neither_loss_nor_gradient(
    loss, micro_batch_tokens, packed
):
    wanted_loss, wanted, _ = gradient(tiny_learner(tiny_trainer(loss=loss)), rows_of(*GROUPS))
    trainer = tiny_trainer(loss=loss, micro_batch_tokens=micro_batch_tokens)
    learner = tiny_learner(trainer, packed=packed)
    assert learner.forward.packs == packed
    found_loss, found, _ = gradient(learner, rows_of(*GROUPS))
    assert abs(found_loss - wanted_loss) < 1e-5
    assert torch.allclose(found, wanted, atol=1e-5 * wanted.abs().max().item())


def test_aipos_gradient_through_the_trainer_is_exact_in_float64():
    module = tiny_gpt2().double()
    learner = tiny_learner(tiny_trainer(), module, packed=True)
    truncated = [group(number, logprobs=-9.0) for number in range(3)]
    (batch,) = learner.begin(rows_of(*truncated), 0)
    learner.micro(batch)
    found = torch.cat([weight.grad.flatten() for weight in learner.parameters.values()])
    found = found / learner.divisor
    module.set_attn_implementation("sdpa")
    _, wanted = _by_hand(module, truncated, "tokens")
    assert torch.allclose(found, wanted, rtol=0, atol=1e-10)
    assert learner.end(0.0).measures["truncated_share"] > 0.9


def test_a_scalar_loss_is_the_mean_over_the_tokens_of_its_micro_batch():
    def mean_of_masked(new_logprobs, logprobs, advantage, mask):
        return aipo(new_logprobs, logprobs, advantage)[mask].mean()

    _, wanted, _ = gradient(tiny_learner(tiny_trainer()), rows_of(*GROUPS))
    trainer = tiny_trainer(loss=mean_of_masked, micro_batch_tokens=40)
    _, found, _ = gradient(tiny_learner(trainer), rows_of(*GROUPS))
    assert torch.allclose(found, wanted, atol=1e-5 * wanted.abs().max().item())


@pytest.mark.parametrize("loss", [aipo, grpo, functools.partial(aipo, rho=1.1)])
@pytest.mark.parametrize("normalize", ["tokens", "rollouts"])
def test_leaving_out_rollouts_without_advantage_changes_neither_loss_nor_gradient(loss, normalize):
    groups = [*GROUPS[:2], group(7, advantages=[0.0] * 3), group(8, advantages=[0.0, 1.0, -1.0])]
    trainer = tiny_trainer(loss=loss, normalize=normalize)
    learner = tiny_learner(trainer)
    assert learner.skip_zero_advantage
    assert sum(len(part) for part in learner.begin(rows_of(*groups), 0)) < 14
    loss_found, found, _ = gradient(learner, rows_of(*groups))
    every = tiny_learner(tiny_trainer(loss=loss, normalize=normalize, skip_zero_advantage=False))
    loss_wanted, wanted, _ = gradient(every, rows_of(*groups))
    assert abs(loss_found - loss_wanted) < 1e-6
    assert torch.allclose(found, wanted, atol=1e-6 * wanted.abs().max().item())


def test_a_step_without_any_signal_moves_the_weights_as_a_zero_gradient_does():
    silent = rows_of(group(0, advantages=[0.0] * 3))
    weights = []
    for skip in (True, False):
        learner = tiny_learner(tiny_trainer(skip_zero_advantage=skip))
        for rows in (rows_of(*GROUPS), silent):
            for part in learner.begin(rows, 0):
                learner.micro(part)
            learner.end(1e-2)
        weights.append(
            torch.cat([weight.detach().flatten() for weight in learner.parameters.values()])
        )
    assert torch.allclose(weights[0], weights[1], atol=1e-6)


def test_rollouts_are_left_out_only_where_the_loss_vanishes_on_them():
    def bonus(new_logprobs, logprobs, advantage):
        return aipo(new_logprobs, logprobs, advantage) + 0.01 * (new_logprobs - logprobs) ** 2

    def whitened(new_logprobs, logprobs, advantage):
        return -(advantage / (advantage.std() + 1e-6)) * new_logprobs

    def supervised(new_logprobs):
        return -new_logprobs

    def refuses(new_logprobs, advantage, table):
        raise ValueError("not on random numbers")

    assert vanishes_without_advantage(read_loss(aipo, "t"))
    assert vanishes_without_advantage(read_loss(grpo, "t"))
    for loss in (bonus, whitened, supervised, refuses):
        assert not vanishes_without_advantage(read_loss(loss, "t"))


def test_the_same_rows_give_the_same_bits_twice():
    runs = []
    for _ in range(2):
        learner = tiny_learner(tiny_trainer(micro_batch_tokens=60))
        losses = []
        for _ in range(3):
            for part in learner.begin(rows_of(*GROUPS), 0):
                learner.micro(part)
            losses.append(learner.end(1e-2).loss)
        runs.append((losses, [weight.detach().clone() for weight in learner.parameters.values()]))
    assert runs[0][0] == runs[1][0]
    assert len(set(runs[0][0])) == 3
    assert all(torch.equal(one, other) for one, other in zip(runs[0][1], runs[1][1], strict=True))


def test_a_loss_reads_columns_per_rollout_and_per_token():
    seen = {}

    def spy(new_logprobs, advantage, logprobs, entropy, rollout_index, mask, scale=2.0):
        seen.update(
            advantage=advantage, logprobs=logprobs, entropy=entropy, index=rollout_index, mask=mask
        )
        return -scale * new_logprobs

    rows = rows_of(*GROUPS[:2])
    learner = tiny_learner(tiny_trainer(loss=spy, skip_zero_advantage=False))
    (part,) = learner.begin(rows, 0)
    learner.micro(part)
    counts = rows.trained_R
    assert torch.equal(seen["index"], torch.from_numpy(np.repeat(np.arange(8), counts)))
    assert np.allclose(seen["advantage"].numpy(), np.repeat(rows.columns_R["advantage"], counts))
    assert np.allclose(seen["logprobs"].numpy(), rows.tokens.logprobs[rows.tokens.mask])
    assert seen["mask"].all()
    assert len(seen["mask"]) == counts.sum()
    row = GROUPS[0].to_pylist()[0]
    logits = learner.forward.module.__class__.forward(
        tiny_llama(), torch.tensor([row["tokens"]])
    ).logits[0]
    first = row["mask"].index(True)
    wanted = torch.distributions.Categorical(logits=logits[first - 1]).entropy()
    assert abs(seen["entropy"][0].item() - wanted.item()) < 1e-4


def test_log_probabilities_are_taken_at_the_temperature_of_sampling():
    row = GROUPS[0].to_pylist()[0]
    tokens, mask = np.array(row["tokens"]), np.array(row["mask"])
    found, _ = Policy(tiny_llama(), temperature=0.5).logprobs(
        pack(tokens, mask, np.array([0, len(tokens)]))
    )
    logits = tiny_llama()(torch.tensor([row["tokens"]])).logits[0]
    wanted = (logits / 0.5).log_softmax(-1)[torch.arange(len(tokens) - 1), tokens[1:]][mask[1:]]
    assert torch.allclose(found, wanted, atol=1e-5)


def test_a_model_whose_attention_cannot_be_replaced_keeps_its_own():
    module = tiny_llama()
    module.config.sliding_window = None
    original = module.set_attn_implementation

    def refuse(name):
        if name == "dataflow_packed":
            raise ValueError("no")
        original(name)

    module.set_attn_implementation = refuse
    policy = Policy(module)
    assert not policy.packs
    assert module.config._attn_implementation == "sdpa"


def test_ratio_and_divergence_are_zero_at_equal_weights():
    plain = group(3)
    row_logprobs = []
    for row in plain.to_pylist():
        new = reference_logprobs(tiny_llama(), row["tokens"], row["mask"]).tolist()
        row_logprobs.append([0.0] * (len(row["tokens"]) - len(new)) + new)
    place = plain.schema.get_field_index("logprobs")
    batch = plain.set_column(place, "logprobs", pa.array(row_logprobs, pa.list_(pa.float32())))
    learner = tiny_learner(tiny_trainer(skip_zero_advantage=False))
    for part in learner.begin(rows_of(batch), 0):
        learner.micro(part)
    outcome = learner.end(0.0)
    assert abs(outcome.measures["ratio_mean"] - 1.0) < 1e-5
    assert abs(outcome.measures["kl"]) < 1e-6
    assert outcome.measures["truncated_share"] == 0.0


def test_divergence_and_truncation_are_measured_as_defined():
    rows = rows_of(*GROUPS)
    learner = tiny_learner(
        tiny_trainer(loss=functools.partial(aipo, rho=1.5), skip_zero_advantage=False)
    )
    for part in learner.begin(rows, 0):
        learner.micro(part)
    outcome = learner.end(0.0)
    every = [row for batch in GROUPS for row in batch.to_pylist()]
    new = torch.cat([reference_logprobs(tiny_llama(), row["tokens"], row["mask"]) for row in every])
    old = torch.from_numpy(rows.tokens.logprobs[rows.tokens.mask])
    ratio = (new - old).exp()
    assert abs(outcome.measures["ratio_mean"] - ratio.mean().item()) < 1e-4
    assert abs(outcome.measures["kl"] - (ratio - 1 - ratio.log()).mean().item()) < 1e-4
    assert outcome.measures["truncated_share"] == pytest.approx((ratio > 1.5).float().mean().item())


def test_the_learning_rate_rises_over_the_warm_up_and_then_stays():
    assert [learning_rate(step, 1.0, warmup_steps=4) for step in (1, 2, 4, 5, 100)] == [
        0.25,
        0.5,
        1.0,
        1.0,
        1.0,
    ]
    assert learning_rate(1, 1.0, warmup_steps=0) == 1.0


def test_the_learning_rate_falls_to_its_end_and_stays_there():
    def rates(schedule):
        steps = (1, 2, 4, 6, 10, 50)
        return [
            round(
                learning_rate(
                    s, 1.0, warmup_steps=2, schedule=schedule, decay_steps=10, min_lr=0.2
                ),
                6,
            )
            for s in steps
        ]

    assert rates("linear") == [0.5, 1.0, 0.8, 0.6, 0.2, 0.2]
    assert rates("cosine") == [0.5, 1.0, round(0.6 + 0.4 * 2**-0.5, 6), 0.6, 0.2, 0.2]
    assert rates("constant") == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]


def test_a_loss_of_another_shape_is_refused_with_its_file_and_line():
    def wrong(new_logprobs):
        return new_logprobs[:2]

    learner = tiny_learner(tiny_trainer(loss=wrong))
    (part,) = learner.begin(rows_of(*GROUPS), 0)
    with pytest.raises(
        OperatorError, match=r"loss 'wrong' \(.*test_trainer_learning.py:\d+\).*found shape \[2\]"
    ):
        learner.micro(part)


def test_a_list_column_that_is_not_one_number_per_token_is_refused():
    batch = group(0)
    place = batch.schema.get_field_index("logprobs")
    short = pa.array([[0.0]] * batch.num_rows, pa.list_(pa.float32()))
    with pytest.raises(RecordError, match="column 'logprobs' of rollout 0 has 1 numbers"):
        rows_of(batch.set_column(place, "logprobs", short))


def test_rows_with_an_error_or_without_a_value_are_not_trained():
    batch = group(0, size=3)
    errors = batch.schema.get_field_index("error")
    batch = batch.set_column(errors, "error", pa.array(["scorer timed out", None, None]))
    advantages = batch.schema.get_field_index("advantage")
    batch = batch.set_column(advantages, "advantage", pa.array([None, 0.5, None], pa.float64()))
    assert usable(batch, ["advantage"]).tolist() == [False, True, False]
    assert step_rows([batch], ["advantage"]).rollout_ids_R.tolist() == [1]


def test_a_row_that_failed_after_it_had_its_reward_is_not_trained():
    batch = group(0, size=3)
    errors = batch.schema.get_field_index("error")
    batch = batch.set_column(
        errors, "error", pa.array([None, "length: no answer within 1 s", None])
    )
    assert batch.column("advantage").null_count == 0
    assert step_rows([batch], ["advantage"]).rollout_ids_R.tolist() == [0, 2]
