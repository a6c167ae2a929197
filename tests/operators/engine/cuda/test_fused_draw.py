"""The Triton draw gives the tokens of the sampler, with the log-probabilities of the distribution
drawn from.
"""

import math

import pytest
import torch

from operators.engine import sampler
from operators.engine.sampler import RowSampling, Sampling, uniform

pytest.importorskip("triton")

from operators.engine.cuda.draw import draw, draw_plain

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


def logits_of(device, rows, vocabulary, seed=0, spread=3.0):
    return (
        torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread
    ).to(device)


def seeds_of(device, rows):
    return torch.arange(rows, device=device) * 7919 - 3, torch.arange(rows, device=device) % 5


def sharpness(logits, temperature):
    return torch.full((len(logits),), 1 / temperature, device=logits.device)


@pytest.mark.parametrize("vocabulary", [2, 31, 1024, 1025, 5000, 151_936])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_those_at_which_the_summed_probability_passes_the_mark(
    device, vocabulary, temperature
):
    logits, (seeds, counts) = logits_of(device, 16, vocabulary), seeds_of(device, 16)
    tokens, logprobs = draw_plain(logits, sharpness(logits, temperature), seeds, counts)
    exact = (logits.double() / temperature).log_softmax(-1)
    reached = exact.exp().cumsum(-1)
    marks = uniform(seeds, counts)
    at = tokens[:, None]
    upper = reached.gather(1, at)[:, 0]
    lower = torch.where(tokens > 0, reached.gather(1, (at - 1).clamp(min=0))[:, 0], 0.0)
    assert ((lower - 1e-5 <= marks) & (marks <= upper + 1e-5)).all()
    torch.testing.assert_close(logprobs.double(), exact.gather(1, at)[:, 0], atol=1e-5, rtol=1e-5)


def test_a_row_draws_the_same_whatever_stands_beside_it(device):
    logits, (seeds, counts) = logits_of(device, 9, 3000), seeds_of(device, 9)
    together = draw_plain(logits, sharpness(logits, 0.7), seeds, counts)
    for row in range(9):
        one = slice(row, row + 1)
        alone = draw_plain(logits[one], sharpness(logits[one], 0.7), seeds[one], counts[one])
        assert torch.equal(alone[0], together[0][row : row + 1])
        assert torch.equal(alone[1], together[1][row : row + 1])


def test_rows_of_unlike_temperatures_draw_as_each_would_alone_and_greedy_ones_the_likeliest(device):
    logits, (seeds, counts) = logits_of(device, 8, 3000), seeds_of(device, 8)
    of_row = [Sampling(temperature=t) for t in (0.0, 0.7, 1.0, 0.0, 2.0, 1.0, 0.3, 0.0)]
    found = draw(logits, RowSampling.of(of_row, device), seeds, counts)
    expected = sampler.draw(logits, RowSampling.of(of_row, device), seeds, counts)
    assert torch.equal(found.tokens, expected.tokens)
    torch.testing.assert_close(found.logprobs, expected.logprobs, atol=1e-5, rtol=1e-5)
    assert found.logprobs[[0, 3, 7]].tolist() == [0.0] * 3


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_broken_logits_show_in_a_greedy_row_too(device, bad):
    logits = logits_of(device, 3, 2500)
    logits[1, 2000] = bad
    tokens, logprobs = draw_plain(logits, torch.zeros(3, device=device), *seeds_of(device, 3))
    assert logprobs.isfinite().tolist() == [True, False, True]
    assert ((tokens >= 0) & (tokens < 2500)).all()


def test_frequencies_are_those_of_the_distribution(device):
    rows = 40 if device.type == "cpu" else 40_000
    logits = torch.tensor([0.0, 1.0, -math.inf, 2.0, 0.5], device=device).expand(rows, 5)
    seeds, counts = (
        torch.arange(rows, device=device),
        torch.zeros(rows, dtype=torch.int64, device=device),
    )
    drawn = torch.cat(
        [draw_plain(logits, sharpness(logits, 1.0), seeds, counts + turn)[0] for turn in range(5)]
    ).cpu()
    seen = torch.bincount(drawn, minlength=5).double()
    expected = logits[0].double().softmax(-1).cpu() * len(drawn)
    assert seen[2] == 0
    chi_square = ((seen - expected) ** 2 / expected.clamp(min=1e-9))[expected > 0].sum()
    assert chi_square < 16.3  # 3 degrees of freedom, 0.1%


def test_a_token_without_probability_is_never_drawn(device):
    logits = torch.full((64, 4000), -math.inf, device=device)
    allowed = torch.arange(64, device=device) * 61
    logits[torch.arange(64, device=device), allowed] = 0.0
    tokens, logprobs = draw_plain(logits, sharpness(logits, 1.0), *seeds_of(device, 64))
    assert torch.equal(tokens, allowed)
    assert (logprobs == 0.0).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_broken_logits_give_a_logprob_that_is_not_finite_and_a_token_that_exists(device, bad):
    logits = logits_of(device, 3, 2500)
    logits[1, 2000] = bad
    tokens, logprobs = draw_plain(logits, sharpness(logits, 1.0), *seeds_of(device, 3))
    assert logprobs.isfinite().tolist() == [True, False, True]
    assert ((tokens >= 0) & (tokens < 2500)).all()


def test_logits_may_be_half_precision_and_a_part_of_something_larger(device):
    wide = logits_of(device, 6, 2400).half()
    part = wide[::2, :1200]
    seeds, counts = seeds_of(device, 3)
    assert torch.equal(
        draw_plain(part, sharpness(part, 1.0), seeds, counts)[0],
        draw_plain(part.contiguous().float(), sharpness(part, 1.0), seeds, counts)[0],
    )
