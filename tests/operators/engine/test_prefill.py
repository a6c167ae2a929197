"""Prompts are computed in parts beside the rows that are under way, and what a turn has said is not
computed again: rollouts stay what they are."""

import copy

import numpy as np
import pytest
import torch
from replaying import drive, recomputed, replayed

from operators.engine import prefill as module
from operators.engine.attention import KVCache
from operators.engine.interface import ABORTED, PromptStart
from operators.engine.pages import PAGE, Prefix
from operators.engine.prefill import lay_out, prefill, write
from operators.engine.sampler import Sampling

SAMPLING = Sampling(temperature=1.2)


@pytest.fixture
def adapted(shared_model, make_engine):
    def make(family="llama", **knobs):
        model = shared_model(family, "engine")
        settings = {"context_tokens": 120, "sampling": SAMPLING, "end_tokens": [], **knobs}
        return make_engine(model, **settings)

    return make


def long_prompts(lengths=(90, 5, 47, 90, 16), copies=3, tokens=20):
    random = np.random.default_rng(4)
    return [
        PromptStart(
            prompt=random.integers(2, 32, length),
            limit=length + tokens,
            tickets=range(i * copies, (i + 1) * copies),
            seeds=[i * 1000 + copy for copy in range(copies)],
        )
        for i, length in enumerate(lengths)
    ]


@torch.no_grad()
def exact(model, row):
    """Log-probabilities of its completion in float64."""
    ids = torch.as_tensor(row["tokens"].astype(np.int64))[None]
    logits = model(input_ids=ids, use_cache=False).logits[0, row["start"] - 1 : -1] / 1.2
    return logits.log_softmax(-1).gather(1, ids[0, row["start"] :, None])[:, 0].numpy()


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_rollouts_are_the_same_whatever_part_of_a_prompt_a_step_computes(
    family, adapted, make_model
):
    whole = drive(adapted(family), long_prompts())
    reference = copy.deepcopy(make_model(family)).double()
    for part in (16, 20, 50):
        engine = adapted(family, prefill_tokens=part)
        rows = drive(engine, long_prompts())
        assert rows.keys() == whole.keys()
        for ticket, row in rows.items():
            assert row["tokens"].tolist() == whole[ticket]["tokens"].tolist()
            if engine.fused is not None:
                np.testing.assert_array_equal(row["logprobs"], whole[ticket]["logprobs"])
            expected, start = exact(reference, row), row["start"]
            np.testing.assert_allclose(row["logprobs"][start:], expected, atol=5e-6)
        assert engine.pages.available == engine.pages.count and engine.live == 0


def test_rows_under_way_draw_in_every_step_in_which_a_part_of_a_long_prompt_is_computed(adapted):
    engine = adapted(prefill_tokens=32)
    first, long, later = long_prompts((10, 100, 10), copies=2)
    engine.step([first])
    lengths, computed = [], [engine.prefilled]
    engine.step([long, later])
    while engine.waiting:
        lengths.append(len(engine.progress(0).tokens))
        computed.append(engine.prefilled)
        assert engine.free == 0 and engine.live == 6
        engine.step()
    computed.append(engine.prefilled)
    assert lengths == [12, 13, 14], "one token in each step"
    assert np.diff(computed).tolist() == [32, 32, 32, 14]
    rows = drive(engine, [])
    alone = {}
    for start in (first, long, later):
        alone |= drive(adapted(), [start])
    assert {ticket: row["tokens"].tolist() for ticket, row in rows.items()} == {
        ticket: row["tokens"].tolist() for ticket, row in alone.items()
    }


