"""Laws of all losses: value and gradient are those of their papers' objectives, written as loops in
float64.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import loss_oracles as oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from operators import losses
from operators.training.learner.learner import vanishes_without_advantage
from operators.training.learner.loss_function import LossFunction, read_loss

Oracle = Callable[[list[oracle.Rollout]], Tensor]

CASES: dict[str, tuple[Any, str, Oracle]] = {
    "aipo": (partial(losses.aipo, rho=1.5), "tokens", partial(oracle.aipo, rho=1.5)),
    "aipo_surrogate": (
        partial(losses.aipo_surrogate, rho=1.5),
        "tokens",
        partial(oracle.aipo_surrogate, rho=1.5),
    ),
    "cispo": (
        partial(losses.cispo, clip_high=0.5),
        "tokens",
        partial(oracle.cispo, low=1.0, high=0.5),
    ),
    "cispo, both sides": (
        partial(losses.cispo, clip_low=0.1, clip_high=0.1),
        "tokens",
        partial(oracle.cispo, low=0.1, high=0.1),
    ),
    "ppo": (losses.ppo, "tokens", lambda rs: oracle.token_mean(rs, oracle.clipped_term(0.2, 0.2))),
    "grpo": (
        losses.grpo,
        "rollout_means",
        lambda rs: oracle.mean_of_means(rs, oracle.clipped_term(0.2, 0.2)),
    ),
    "dr_grpo": (
        partial(losses.dr_grpo, max_tokens=7),
        "rollouts",
        lambda rs: oracle.mean_of_sums(rs, oracle.clipped_term(0.2, 0.2)) / 7,
    ),
    "dapo": (
        losses.dapo,
        "tokens",
        lambda rs: oracle.token_mean(rs, oracle.clipped_term(0.2, 0.28)),
    ),
    "reinforce_plus_plus": (
        losses.reinforce_plus_plus,
        "tokens",
        lambda rs: oracle.token_mean(rs, oracle.clipped_term(0.2, 0.2)),
    ),
    "gspo": (losses.gspo, "rollout_means", partial(oracle.gspo, low=3e-4, high=4e-4)),
    "gspo, wide": (
        partial(losses.gspo, clip_low=0.2, clip_high=0.3),
        "rollout_means",
        partial(oracle.gspo, low=0.2, high=0.3),
    ),
    "rloo": (
        losses.rloo,
        "rollouts",
        lambda rs: oracle.mean_of_sums(
            rs, lambda r, t: -r.number("advantage", t) * r.at("new_logprobs", t)
        ),
    ),
    "decoupled_ppo": (
        losses.decoupled_ppo,
        "tokens",
        lambda rs: oracle.weighted_clip(rs, oracle.decoupled_weight, 0.2, 0.2),
    ),
    "truncated_is": (
        partial(losses.truncated_is, cap=1.2),
        "tokens",
        lambda rs: oracle.weighted_clip(rs, oracle.truncated_weight(1.2), 0.2, 0.2),
    ),
    "sequence_truncated_is": (
        losses.sequence_truncated_is,
        "tokens",
        lambda rs: oracle.weighted_clip(rs, oracle.sequence_weight(2.0), 0.2, 0.2),
    ),
    "icepop": (
        partial(losses.icepop, most=1.5),
        "tokens",
        lambda rs: oracle.weighted_clip(rs, oracle.masked_weight(0.5, 1.5), 0.2, 0.2),
    ),
    "distill": (
        partial(losses.distill, rho=1.5),
        "tokens",
        lambda rs: oracle.token_mean(rs, oracle.distill_term(1.5)),
    ),
    "sft": (
        losses.sft,
        "tokens",
        lambda rs: oracle.token_mean(rs, lambda r, t: -r.at("new_logprobs", t)),
    ),
    "dpo": (losses.dpo, "rollout_means", partial(oracle.dpo, beta=0.1)),
    "value_loss": (
        losses.value_loss,
        "tokens",
        lambda rs: oracle.token_mean(rs, oracle.value_error(0.2)),
    ),
    "value_loss, unbounded": (
        partial(losses.value_loss, clip=None),
        "tokens",
        lambda rs: oracle.token_mean(rs, oracle.value_error(None)),
    ),
    "kl_to_reference": (
        losses.kl_to_reference,
        "tokens",
        lambda rs: oracle.token_mean(
            rs, oracle.with_terms(lambda r, t: 0 * r.at("new_logprobs", t), beta=0.04)
        ),
    ),
    "corrected_kl": (
        losses.corrected_kl,
        "tokens",
        lambda rs: oracle.token_mean(
            rs,
            lambda r, t: (
                oracle._ratio(r, t)
                * oracle.with_terms(lambda r, t: 0 * r.at("new_logprobs", t), beta=0.04)(r, t)
            ),
        ),
    ),
    "entropy_bonus": (
        losses.entropy_bonus,
        "tokens",
        lambda rs: oracle.token_mean(rs, lambda r, t: -0.001 * r.at("entropy", t)),
    ),
    "with_kl": (
        losses.with_kl(partial(losses.grpo, clip_high=0.3), beta=0.5),
        "rollout_means",
        lambda rs: oracle.mean_of_means(
            rs, oracle.with_terms(oracle.clipped_term(0.2, 0.3), beta=0.5)
        ),
    ),
    "with_entropy": (
        partial(losses.with_entropy(losses.with_kl(losses.dapo, beta=0.5)), entropy_weight=0.1),
        "tokens",
        lambda rs: oracle.token_mean(
            rs, oracle.with_terms(oracle.clipped_term(0.2, 0.28), beta=0.5, weight=0.1)
        ),
    ),
    "plus": (
        losses.plus(losses.aipo_surrogate, losses.sft),
        "tokens",
        lambda rs: (
            oracle.aipo_surrogate(rs, 4.0)
            + oracle.token_mean(rs, lambda r, t: -r.at("new_logprobs", t))
        ),
    ),
    "one_update": (
        losses.one_update(partial(losses.truncated_is, cap=1.5)),
        "tokens",
        lambda rs: oracle.token_mean(
            rs,
            lambda r, t: (
                -min(1.5, oracle._ratio(r, t).item())
                * r.number("advantage", t)
                * torch.exp(r.at("new_logprobs", t) - r.number("new_logprobs", t))
            ),
        ),
    ),
}
VANISHING = {
    "aipo",
    "aipo_surrogate",
    "cispo",
    "ppo",
    "grpo",
    "dr_grpo",
    "dapo",
    "reinforce_plus_plus",
    "rloo",
    "decoupled_ppo",
    "truncated_is",
    "icepop",
    "one_update",
    "gspo",
    "sequence_truncated_is",
}
"""Losses to which rollouts of advantage 0 are found to add nothing."""


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _called(read: LossFunction, known: dict[str, Tensor]) -> Tensor:
    found = read.call(**{name: known[name] for name in read.columns + read.computed})
    assert isinstance(found, Tensor)
    return found


def _gradients(total: Tensor, leaves: list[Tensor]) -> Tensor:
    found = torch.autograd.grad(total, leaves, allow_unused=True)
    return torch.cat(
        [
            torch.zeros_like(leaf).reshape(-1) if grad is None else grad.reshape(-1)
            for leaf, grad in zip(leaves, found, strict=True)
        ]
    )


def _both(
    name: str, rollouts: list[oracle.Rollout], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Value and gradients of the loss, and of its oracle."""
    loss, normalize, by_hand = CASES[name]
    known = oracle.flat(rollouts, dtype)
    found = oracle.reduced(_called(read_loss(loss, "trainer"), known), rollouts, normalize)
    found_grad = _gradients(found, [known[each] for each in oracle.WITH_GRADIENT])
    wanted = by_hand(rollouts)
    leaves = [r.at(each, t) for each in oracle.WITH_GRADIENT for r in rollouts for t in r.chosen]
    return found, found_grad, wanted, _gradients(wanted, leaves)


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=12, derandomize=True)
@given(seed=st.integers(0, 2**31), per_token=st.booleans())
def test_value_and_gradient_are_those_of_the_papers_objective(name, seed, per_token):
    rollouts = oracle.draw(seed, per_token=per_token and not name.startswith("gspo"))
    found, found_grad, wanted, wanted_grad = _both(name, rollouts, torch.float64)
    assert torch.allclose(found, wanted, rtol=1e-10, atol=1e-12)
    assert torch.allclose(found_grad, wanted_grad, rtol=1e-10, atol=1e-12)
    marked = [set(r.chosen) for r in rollouts]
    assert any(len(chosen) < len(r.mask) for chosen, r in zip(marked, rollouts, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_float32_is_within_its_rounding_of_the_papers_objective(name):
    rollouts = oracle.draw(5)
    found, found_grad, wanted, wanted_grad = _both(name, rollouts, torch.float32)
    assert found.dtype == found_grad.dtype == torch.float32
    scale = max(1.0, wanted_grad.abs().max().item())
    assert abs(found.item() - wanted.item()) < 1e-6 * max(1.0, abs(wanted.item()))
    assert torch.allclose(found_grad.double(), wanted_grad, rtol=0, atol=1e-6 * scale)


def test_the_draws_reach_both_sides_of_every_bound():
    seen = set()
    for seed in range(20):
        for r in oracle.draw(seed):
            for t in r.chosen:
                ratio = oracle._ratio(r, t).item()
                seen.add((ratio > 1.5, ratio < 0.8, r.number("advantage", t) > 0))
                seen.add(
                    (
                        "weight",
                        oracle.decoupled_weight(r, t) > 2.0,
                        oracle.decoupled_weight(r, t) < 0.5,
                    )
                )
                seen.add(("value", abs(r.number("new_values", t) - r.number("values", t)) > 0.2))
    assert len(seen) == 6 + 3 + 2


def test_aipo_and_its_surrogate_differ_on_truncated_tokens_and_nowhere_else():
    for dtype, close in ((torch.float64, 1e-10), (torch.float32, 1e-6)):
        known = oracle.flat([r for seed in range(5) for r in oracle.draw(seed)], dtype)
        new, old, push = known["new_logprobs"], known["logprobs"], known["advantage"]
        paper = _gradients(losses.aipo(new, old, push, rho=1.5).sum(), [new])
        surrogate = _gradients(losses.aipo_surrogate(new, old, push, rho=1.5).sum(), [new])
        ratio = (new.detach().double() - old.double()).exp()
        truncated = ratio > 1.5
        by_hand = -ratio.clamp(max=1.5) * push.double()
        assert 10 < truncated.sum() < len(ratio) - 10
        assert ((paper - by_hand).abs() <= close * by_hand.abs().clamp(min=1)).all()
        assert (
            (surrogate - by_hand)[~truncated].abs()
            <= close * by_hand[~truncated].abs().clamp(min=1)
        ).all()
        assert (surrogate[truncated] == 0).all()
        assert (paper[truncated] == -1.5 * push[truncated]).all()


def test_losses_of_whole_rollouts_say_the_same_at_each_token_of_a_rollout():
    known = oracle.flat(oracle.draw(3))
    index = known["rollout_index"]
    for loss in (losses.gspo, losses.dpo):
        found = _called(read_loss(loss, "trainer"), known)
        for rollout in index.unique():
            assert len(found[index == rollout].unique()) == 1


def test_losses_take_a_micro_batch_without_any_tokens():
    none = {
        name: values.detach()[:0].requires_grad_(values.requires_grad)
        for name, values in oracle.flat(oracle.draw(0)).items()
    }
    for loss, *_ in CASES.values():
        assert _called(read_loss(loss, "trainer"), none).shape == (0,)


def test_distillation_descends_the_reverse_kl_exactly_when_tokens_are_drawn_as_they_are_likely():
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(7, generator=draw, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(7, generator=draw, dtype=torch.float64).log_softmax(0)
    mu = torch.randn(7, generator=draw, dtype=torch.float64).log_softmax(0)
    new = logits.log_softmax(0)
    (wanted,) = torch.autograd.grad((new.exp() * (new - teacher)).sum(), logits, retain_graph=True)
    for sampled in (new.detach(), mu):
        mean = (sampled.exp() * losses.distill(new, sampled, teacher, rho=float("inf"))).sum()
        (found,) = torch.autograd.grad(mean, logits, retain_graph=True)
        assert torch.allclose(found, wanted, atol=1e-12)


def test_the_corrected_kl_descends_the_reverse_kl_whoever_drew_the_tokens():
    draw = torch.Generator().manual_seed(1)
    logits = torch.randn(7, generator=draw, dtype=torch.float64, requires_grad=True)
    reference, mu = (
        torch.randn(7, generator=draw, dtype=torch.float64).log_softmax(0) for _ in range(2)
    )
    new = logits.log_softmax(0)
    (wanted,) = torch.autograd.grad(
        (new.exp() * (new - reference)).sum(), logits, retain_graph=True
    )
    for loss, sampled, is_exact in (
        (partial(losses.corrected_kl, logprobs=new.detach()), new.detach(), True),
        (partial(losses.corrected_kl, logprobs=mu), mu, True),
        (losses.kl_to_reference, new.detach(), False),
    ):
        mean = (sampled.exp() * loss(new_logprobs=new, ref_logprobs=reference, kl_beta=1.0)).sum()
        (found,) = torch.autograd.grad(mean, logits, retain_graph=True)
        assert abs(mean.item() - (new.exp() * (new - reference)).sum().item()) < 1e-12
        assert torch.allclose(found, wanted, atol=1e-12) == is_exact


def test_a_pair_prefers_the_best_of_a_group_to_its_worst():
    known = oracle.flat(oracle.draw(1))
    grad = _gradients(
        losses.dpo(
            **{name: known[name] for name in read_loss(losses.dpo, "t").columns},
            **{name: known[name] for name in read_loss(losses.dpo, "t").computed},
        ).sum(),
        [known["new_logprobs"]],
    )
    pairs = 0
    for group in known["group_index"].unique():
        inside = known["group_index"] == group
        best, worst = known["reward"][inside].max(), known["reward"][inside].min()
        if best == worst:
            assert (grad[inside] == 0).all()
            continue
        pairs += 1
        assert (grad[inside & (known["reward"] == best)] <= 0).all()
        assert (grad[inside & (known["reward"] == worst)] >= 0).all()
        assert (grad[inside & (known["reward"] != best) & (known["reward"] != worst)] == 0).all()
        assert (grad[inside] < 0).any()
        assert (grad[inside] > 0).any()
    assert pairs


def test_every_exported_loss_is_held_against_an_oracle():
    assert {name.split(",")[0] for name in CASES} == set(losses.__all__)


@pytest.mark.parametrize("name", losses.__all__)
def test_the_trainer_knows_which_losses_vanish_without_advantage(name):
    assert vanishes_without_advantage(read_loss(CASES[name][0], "trainer")) == (name in VANISHING)


@pytest.mark.parametrize("name", CASES)
def test_every_loss_reads_columns_that_operators_write(name):
    read = read_loss(CASES[name][0], "trainer")
    assert not read.faults
    columns = {
        "logprobs",
        "ref_logprobs",
        "teacher_logprobs",
        "proximal_logprobs",
        "values",
        "advantage",
        "reward",
    }
    assert set(read.columns) <= columns
    assert all(isinstance(value, int | float | None) for value in read.knobs.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_rollout_is_preferred_for_a_reward_that_differs_by_rounding(dtype):
    known = {"rollout_index": torch.arange(3), "group_index": torch.zeros(3, dtype=torch.int64)}
    known |= {
        "ref_logprobs": torch.zeros(3),
        "reward": torch.tensor([0.3, 0.1 + 0.2, 0.3], dtype=dtype),
    }
    known["reward"][2] = torch.nextafter(known["reward"][2], torch.zeros((), dtype=dtype))
    new = torch.randn(3, requires_grad=True)
    assert not _gradients(losses.dpo(new_logprobs=new, **known).sum(), [new]).any()
