"""What memory does to rollouts: parked, resumed, aborted or recomputed, each token stays what it
was.
"""

import functools

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from replaying import drive, recomputed
from rigs.examples import examples

from operators.engine.attention import attend
from operators.engine.interface import ABORTED, PromptStart
from operators.engine.sampler import Sampling

SAMPLING = Sampling(temperature=1.2)


def work(prompts, limits, copies=4):
    return [
        PromptStart(
            prompt=np.asarray(prompt),
            limit=limit,
            tickets=range(i * copies, (i + 1) * copies),
            seeds=[i * 1000 + c for c in range(copies)],
        )
        for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
    ]


def random_prompts(count, seed=0, longest=40):
    random = np.random.default_rng(seed)
    return [random.integers(2, 32, random.integers(1, longest)) for _ in range(count)]


@pytest.fixture
def adapted(shared_model, make_engine):
    model = shared_model("llama", "engine")
    return lambda **knobs: make_engine(model, **{"sampling": SAMPLING, "end_tokens": [], **knobs})


def asked(seed):
    """Nine rollouts of three prompts, twenty tokens each."""
    prompts = random_prompts(3, seed)
    return work(prompts, [len(prompt) + 20 for prompt in prompts], copies=3)


@pytest.fixture
def undisturbed(adapted):
    """By seed: the rollouts where there is memory for all, and the bytes of a token."""

    @functools.cache
    def drawn(seed):
        engine = adapted()
        return drive(engine, asked(seed)), engine.token_bytes

    return drawn


@examples(12)
@given(pages=st.integers(4, 14), seed=st.integers(0, 5))
@example(pages=4, seed=0)
def test_rollouts_that_are_parked_for_memory_draw_the_tokens_they_would_have_drawn(
    pages, seed, adapted, undisturbed
):
    roomy, token_bytes = undisturbed(seed)
    tight = adapted(cache_bytes=pages * 16 * token_bytes)
    parked = []
    rows = drive(tight, asked(seed), lambda step: parked.append(len(tight.parked)))
    assert rows.keys() == roomy.keys()
    for ticket, row in rows.items():
        assert row["tokens"].tolist() == roomy[ticket]["tokens"].tolist()
        np.testing.assert_allclose(row["logprobs"], roomy[ticket]["logprobs"], atol=2e-5)
    assert tight.pages.available == tight.pages.count and tight.live == 0
    if pages < 6:
        assert max(parked) > 0, "so little memory must have parked somebody"


@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "mixtral"]
)
def test_recomputing_at_an_update_gives_each_token_the_whole_pass_of_its_weights(
    family, make_model, make_engine
):
    """Parked and resumed over two updates, short of memory beside."""
    models = {version: make_model(family, seed=version) for version in range(3)}
    knobs = {"sampling": SAMPLING, "end_tokens": [], "on_update": "recompute", "slots": 12}
    model = make_model(family)
    token_bytes = make_engine(model, **knobs).token_bytes
    engine = make_engine(model, cache_bytes=16 * 16 * token_bytes, **knobs)

    def update(step):
        if step in (4, 11):
            engine.model.load_state_dict(models[engine.version + 1].state_dict())
            engine.adopted(engine.version + 1)

    prompts = random_prompts(5)
    rows = drive(engine, work(prompts, [len(prompt) + 22 for prompt in prompts]), update)
    assert sum(len(set(row["versions"][row["start"] :])) == 3 for row in rows.values()) >= 3
    for row in rows.values():
        assert (np.diff(row["versions"][row["start"] :]) >= 0).all()
        expected = recomputed(models, row["tokens"], row["versions"], row["start"], SAMPLING)
        np.testing.assert_allclose(row["logprobs"][row["start"] :], expected, atol=1e-5)


def test_a_prompt_seen_before_is_not_computed_again_until_the_weights_change(adapted):
    engine = adapted()
    fed = []
    forward = engine._forward
    engine._forward = lambda new: (
        fed.append(engine.rows.n + sum(prefix.new for prefix in new)) or forward(new)
    )
    prompt = np.arange(37) % 29 + 2
    first = drive(engine, work([prompt], [38]))
    again = drive(engine, work([prompt], [38]))
    engine.adopted(1)
    drive(engine, work([prompt], [38]))
    assert fed == [37, 5, 37], "two full pages were known the second time"
    for ticket, row in first.items():
        assert row["tokens"].tolist() == again[ticket]["tokens"].tolist()
        np.testing.assert_allclose(row["logprobs"], again[ticket]["logprobs"], atol=1e-5)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_prefix_that_is_known_in_part_gives_the_same_rollouts(threads, adapted):
    """Even where the known part is computed in the very same step, for another prompt."""
    torch.set_num_threads(threads)
    shared = np.arange(33) % 29 + 2
    prompts = [np.concatenate([shared, tail]) for tail in ([3, 4], [5], [], np.arange(2, 25))]
    limits = [len(prompt) + 8 for prompt in prompts]
    alone = {}
    for start in work(prompts, limits):
        alone |= drive(adapted(), [start])
    together = drive(adapted(slots=16), work(prompts, limits))
    torch.set_num_threads(1)
    for ticket, row in together.items():
        assert row["tokens"].tolist() == alone[ticket]["tokens"].tolist()
        np.testing.assert_allclose(row["logprobs"], alone[ticket]["logprobs"], atol=1e-5)


