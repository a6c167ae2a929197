"""200,000 draws with each knob fit the distribution that a float64 reference computes, and would
not fit another.
"""

import pytest
import torch
from sampling_reference import reference

from operators.engine.sampler import RowSampling, Sampling, draw

DRAWS = 200_000


VOCABULARY = 24


LEAST = 1e-4


"""Of the p-value: a test of seeded draws fails by chance once in this many choices of the seeds."""


KNOBS = {
    "plain": Sampling(),
    "temperature": Sampling(temperature=0.6),
    "hot": Sampling(temperature=1.8),
    "top_k": Sampling(top_k=7),
    "top_p": Sampling(top_p=0.8),
    "min_p": Sampling(min_p=0.08),
    "repetition_penalty": Sampling(repetition_penalty=1.7),
    "all": Sampling(temperature=1.4, top_k=12, top_p=0.95, min_p=0.05, repetition_penalty=1.3),
}


LOGITS = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(1))


SEEN = torch.arange(VOCABULARY) % 3 == 0


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """The p-value of counts where `expected` (float64, same sum) was expected; 0 for a draw of what
    cannot be.
    """
    possible = expected > 0
    if bool(counts[~possible].any()):
        return 0.0
    assert float(expected[possible].min()) > 5, (
        "the approximation needs at least 5 expected draws in each cell"
    )
    statistic = ((counts[possible].double() - expected[possible]) ** 2 / expected[possible]).sum()
    freedom = torch.tensor(float(possible.sum()) - 1, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))


def _draws(sampling: Sampling | RowSampling, first_seed: int) -> torch.Tensor:
    """By 20,000 rollouts of 10 tokens each, the tokens, [20000, 10]."""
    rollouts, tokens = DRAWS // 10, []
    seeds = torch.arange(first_seed, first_seed + rollouts) * 7919
    logits, seen = LOGITS.expand(rollouts, -1), SEEN.expand(rollouts, -1)
    for count in range(10):
        tokens.append(
            draw(logits, sampling, seeds, torch.full_like(seeds, count), seen=seen).tokens
        )
    return torch.stack(tokens, dim=1)


def _counts(tokens: torch.Tensor) -> torch.Tensor:
    return torch.bincount(tokens.flatten(), minlength=VOCABULARY)


@pytest.mark.parametrize("knob", KNOBS)
def test_draws_with_each_knob_fit_the_reference(knob):
    counts = _counts(_draws(KNOBS[knob], 10**6))
    expected = reference(LOGITS, KNOBS[knob], SEEN).exp() * DRAWS
    assert int(counts.sum()) == DRAWS
    assert chi_square(counts, expected) > LEAST


def test_rows_of_one_batch_each_fit_their_own_reference():
    names = list(KNOBS)
    of_row = [names[row % len(names)] for row in range(DRAWS // 10)]
    sampling = RowSampling.of([KNOBS[name] for name in of_row], "cpu")
    tokens = torch.cat([_draws(sampling, 10**7 + part * DRAWS) for part in range(2)], dim=1)
    for index, name in enumerate(names):
        found = tokens[index :: len(names)]
        expected = reference(LOGITS, KNOBS[name], SEEN).exp() * found.numel()
        assert chi_square(_counts(found), expected) > LEAST, name


@pytest.mark.parametrize("knob", KNOBS)
def test_a_distribution_that_is_off_by_a_few_percent_is_rejected(knob):
    counts = _counts(_draws(KNOBS[knob], 10**6))
    shares = reference(LOGITS, KNOBS[knob], SEEN).exp()
    off = shares * torch.where(torch.arange(VOCABULARY) % 2 == 0, 1.03, 0.97)
    assert chi_square(counts, off / off.sum() * DRAWS) < LEAST


@pytest.mark.parametrize(("knob", "wrong"), [("temperature", 0.63), ("hot", 1.75)])
def test_a_wrong_temperature_is_rejected(knob, wrong):
    counts = _counts(_draws(KNOBS[knob], 10**6))
    assert (
        chi_square(counts, reference(LOGITS, Sampling(temperature=wrong), SEEN).exp() * DRAWS)
        < LEAST
    )


@pytest.mark.parametrize("distance", [1, 2, 5])
def test_tokens_of_one_rollout_are_drawn_independently(distance):
    tokens = _draws(Sampling(top_k=6), 10**8)
    first, second = tokens[:, :-distance].flatten(), tokens[:, distance:].flatten()
    shares = reference(LOGITS, Sampling(top_k=6), SEEN).exp()
    pairs = torch.bincount(first * VOCABULARY + second, minlength=VOCABULARY**2)
    assert chi_square(pairs, torch.outer(shares, shares).flatten() * len(first)) > LEAST


def test_neighbouring_seeds_draw_independently():
    seeds = torch.arange(DRAWS + 1)
    tokens = draw(
        LOGITS.expand(DRAWS + 1, -1), Sampling(top_k=6), seeds, torch.zeros_like(seeds)
    ).tokens
    shares = reference(LOGITS, Sampling(top_k=6), SEEN).exp()
    pairs = torch.bincount(
        tokens[::2][: DRAWS // 2] * VOCABULARY + tokens[1::2], minlength=VOCABULARY**2
    )
    assert chi_square(pairs, torch.outer(shares, shares).flatten() * (DRAWS // 2)) > LEAST


def test_the_p_value_is_that_of_the_chi_square_distribution():
    expected = torch.full((11,), 100.0, dtype=torch.float64)
    for statistic, wanted in ((18.307, 0.05), (29.588, 0.001)):  # tables for 10 degrees of freedom
        away = torch.zeros(11, dtype=torch.float64)
        away[0], away[1] = (statistic * 50) ** 0.5, -((statistic * 50) ** 0.5)
        assert chi_square(expected + away, expected) == pytest.approx(wanted, rel=1e-3)
