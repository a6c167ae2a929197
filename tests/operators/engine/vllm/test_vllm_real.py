"""The laws of generation on vLLM itself; run where DATAFLOW_VLLM_PYTHON names an interpreter that
has it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from replaying import drive, recomputed, replayed
from rigs.operators import make_context
from test_runtime import FakePlane, letters, rows_of, run_dry
from test_runtime import prompts as batch_of

from dataflow.model import Model
from operators.engine.interface import ABORTED, STOPPED, TOO_LONG, PromptStart
from operators.engine.sampler import Sampling
from operators.engine.stop_strings import StopStrings
from operators.generator import Generator

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

EXACT = 1e-4
"""Largest difference between vLLM's float32 log-probabilities and transformers'; measured 4e-5 for
weights so large."""


@pytest.fixture
def policy(make_model):
    """The model of the folder `wide`, by its scale: all weights times so much."""

    def made(scale=1.0):
        model = make_model("llama", hidden_size=128)
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(scale)
        return model

    return made


def prompts(count, seed=0, lengths=(3, 70)):
    rng = np.random.default_rng(seed)
    return [rng.integers(2, 31, int(rng.integers(*lengths))) for _ in range(count)]


def starts(tokens, each=1, most=20, first=0, **more):
    return [
        PromptStart(
            prompt=prompt,
            limit=len(prompt) + most,
            tickets=range(first + i * each, first + (i + 1) * each),
            seeds=[7919 * (i * each + k) - 5 for k in range(each)],
            **more,
        )
        for i, prompt in enumerate(tokens)
    ]


def adopt(engine, policy, version, scale):
    for name, weight in policy(scale).named_parameters():
        engine.tensors[name].copy_(weight)
    engine.adopted(version)


def test_greedy_output_equals_generate(real, policy):
    engine, model, tokens = real(), policy(), prompts(12)
    adopt(engine, policy, engine.version + 1, 1.0)
    found = drive(engine, starts(tokens, sampling=Sampling(temperature=0.0)))
    for i, prompt in enumerate(tokens):
        expected = model.generate(
            torch.from_numpy(prompt)[None], max_new_tokens=20, do_sample=False
        )[0]
        assert found[i]["tokens"].tolist() == expected.tolist()
        assert found[i]["reason"] == (STOPPED if expected[-1] == 1 else TOO_LONG)
        assert not found[i]["logprobs"].any()


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.7, top_k=5),
        Sampling(temperature=1.3, top_p=0.8),
        Sampling(min_p=0.1, repetition_penalty=1.2),
    ],
    ids=["plain", "top_k", "top_p", "min_p"],
)
def test_logprobs_are_those_of_the_distribution_that_was_sampled_from(real, policy, sampling):
    engine, tokens = real(), prompts(3, seed=1)
    adopt(engine, policy, engine.version + 1, 1.0)
    for row in drive(engine, starts(tokens, each=4, sampling=sampling)).values():
        ids, start = torch.from_numpy(row["tokens"].astype(np.int64)), row["start"]
        logits = policy()(input_ids=ids[None]).logits[0, start - 1 : -1]
        expected = distribution(logits, ids, start, sampling).gather(1, ids[start:, None])[:, 0]
        np.testing.assert_allclose(row["logprobs"][start:], expected.detach(), atol=EXACT)


def distribution(logits, ids, start, sampling):
    """Log-probabilities [k, V] in float64, by the definitions of the knobs."""
    logits = logits.double().clone()
    for i in range(len(logits)):
        seen = ids[: start + i].unique()
        old = logits[i, seen]
        logits[i, seen] = torch.where(
            old > 0, old / sampling.repetition_penalty, old * sampling.repetition_penalty
        )
    logits = logits / sampling.temperature
    probabilities = logits.softmax(-1)
    logits[probabilities < sampling.min_p * probabilities.amax(-1, keepdim=True)] = -torch.inf
    if sampling.top_k:
        logits[logits < logits.topk(sampling.top_k).values[:, -1:]] = -torch.inf
    ordered, order = logits.softmax(-1).sort(descending=True)
    out = torch.zeros_like(logits, dtype=torch.bool).scatter(
        1, order, ordered.cumsum(-1) - ordered >= sampling.top_p
    )
    return logits.masked_fill(out, -torch.inf).log_softmax(-1)


@pytest.mark.parametrize(
    ("on_update", "reference"), [("keep", replayed), ("recompute", recomputed)]
)
def test_tokens_across_updates_in_flight_come_from_the_version_that_they_name(
    real, policy, on_update, reference
):
    engine, tokens = real(on_update=on_update), prompts(2, seed=2)
    first = engine.version + 1
    scales = {first: 1.0, first + 1: 1.15, first + 2: 0.9}
    adopt(engine, policy, first, 1.0)

    def at_step(step):
        if step in (6, 13):
            adopt(engine, policy, engine.version + 1, scales[engine.version + 1])

    found = drive(engine, starts(tokens, each=4, most=30), at_step)
    models = {version: policy(scale) for version, scale in scales.items()}
    spans = set()
    for row in found.values():
        start, versions = row["start"], row["versions"]
        assert (np.diff(versions[start:]) >= 0).all() and (versions[:start] == -1).all()
        spans |= {len(set(versions[start:].tolist()))}
        expected = reference(models, row["tokens"], versions, start)
        np.testing.assert_allclose(row["logprobs"][start:], expected, atol=EXACT)
    assert 3 in spans


@pytest.mark.parametrize("waits", [True, False], ids=["asked_before", "asked_after"])
def test_a_rollout_that_begins_after_an_update_shares_no_prefix_of_older_weights(
    real, policy, waits
):
    engine, (prompt,) = real(prefill_tokens=70), prompts(1, seed=6, lengths=(95, 96))
    first = engine.version + 1
    adopt(engine, policy, first, 1.0)
    every = starts([prompt], each=8, most=30)[0]
    early = every if waits else replace(every, tickets=every.tickets[:2], seeds=every.seeds[:2])
    late = [] if waits else [replace(every, tickets=every.tickets[2:], seeds=every.seeds[2:])]
    engine.step([early])
    adopt(engine, policy, first + 1, 1.2)
    found = drive(engine, late)
    assert len(found) == 8
    models = {first: policy(), first + 1: policy(1.2)}
    assert {int(row["versions"][95]) for row in found.values()} == set(models)
    for row in found.values():
        expected = replayed(models, row["tokens"], row["versions"], row["start"])
        np.testing.assert_allclose(row["logprobs"][row["start"] :], expected, atol=EXACT)


def test_a_rollout_draws_the_same_tokens_alone_and_in_company(real, policy):
    engine, tokens = real(), prompts(4, seed=3)
    adopt(engine, policy, engine.version + 1, 1.0)
    every = starts(tokens, each=2)
    company = drive(engine, every)
    for one in every:
        alone = drive(engine, [one])
        for ticket in one.tickets:
            assert alone[ticket]["tokens"].tolist() == company[ticket]["tokens"].tolist()
    assert len({row["tokens"].tobytes() for row in company.values()}) > 4


def test_a_cache_that_holds_fewer_rollouts_than_slots_changes_no_token(real, policy):
    tokens = prompts(8, seed=8, lengths=(30, 40))
    roomy, tight = real(), real(cache_bytes=400_000)
    adopt(roomy, policy, roomy.version + 1, 1.0)
    expected = drive(roomy, starts(tokens, most=60))
    found = drive(tight, starts(tokens, most=60))
    assert tight.about["cache_tokens"] < sum(len(row["tokens"]) for row in expected.values())
    assert {t: row["tokens"].tolist() for t, row in found.items()} == {
        t: row["tokens"].tolist() for t, row in expected.items()
    }


def test_an_aborted_rollout_keeps_its_partial_output_and_the_others_go_on(real, policy):
    engine, tokens = real(), prompts(1, seed=4)
    adopt(engine, policy, engine.version + 1, 1.0)
    (whole,) = starts(tokens, each=2, most=40)
    expected = drive(engine, [whole])
    longest = max(expected, key=lambda ticket: len(expected[ticket]["tokens"]))
    engine.step([whole])
    for _ in range(5):
        engine.step()
    (cut,) = engine.abort([longest])
    length = len(cut.tokens)
    assert cut.reason == ABORTED and len(tokens[0]) < length < len(expected[longest]["tokens"])
    assert cut.tokens.ids.tolist() == expected[longest]["tokens"][:length].tolist()
    rest = drive(engine, [])
    assert longest not in rest and engine.live == 0 and engine.free == 8


def test_a_stop_string_ends_a_rollout_and_frees_its_slot(real, policy, tokenizer):
    engine, tokens = real(), prompts(2, seed=5)
    adopt(engine, policy, engine.version + 1, 1.0)
    plain = drive(engine, starts(tokens))
    text = tokenizer.decode(plain[0]["tokens"][plain[0]["start"] :], skip_special_tokens=True)
    stops = StopStrings(tokenizer, [text[4:7]])
    found = drive(engine, starts(tokens, stop=stops))[0]
    assert found["text"] == text[: text.find(text[4:7])] and found["reason"] == STOPPED
    assert (
        tokenizer.decode(found["tokens"][found["start"] :], skip_special_tokens=True)
        == found["text"] + text[4:7]
    )
    assert engine.free == 8


def test_a_prompt_that_vllm_refuses_is_broken_and_the_engine_goes_on(real, policy):
    engine = real()
    adopt(engine, policy, engine.version + 1, 1.0)
    long, short = starts([np.full(400, 5), np.full(4, 5)])
    found = drive(engine, [long, short])
    assert found[0]["reason"] == 2 and len(found[0]["tokens"]) == 400
    assert found[1]["reason"] in (STOPPED, TOO_LONG)


def test_a_generator_on_vllm_sends_whole_groups_under_two_versions(real, wide, policy):
    """The declaration, the runtime and the weight plane as with the native engine."""
    plane = FakePlane({0: policy(), 1: policy(0.7)}, {0: 0, 9: 1})
    declared = Generator(
        Model(str(wide)), engine="vllm", group_size=4, max_tokens=20, slots=8, context_tokens=128
    )
    runtime = declared.build(make_context(node="generator", reader=plane))
    try:
        runtime.push(batch_of(letters(6)))
        rows = rows_of(run_dry(runtime, turns=5000))
    finally:
        runtime.close()
    assert sorted(row["rollout_id"] for row in rows) == list(range(24))
    assert {version for row in rows for version in row["versions"]} == {-1, 0, 1}
    for row in rows:
        start = row["mask"].index(True)
        assert row["error"] is None and len(row["tokens"]) <= start + 20
        if len(set(row["versions"][start:])) == 1:
            expected = recomputed(
                {0: policy(), 1: policy(0.7)}, row["tokens"], row["versions"], start
            )
            np.testing.assert_allclose(row["logprobs"][start:], expected, atol=EXACT)