@pytest.mark.parametrize("threads", [1, 2])
def test_tokens_that_prompts_have_in_common_are_computed_once_within_a_page_too(threads, adapted):
    torch.set_num_threads(threads)
    shared = np.arange(27) % 29 + 2
    prompts = [
        np.concatenate([shared, tail])
        for tail in (np.arange(3, 22), np.arange(4, 22), [5, 9], np.arange(3, 9))
    ]
    limits = [len(prompt) + 8 for prompt in prompts]
    alone = {}
    for start in work(prompts, limits):
        alone |= drive(adapted(), [start])
    engine = adapted(slots=16)
    fed, forward = [], engine._forward
    engine._forward = lambda new: fed.append([prefix.new for prefix in new]) or forward(new)
    together = drive(engine, work(prompts, limits))
    torch.set_num_threads(1)
    if engine.fused is not None:
        assert fed[0] == [46, 18, 2, 1]
    for ticket, row in together.items():
        assert row["tokens"].tolist() == alone[ticket]["tokens"].tolist()
        np.testing.assert_allclose(row["logprobs"], alone[ticket]["logprobs"], atol=1e-5)
        if engine.fused is not None:
            np.testing.assert_array_equal(row["logprobs"], alone[ticket]["logprobs"])


def test_siblings_hold_the_full_pages_of_their_prompt_once_and_are_told_to_attention_as_a_run(
    adapted,
):
    engine = adapted()
    engine.step(work([np.arange(37) % 29 + 2, np.arange(20) % 17 + 3], [60, 60]))
    assert engine.pages.count - engine.pages.available == (2 + 4) + (1 + 4)
    runs, shared = engine.rows.runs()
    assert runs.tolist() == [0, 4, 8] and shared.tolist() == [2, 1]
    engine.abort([1, 2, 3])
    runs, shared = engine.rows.runs()
    assert runs.tolist() == [0, 1, 5] and shared.tolist() == [0, 1]


def test_aborted_rollouts_come_back_as_far_as_they_got_and_the_rest_goes_on(adapted):
    prompts = random_prompts(3, longest=9)
    limits = [len(prompt) + 12 for prompt in prompts]
    whole = drive(adapted(), work(prompts, limits))
    engine = adapted()
    engine.step(work(prompts, limits))
    for _ in range(4):
        engine.step()
    seen = engine.progress(5)
    gone = engine.abort([5, 6, 999])
    assert sorted(row.ticket for row in gone) == [5, 6] and all(
        row.reason == ABORTED for row in gone
    )
    assert engine.progress(5) is None and engine.abort([5]) == []
    cut = next(row.tokens.ids.tolist() for row in gone if row.ticket == 5)
    assert len(cut) == len(prompts[1]) + 5
    assert cut == whole[5]["tokens"][: len(cut)].tolist() == seen.tokens.ids.tolist()
    rest = drive(engine, [])
    assert sorted(rest) == [ticket for ticket in range(12) if ticket not in (5, 6)]
    for ticket, row in rest.items():
        assert row["tokens"].tolist() == whole[ticket]["tokens"].tolist()
    assert engine.pages.available == engine.pages.count


def test_each_rollout_may_have_its_own_sampling(adapted):
    prompts = random_prompts(4)
    knobs = [
        Sampling(temperature=0.0),
        Sampling(),
        Sampling(top_k=3),
        Sampling(top_p=0.5, repetition_penalty=1.3),
    ]
    limits = [len(prompt) + 10 for prompt in prompts]
    alone = {}
    for start, sampling in zip(work(prompts, limits), knobs, strict=True):
        alone |= drive(adapted(sampling=sampling), [start])
    mixed = [
        PromptStart(**{**vars(start), "sampling": sampling})
        for start, sampling in zip(work(prompts, limits), knobs, strict=True)
    ]
    for ticket, row in drive(adapted(sampling=Sampling()), mixed).items():
        assert row["tokens"].tolist() == alone[ticket]["tokens"].tolist()
        np.testing.assert_allclose(row["logprobs"], alone[ticket]["logprobs"], atol=1e-5)


def test_the_mask_names_every_token_that_truncation_left(adapted, make_model):
    from log_distribution import log_distribution

    sampling = Sampling(top_k=5, top_p=0.9)
    prompts = random_prompts(3, longest=8)
    rows = drive(
        adapted(sampling=sampling, record_mask=True),
        work(prompts, [len(prompt) + 6 for prompt in prompts]),
    )
    model = make_model()
    for row in rows.values():
        with torch.no_grad():
            logits = model(torch.tensor(row["tokens"].astype(np.int64))[None]).logits[
                0, row["start"] - 1 : -1
            ]
        left = log_distribution(logits, sampling) > -torch.inf
        assert [ids.tolist() for ids in row["left"]] == [
            mask.nonzero()[:, 0].tolist() for mask in left
        ]


def test_attention_is_called_by_name_only_with_pages():
    from operators.models.folders import ModelError

    with pytest.raises(ModelError, match="slots"):
        attend(torch.nn.Identity(), *[torch.zeros(1, 1, 1, 4)] * 3, None)
