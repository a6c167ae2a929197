"""Tokens are drawn with the probabilities that are recorded for them."""

import numpy as np
import pytest
import torch

from operators.engine.sampler import Sampling, draw, log_distribution, uniform

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -2.0, 1.5, 0.2])
DRAWS = 50_000


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(), 8),
        (Sampling(temperature=0.5), 8),
        (Sampling(temperature=2.0), 8),
        (Sampling(top_k=3), 3),
        (Sampling(top_p=0.7), 3),
        (Sampling(temperature=1.5, top_k=5, top_p=0.9), 5),
    ],
    ids=str,
)
def test_draws_follow_the_recorded_distribution(sampling, kept):
    seeds = torch.from_numpy(np.random.default_rng(3).integers(-(2**63), 2**63, DRAWS))
    chosen, logprobs = draw(LOGITS.expand(DRAWS, 8), sampling, seeds, torch.arange(DRAWS) % 50)
    expected = log_distribution(LOGITS[None], sampling)[0].exp()
    assert int((expected > 0).sum()) == kept
    torch.testing.assert_close(logprobs, expected.log()[chosen])
    counts = torch.bincount(chosen, minlength=8)
    assert not counts[expected == 0].any()
    wanted = expected[expected > 0] * DRAWS
    chi_square = float(((counts[expected > 0] - wanted) ** 2 / wanted).sum())
    assert chi_square < 30, "far beyond the 99.9th percentile of 7 degrees of freedom (24.3)"


def test_noise_is_uniform_over_positions_of_one_seed_and_over_seeds():
    for seeds, counts in (
        (torch.zeros(100_000, dtype=torch.int64), torch.arange(100_000)),
        (torch.arange(100_000), torch.zeros(100_000, dtype=torch.int64)),
    ):
        noise = uniform(seeds, counts)
        assert float(noise.min()) >= 0 and float(noise.max()) < 1
        bins = torch.histc(noise, 20, 0, 1)
        assert float(((bins - 5000) ** 2 / 5000).sum()) < 44
        assert abs(float(torch.corrcoef(torch.stack([noise[1:], noise[:-1]]))[0, 1])) < 0.02


def test_temperature_zero_takes_the_likeliest_token_for_certain():
    seeds = torch.arange(5)
    chosen, logprobs = draw(LOGITS.expand(5, 8), Sampling(temperature=0.0), seeds, seeds)
    assert chosen.tolist() == [0] * 5
    assert logprobs.tolist() == [0.0] * 5


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_show_in_the_logprob(temperature, value):
    logits = torch.stack([LOGITS, torch.full((8,), value)])
    chosen, logprobs = draw(logits, Sampling(temperature=temperature), torch.arange(2), torch.arange(2))
    assert logprobs.isfinite().tolist() == [True, False]
    assert int(chosen.min()) >= 0 and int(chosen.max()) < 8


def test_top_p_keeps_the_likeliest_token_even_below_its_own_probability():
    logprobs = log_distribution(LOGITS[None], Sampling(top_p=1e-9))[0]
    assert logprobs.exp().tolist() == [1.0] + [0.0] * 7