def test_rollouts_aborted_before_their_prompt_is_computed_leave_no_page_and_no_prefix(adapted):
    engine = adapted(prefill_tokens=16)
    (long,) = long_prompts((90,))
    engine.step([long])
    engine.step()
    assert engine.waiting == 3 and engine.steps == 0
    assert len(engine.progress(1).tokens) == 90 and not engine.new_tokens(lambda _: 0, 1)
    (gone,) = engine.abort([0])
    assert gone.reason == ABORTED and len(gone.tokens) == 90
    rows = drive(engine, [])
    whole = drive(adapted(), [long])
    assert sorted(rows) == [1, 2]
    for ticket in (1, 2):
        assert rows[ticket]["tokens"].tolist() == whole[ticket]["tokens"].tolist()
    engine.adopted(1)
    engine.step([long])
    assert len(engine.abort([0, 1, 2])) == 3 and not engine.live
    assert engine.pages.available == engine.pages.count
    assert engine.pages.find(long.prompt) == []


def test_short_of_pages_a_prompt_that_is_being_computed_is_begun_again(adapted):
    starts = long_prompts((PAGE - 1, 20 * PAGE + 10, 33), tokens=40)
    roomy = drive(adapted(context_tokens=400), starts)
    engine = adapted(
        context_tokens=400, prefill_tokens=16, cache_bytes=29 * PAGE * adapted().token_bytes
    )
    begun_again, unfill = [], engine.parked.unfill
    engine.parked.unfill = lambda: begun_again.append(engine.parked._filling) or unfill()
    rows = drive(engine, starts)
    assert any(begun_again)
    for ticket, row in rows.items():
        assert row["tokens"].tolist() == roomy[ticket]["tokens"].tolist()
        np.testing.assert_allclose(row["logprobs"], roomy[ticket]["logprobs"], atol=2e-5)
    assert engine.pages.available == engine.pages.count


@pytest.mark.parametrize("on_update", ["keep", "recompute"])
def test_new_weights_while_a_prompt_is_computed_are_those_that_its_tokens_name(
    on_update, make_model, make_engine
):
    models = {version: make_model(seed=version) for version in range(2)}
    model = make_model()
    engine = make_engine(
        model,
        context_tokens=120,
        sampling=SAMPLING,
        end_tokens=[],
        prefill_tokens=32,
        on_update=on_update,
    )
    (long,) = long_prompts((90,))
    engine.step([long])
    model.load_state_dict(models[1].state_dict())
    engine.adopted(1)
    rows = drive(engine, [])
    for row in rows.values():
        assert (row["versions"][90:] == 1).all()
        if on_update == "recompute":
            expected = recomputed(models, row["tokens"], row["versions"], 90, SAMPLING)
        else:
            versions = np.where(np.arange(len(row["tokens"])) <= 32, 0, 1)
            expected = replayed(models, row["tokens"], versions, 1, SAMPLING)[89:]
        np.testing.assert_allclose(row["logprobs"][90:], expected, atol=1e-5)
    remembered = engine.pages.find(long.prompt)
    assert bool(remembered) == (on_update == "recompute"), "only what one version has computed"


HEARD, SAID, TURNS = 6, 18, 10


def conversation(engine, *, goes_on, begun=30, heard=HEARD, said=SAID):
    """Prompt tokens that each turn has computed, and what was drawn."""
    random = np.random.default_rng(1)
    tokens, computed, drawn = random.integers(2, 32, begun), [], []
    for turn in range(TURNS):
        before = engine.prefilled
        start = PromptStart(
            prompt=tokens,
            limit=len(tokens) + said,
            tickets=[turn],
            seeds=[turn],
            goes_on=goes_on,
        )
        row = drive(engine, [start])[turn]
        computed.append(engine.prefilled - before)
        drawn.append(row)
        tokens = np.concatenate([row["tokens"], random.integers(2, 32, heard)])
    return computed, drawn


def test_of_its_own_past_an_agent_computes_at_each_turn_what_it_heard_alone(adapted):
    computed, drawn = conversation(adapted(context_tokens=300), goes_on=True)
    whole, otherwise = conversation(adapted(context_tokens=300), goes_on=False)
    fused = adapted().fused is not None
    assert max(computed[1:]) <= HEARD + (1 if fused else PAGE), "the last token said, and what came"
    assert sum(whole) - sum(computed) >= (TURNS - 2) * SAID
    for one, two in zip(drawn, otherwise, strict=True):
        assert one["tokens"].tolist() == two["tokens"].tolist()
        np.testing.assert_allclose(one["logprobs"], two["logprobs"], atol=1e-5)


