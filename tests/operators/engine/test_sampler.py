"""The distribution drawn from is that of the knobs, its log-probabilities are those recorded, in
any company.
"""

import numpy as np
import pytest
import torch
from log_distribution import log_distribution
from sampling_reference import reference

from operators.engine.sampler import RowSampling, Sampling, draw, uniform

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -2.0, 1.5, 0.2])


KNOBS = [
    Sampling(),
    Sampling(temperature=0.7),
    Sampling(temperature=0.0),
    Sampling(top_k=5),
    Sampling(top_k=10**6),
    Sampling(top_p=0.9),
    Sampling(top_p=0.0),
    Sampling(min_p=0.1),
    Sampling(min_p=1.0),
    Sampling(repetition_penalty=1.3),
    Sampling(repetition_penalty=0.8, temperature=0.0),
    Sampling(temperature=1.3, top_k=60, top_p=0.8),
    Sampling(temperature=1.5, top_k=40, top_p=0.97, min_p=0.02, repetition_penalty=1.2),
]


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _batch(
    rows: int, vocabulary: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, seen, seeds and counts."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = 3 * torch.randn(rows, vocabulary, generator=generator)
    seen = torch.rand(rows, vocabulary, generator=generator) < 0.2
    return logits, seen, torch.arange(rows) * 7919, torch.arange(rows) % 5


@pytest.mark.parametrize("vocabulary", [1, 8, 300, 2500])
@pytest.mark.parametrize("sampling", KNOBS, ids=str)
def test_the_distribution_is_that_of_a_float64_reference(sampling, vocabulary):
    logits, seen, *_ = _batch(4, vocabulary)
    found = log_distribution(logits, sampling, seen)
    wanted = torch.stack(
        [reference(row, sampling, was) for row, was in zip(logits, seen, strict=True)]
    )
    torch.testing.assert_close(found, wanted.float(), atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize("vocabulary", [300, 32_000])
@pytest.mark.parametrize("sampling", [knobs for knobs in KNOBS if knobs.temperature], ids=str)
def test_the_distribution_is_that_of_generate(sampling, vocabulary):
    from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel

    prompt = torch.randint(vocabulary, (3, 20), generator=torch.Generator().manual_seed(2))
    logits = _batch(3, vocabulary)[0]
    seen = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, prompt, True)
    config = GPT2Config(vocab_size=8, n_positions=4, n_embd=4, n_layer=1, n_head=1)
    knobs = {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p or None,
        "min_p": sampling.min_p or None,
        "repetition_penalty": sampling.repetition_penalty,
    }
    processors = GPT2LMHeadModel(config)._get_logits_processor(
        GenerationConfig(do_sample=True, **knobs), input_ids_seq_length=20
    )
    if sampling.top_p == 0:
        from transformers import TopPLogitsWarper

        processors.append(TopPLogitsWarper(0.0))
    wanted = torch.log_softmax(processors(prompt, logits.clone()).double(), -1).float()
    torch.testing.assert_close(
        log_distribution(logits, sampling, seen), wanted, atol=2e-6, rtol=1e-6
    )


@pytest.mark.parametrize("vocabulary", [1, 2, 100, 512, 4100, 32_000])
def test_tokens_and_logprobs_are_equal_to_the_bit_in_any_company(vocabulary):
    rows = 3 * len(KNOBS)
    logits, seen, seeds, counts = _batch(rows, vocabulary)
    of_row = [KNOBS[row % len(KNOBS)] for row in range(rows)]
    mixed = draw(logits, RowSampling.of(of_row, "cpu"), seeds, counts, seen=seen, keep=True)
    for index, sampling in enumerate(KNOBS):
        alike = draw(logits, sampling, seeds, counts, seen=seen, keep=True)
        for row in range(index, rows, len(KNOBS)):
            one = slice(row, row + 1)
            alone = draw(logits[one], sampling, seeds[one], counts[one], seen=seen[one], keep=True)
            for batch in (mixed, alike):
                assert torch.equal(batch.tokens[one], alone.tokens)
                assert torch.equal(batch.logprobs[one], alone.logprobs)
                if batch.kept_tokens is not None and alone.kept_tokens is not None:
                    assert torch.equal(batch.kept_tokens[one], alone.kept_tokens)


@pytest.mark.parametrize("vocabulary", [8, 100, 50_257])
@pytest.mark.parametrize("sampling", KNOBS, ids=str)
def test_a_draw_reports_the_logprob_of_its_token_and_the_tokens_that_were_left(
    sampling, vocabulary
):
    logits, seen, seeds, counts = _batch(5, vocabulary)
    drawn = draw(logits, sampling, seeds, counts, seen=seen, keep=True)
    distribution = log_distribution(logits, sampling, seen)
    wanted = distribution.gather(1, drawn.tokens[:, None])[:, 0]
    torch.testing.assert_close(drawn.logprobs, wanted, atol=1e-6, rtol=0)
    assert float(drawn.logprobs.max()) <= 0
    kind = RowSampling.of([sampling], "cpu").kind
    assert (drawn.kept_tokens is not None) == (kind.greedy or kind.leaves_out)
    if drawn.kept_tokens is not None:
        assert torch.equal(drawn.kept_tokens, distribution > -torch.inf)
    assert draw(logits, sampling, seeds, counts, seen=seen).kept_tokens is None


def test_logprobs_are_right_where_a_float32_sum_over_the_vocabulary_is_not():
    logits = torch.rand(2, 150_001, generator=torch.Generator().manual_seed(0))
    drawn = draw(logits, Sampling(), torch.arange(2), torch.arange(2))
    wanted = torch.log_softmax(logits.double(), -1).gather(1, drawn.tokens[:, None])[:, 0]
    torch.testing.assert_close(drawn.logprobs.double(), wanted, atol=2e-6, rtol=0)


@pytest.mark.parametrize("sampling", KNOBS, ids=str)
def test_a_draw_off_the_cpu_never_looks_at_a_value(sampling):
    def there(shape, dtype):
        return torch.empty(shape, dtype=dtype, device="meta")  # has no values: reading one raises

    integers = there((6,), torch.int64)
    for given in (sampling, RowSampling.of([sampling, Sampling()] * 3, "meta")):
        seen = there((6, 3000), torch.bool)
        drawn = draw(
            there((6, 3000), torch.bfloat16), given, integers, integers, seen=seen, keep=True
        )
        assert (drawn.tokens.shape, drawn.logprobs.shape) == ((6,), (6,))
        assert (drawn.tokens.dtype, drawn.logprobs.dtype) == (torch.int64, torch.float32)
        assert log_distribution(there((6, 3000), torch.float32), given, seen).shape == (6, 3000)


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


def test_a_token_of_probability_zero_is_never_drawn_even_at_the_edges_of_the_noise(monkeypatch):
    logits = torch.full((4, 300), -torch.inf)
    logits[:, 130] = logits[:, 131] = 0.0
    edges = torch.tensor([0.0, 0.5 - 2.0**-40, 0.5, 1 - 2.0**-40], dtype=torch.float64)
    monkeypatch.setattr("operators.engine.sampler.uniform", lambda seeds, counts: edges)
    drawn = draw(logits, Sampling(), torch.arange(4), torch.arange(4))
    assert drawn.tokens.tolist() == [130, 130, 131, 131]
    np.testing.assert_allclose(drawn.logprobs.numpy(), np.log(0.5), rtol=1e-6)


def test_temperature_zero_takes_the_likeliest_token_for_certain():
    seeds = torch.arange(5)
    drawn = draw(LOGITS.expand(5, 8), Sampling(temperature=0.0), seeds, seeds)
    assert drawn.tokens.tolist() == [0] * 5
    assert drawn.logprobs.tolist() == [0.0] * 5


@pytest.mark.parametrize("sampling", KNOBS, ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("broken", [1, 8])
def test_logits_that_are_not_finite_show_in_the_logprob_of_their_row_alone(sampling, value, broken):
    logits = LOGITS.repeat(3, 1)
    logits[1, :broken] = value
    seen = torch.zeros(3, 8, dtype=torch.bool)
    for given in (sampling, RowSampling.of([sampling] * 3, "cpu")):
        drawn = draw(logits, given, torch.arange(3), torch.arange(3), seen=seen)
        is_broken = value != -float("inf") or broken == 8
        assert drawn.logprobs.isfinite().tolist() == [True, not is_broken, True]
        assert int(drawn.tokens.min()) >= 0 and int(drawn.tokens.max()) < 8


def test_ties_with_the_last_token_kept_are_kept():
    logits = torch.tensor([[3.0, 1.0, 1.0, 0.0, 3.0]])
    for sampling, wanted in (
        (Sampling(top_k=1), [0, 4]),
        (Sampling(top_k=3), [0, 1, 2, 4]),
        (Sampling(top_p=0.3), [0, 4]),
        (Sampling(top_p=1e-9), [0, 4]),
    ):
        assert log_distribution(logits, sampling)[0].isfinite().nonzero()[:, 0].tolist() == wanted


@pytest.mark.parametrize(
    "knob",
    [
        {"temperature": -1.0},
        {"top_k": -1},
        {"top_p": 1.5},
        {"min_p": -0.1},
        {"repetition_penalty": 0.0},
        {"temperature": float("nan")},
        {"top_p": float("nan")},
    ],
)
def test_a_knob_out_of_range_is_refused_by_name(knob):
    with pytest.raises(ValueError, match=rf"{next(iter(knob))} does not fit; found .*; give "):
        Sampling(**knob)


def test_a_repetition_penalty_without_the_tokens_seen_is_refused():
    with pytest.raises(ValueError, match="seen"):
        draw(
            LOGITS[None],
            Sampling(repetition_penalty=1.2),
            torch.zeros(1).long(),
            torch.zeros(1).long(),
        )
