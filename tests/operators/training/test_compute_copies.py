"""Float32 weights beside copies of them that a model computes with."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from trainer_rig import group, rows_of, tiny_learner, tiny_llama, tiny_trainer
from transformers import LlamaForTokenClassification

from operators.training.learner.build import learner_of
from operators.training.learner.copies import ComputeCopies
from operators.training.learner.learner import Learner
from operators.training.learner.policy import Critic, Policy
from operators.training.learner.rows import pack

GROUPS = [group(number, size=4) for number in range(5)]


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def copying(**knobs) -> Learner:
    """As on a GPU."""
    trainer = tiny_trainer(skip_zero_advantage=False, **knobs)
    forward = Policy(tiny_llama(), compute=torch.bfloat16)
    learner = learner_of(trainer, forward, node="trainer")
    learner.copies = ComputeCopies(forward.module, torch.bfloat16)
    return learner


def in_bfloat16(module: Any) -> Any:
    """With its weights in that type, as a loader leaves it: not the frequencies of positions."""
    rounded = copy.deepcopy(module)
    for weight in rounded.parameters():
        weight.data = weight.data.bfloat16()
    return rounded


def test_numbers_are_those_of_the_model_in_bfloat16_to_the_bit() -> None:
    """Which is what an engine on a GPU has."""
    learner = copying()
    rounded = Policy(in_bfloat16(learner.module), compute=torch.bfloat16)
    rows = rows_of(*GROUPS)
    tree = pack(rows.tokens.ids, rows.tokens.mask, rows.offsets)
    learner.open(0)
    with torch.no_grad(), learner.computing():
        found = learner.forward.computed(tree, None, ())["new_logprobs"]
    assert torch.equal(found, rounded.logprobs(tree)[0])
    under_autocast = Policy(copy.deepcopy(learner.module), compute=torch.bfloat16)
    assert not torch.equal(found, under_autocast.logprobs(tree)[0])


def test_the_module_has_its_own_weights_again_after_each_micro_batch_and_after_an_error() -> None:
    learner = copying(micro_batch_tokens=40)
    own = dict(learner.module.named_parameters())
    parts = learner.begin(rows_of(*GROUPS), 0)
    assert len(parts) > 1
    for part in parts:
        learner.micro(part)
        assert all(weight is own[name] for name, weight in learner.module.named_parameters())
    with pytest.raises(RuntimeError, match="no luck"), learner.computing():
        assert {weight.dtype for weight in learner.module.parameters()} == {torch.bfloat16}
        raise RuntimeError("no luck")
    assert all(weight is own[name] for name, weight in learner.module.named_parameters())
    assert learner.module.lm_head.weight is learner.module.model.embed_tokens.weight


@pytest.mark.parametrize("checkpointing", [False, True])
def test_micro_batches_add_up_in_float32_and_move_the_weights_themselves(checkpointing) -> None:
    rows = rows_of(*GROUPS)
    outcomes = []
    for make in (copying, lambda **knobs: tiny_learner(tiny_trainer(**knobs))):
        knobs = {"micro_batch_tokens": 40, "gradient_checkpointing": checkpointing}
        if make is not copying:
            knobs["skip_zero_advantage"] = False
        learner = make(**knobs)
        for part in learner.begin(rows, 0):
            learner.micro(part)
        outcomes.append(learner.end(1e-3))
        grads = {weight.grad.dtype for weight in learner.parameters.values()}
        assert grads == {torch.float32} == {w.dtype for w in learner.parameters.values()}
    rounded, exact = outcomes
    np.testing.assert_allclose(rounded.loss, exact.loss, atol=2e-3)
    np.testing.assert_allclose(rounded.grad_norm, exact.grad_norm, rtol=0.02)


def test_a_step_computes_with_the_weights_as_they_are_then() -> None:
    """Small updates are not lost, whatever the copies round."""
    learner, rows = copying(), rows_of(*GROUPS)
    losses = []
    for step in range(3):
        for part in learner.begin(rows, step):
            learner.micro(part)
        losses.append(learner.end(1e-5).loss)
    moved = [weight.detach().clone() for weight in learner.parameters.values()]
    assert any(not torch.equal(weight.bfloat16().float(), weight) for weight in moved)
    with torch.no_grad():
        for weight in learner.parameters.values():
            weight.add_(0.05 * torch.randn_like(weight))
    for part in learner.begin(rows, 3):
        learner.micro(part)
    assert abs(learner.end(0.0).loss - losses[-1]) > 1e-4


def test_copies_take_no_memory_while_they_are_freed() -> None:
    learner = copying()
    learner.open(0)
    assert learner.copies is not None
    learner.copies.free()
    assert all(not each.numel() for each in learner.copies._by_weight.values())
    outcome = [learner.micro(part) for part in learner.begin(rows_of(*GROUPS), 0)]
    assert outcome and np.isfinite(learner.end(0.0).loss)


def test_a_critic_computes_with_copies_too() -> None:
    torch.manual_seed(0)
    config = tiny_llama().config
    config.num_labels = 1
    critic = LlamaForTokenClassification(config).eval()
    rounded = in_bfloat16(critic)
    copies = ComputeCopies(critic, torch.bfloat16)
    rows = rows_of(*GROUPS)
    tree = pack(rows.tokens.ids, rows.tokens.mask, rows.offsets)
    forward = Critic(critic, compute=torch.bfloat16)
    copies.refresh()
    with torch.no_grad(), copies.in_place():
        found = forward.values(tree)
    assert torch.equal(found, Critic(rounded, compute=torch.bfloat16).values(tree))
