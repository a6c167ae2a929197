"""Laws of the losses: equal to the papers' formulas by hand in float64, gradients included."""

import math
import subprocess
import sys

import torch

from operators.losses import aipo, grpo


def _draw(count: int = 200, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """new_logprobs, logprobs and advantages whose ratios lie on both sides of every bound."""
    draw = torch.Generator().manual_seed(seed)
    old = -3.0 * torch.rand(count, generator=draw, dtype=torch.float64) - 0.1
    new = old + 1.5 * torch.randn(count, generator=draw, dtype=torch.float64)
    advantage = torch.randn(count, generator=draw, dtype=torch.float64)
    return new.requires_grad_(), old, advantage


def _gradient(loss: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(loss.sum(), new)[0]


def test_aipo_has_the_gradient_of_the_papers_estimator_truncated_tokens_included():
    new, old, advantage = _draw()
    found = _gradient(aipo(new, old, advantage, rho=2.0), new)
    truncated = 0
    for place in range(len(new)):
        ratio = math.exp(new[place].item() - old[place].item())
        truncated += ratio > 2.0
        assert abs(found[place].item() + min(ratio, 2.0) * advantage[place].item()) < 1e-10
    assert 20 < truncated < 180


def test_aipo_differs_from_the_surrogate_on_truncated_tokens_and_nowhere_else():
    new, old, advantage = _draw()
    found = _gradient(aipo(new, old, advantage, rho=2.0), new)
    surrogate = _gradient(-(new - old).exp().clamp(max=2.0) * advantage, new)
    truncated = (new - old).exp() > 2.0
    assert torch.allclose(found[~truncated], surrogate[~truncated], atol=1e-12)
    assert (surrogate[truncated] == 0).all()
    assert (found[truncated].abs() > 1e-6).all()


def test_aipo_without_staleness_is_the_policy_gradient():
    new, _, advantage = _draw()
    found = _gradient(aipo(new, new.detach(), advantage), new)
    assert torch.allclose(found, -advantage, atol=1e-12)


def test_grpo_equals_the_clipped_objective_by_hand():
    new, old, advantage = _draw(seed=1)
    losses = grpo(new, old, advantage, clip_low=0.2, clip_high=0.3)
    found = _gradient(losses, new)
    kept = 0
    for place in range(len(new)):
        ratio, push = math.exp(new[place].item() - old[place].item()), advantage[place].item()
        wanted = -min(ratio * push, min(max(ratio, 0.8), 1.3) * push)
        assert abs(losses[place].item() - wanted) < 1e-10
        is_clipped = (push > 0 and ratio > 1.3) or (push < 0 and ratio < 0.8)
        kept += not is_clipped
        assert abs(found[place].item() - (0.0 if is_clipped else -ratio * push)) < 1e-10
    assert 20 < kept < 180


def test_losses_have_the_gradient_that_finite_differences_show():
    new, old, advantage = _draw(count=20, seed=2)
    weight = (new.detach() - old).exp().clamp(max=4.0)
    assert torch.autograd.gradcheck(lambda x: grpo(x, old, advantage), (new,))
    found = _gradient(aipo(new, old, advantage), new)
    step = 1e-6
    numeric = (-weight * advantage * (new + step) + weight * advantage * (new - step)) / (2 * step)
    assert torch.allclose(found, numeric, atol=1e-6)


def test_losses_are_imported_without_torch():
    code = "import sys, operators.losses, operators.trainer, operators.evaluate, operators.credit; "
    done = subprocess.run(
        [sys.executable, "-c", code + "sys.exit('torch' in sys.modules)"],
        timeout=60,
        check=False,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr.decode()