def test_turns_shorter_than_a_page_are_computed_once_too_where_pages_are_copied_in_part(adapted):
    engine = adapted()
    if engine.fused is None:
        pytest.skip("only the fused step copies a part of a page")
    knobs = {"begun": 4, "heard": 1, "said": 2}
    computed, drawn = conversation(engine, goes_on=True, **knobs)
    whole, otherwise = conversation(adapted(), goes_on=False, **knobs)
    assert computed == [4] + [2] * (TURNS - 1)
    assert sum(whole) > 3 * sum(computed)
    for one, two in zip(drawn, otherwise, strict=True):
        assert one["tokens"].tolist() == two["tokens"].tolist()
        np.testing.assert_array_equal(one["logprobs"], two["logprobs"])
    assert engine.pages.available == engine.pages.count


def test_what_older_weights_computed_of_a_turn_is_not_found_again(adapted):
    engine = adapted()
    start = PromptStart(prompt=np.arange(2, 30), limit=70, tickets=[0], seeds=[0], goes_on=True)
    engine.step([start])
    engine.adopted(1)
    row = drive(engine, [])[0]
    assert engine.pages.find(row["tokens"]) == []
    row = drive(engine, [start])[0]
    assert len(engine.pages.find(row["tokens"])) == 69 // PAGE


@pytest.mark.parametrize("window", [None, 5, 40])
@pytest.mark.parametrize("known", [0, 2])
def test_prefixes_end_to_end_attend_as_each_does_alone(window, known, monkeypatch):
    """What torch's kernel for unlike lengths is given is what it says that it computes."""
    prefixes = [
        Prefix(tokens=np.arange(length), cached=min(known, (length - 1) // PAGE), tables=[table])
        for length, table in ((50, [7, 1, 5, 2]), (3, [0]), (33, [3, 8, 4]))
    ]
    fresh = lay_out(prefixes, torch.from_numpy)
    torch.manual_seed(0)
    cache, count = KVCache(9), len(fresh.tokens)
    query, key, value = (torch.randn(heads, count, 8, dtype=torch.float64) for heads in (4, 2, 2))
    keys, values = cache.layer(0, key[None], value[None])
    for side, new in ((keys, key), (values, value)):
        side.normal_()
        write(fresh.layout, side, new)
    alone = prefill(fresh.layout, query, key, value, keys, values, 0.3, window, None)

    def varlen(q, k, v, ends_q, ends_k, most_q, most_k, *, scale, window_size, enable_gqa):
        """As documented: causal from the end of each sequence, so many positions to the left."""
        left, right = window_size
        assert right == 0 and enable_gqa and ends_q.dtype == ends_k.dtype == torch.int32
        parts = []
        for i in range(len(ends_q) - 1):
            one = q[ends_q[i] : ends_q[i + 1]]
            k1, v1 = (side[ends_k[i] : ends_k[i + 1]].repeat_interleave(2, 1) for side in (k, v))
            assert len(one) <= most_q and len(k1) <= most_k
            scores = torch.einsum("qhd,khd->hqk", one, k1) * scale
            place = torch.arange(len(one))[:, None] + len(k1) - len(one)
            at = torch.arange(len(k1))
            hidden = (at > place) | ((at < place - left) if left >= 0 else False)
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            parts.append(torch.einsum("hqk,khd->qhd", weights, v1))
        return torch.cat(parts)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen)
    monkeypatch.setattr(module, "serves_ragged", lambda *_: True)
    together = prefill(fresh.layout, query, key, value, keys, values, 0.3, window, None)
    torch.testing.assert_close(together, alone, atol=1e-12, rtol=1e-12)
