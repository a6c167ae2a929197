"""AdamW with moments in bfloat16: near the one that keeps them whole, and the same each time."""

import pytest
import torch
from trainer_rig import group, rows_of, tiny_learner, tiny_llama, tiny_trainer

from operators.training.learner.build import adamw, fresh_state, state_tensors
from operators.training.learner.rounded import PART, rounded

STEPS, NUMBERS, RATE = 300, 4096, 1e-3
KNOBS = {"lr": RATE, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
ROWS = (group(0, size=4, completion=20), group(1))


def trained(moments: torch.dtype | None) -> torch.Tensor:
    """How far weights move by noisy gradients of a bowl; None: by AdamW in float64."""
    random = torch.Generator().manual_seed(0)
    start = torch.randn(NUMBERS, 2, generator=random, dtype=torch.float64)
    target = torch.randn(NUMBERS, 2, generator=random, dtype=torch.float64)
    weight = torch.nn.Parameter(start.clone() if moments is None else start.float())
    optimizer: torch.optim.Optimizer
    if moments is None:
        optimizer = torch.optim.AdamW([weight], **KNOBS)  # type: ignore[arg-type]
    else:
        optimizer = adamw({"w": weight}, moments=moments, **KNOBS)  # type: ignore[arg-type]
    for _ in range(STEPS):
        noise = torch.randn(NUMBERS, 2, generator=random, dtype=torch.float64)
        weight.grad = (weight.detach().double() - target + noise).to(weight.dtype)
        optimizer.step()
    return weight.detach().double() - start


def test_weights_move_as_with_whole_moments() -> None:
    """Against float64, of 300 steps of noisy gradients: within 0.75% of the way, and none of it to
    one side.
    """
    exact = trained(None)
    off = trained(torch.bfloat16) - exact
    assert trained(torch.float32).sub(exact).norm() / exact.norm() < 1e-4
    assert off.norm() / exact.norm() < 0.0075
    assert abs((off * exact.sign()).mean()) / exact.abs().mean() < 0.001


def test_values_are_rounded_to_their_neighbours_and_right_in_the_mean() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    turns = [rounded(values, torch.tensor(float(turn))) for turn in range(2000)]
    assert all(torch.equal(turn, turn.bfloat16().float()) for turn in turns[:3])
    gap = values.abs() / 128
    stacked = torch.stack(turns)
    assert ((stacked - values).abs() <= gap).all()
    assert ((stacked.mean(0) - values).abs() <= 0.1 * gap).all()


def test_a_second_moment_falls_when_gradients_vanish() -> None:
    weight = torch.nn.Parameter(torch.zeros(1000, 1))
    optimizer = adamw({"w": weight}, moments=torch.bfloat16, **KNOBS)  # type: ignore[arg-type]
    for step in range(1001):
        weight.grad = torch.full_like(weight, float(step == 0))
        optimizer.step()
    kept = optimizer.state[weight]["exp_avg_sq"]
    assert kept.dtype == torch.bfloat16
    assert kept.double().mean().item() == pytest.approx(1e-3 * 0.999**1000, rel=0.02)


def test_parts_of_a_large_weight_are_rounded_as_one() -> None:
    whole = torch.rand(PART + 8)
    turn = torch.tensor(3.0)
    parts = torch.cat([rounded(whole[:PART], turn), rounded(whole[PART:], turn, PART)])
    assert torch.equal(rounded(whole, turn), parts)


def test_a_step_that_goes_on_from_a_saved_state_is_the_same_bit_for_bit() -> None:
    first = tiny_learner(tiny_trainer(moments="bfloat16"))
    weights = first.parameters

    def step(learner, version):
        for part in learner.begin(rows_of(*ROWS), version):
            learner.micro(part)
        learner.end(1e-2)

    for version in range(2):
        step(first, version)
    second = tiny_learner(tiny_trainer(moments="bfloat16"), tiny_llama())
    second.forward.module.load_state_dict(first.forward.module.state_dict())
    into = fresh_state(second.optimizer, second.parameters)
    saved = state_tensors(first.optimizer, weights)
    assert into.keys() == saved.keys()
    for name, tensor in into.items():
        assert tensor.dtype == saved[name].dtype
        tensor.copy_(saved[name])
    for learner in (first, second):
        step(learner, 2)
    for name, weight in weights.items():
        assert torch.equal(weight, second.parameters[name])
