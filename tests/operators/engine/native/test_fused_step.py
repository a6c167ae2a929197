"""The fused step against transformers: families, runs, prefixes, new weights; a row's bits are its
own.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from operators.engine.attention import KVCache
from operators.engine.native.attention import library
from operators.engine.native.fused import FusedStep, supports
from operators.engine.native.packing import reason_against
from operators.engine.pages import PAGE, Prefix
from operators.models.folders import ModelError

pytestmark = pytest.mark.skipif(library() is None, reason="no C compiler at hand")


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 1000.0,
}


ONE = {"num_key_value_heads": 1}


MODELS = {
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, rope scaled": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama, odd sizes": (
        "llama",
        {"hidden_size": 36, "intermediate_size": 50, "num_attention_heads": 3, **ONE},
    ),
    "llama, one query per key": ("llama", {"num_key_value_heads": 4}),
    "llama, wide": ("llama", {"hidden_size": 256, "vocab_size": 333, "initializer_range": 0.05}),
    "qwen2": ("qwen2", {}),
    "qwen2 with windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {}),
    "mistral, wide window": ("mistral", {"sliding_window": 40}),
}


NOTHING = (torch.empty(0, dtype=torch.int64),) * 2


EMPTY = SimpleNamespace(
    positions=NOTHING[0],
    longest=0,
    table=torch.empty(0, 1, dtype=torch.int32),
    runs=None,
)


@pytest.fixture(params=list(MODELS))
def model(request, make_model):
    family, changes = MODELS[request.param]
    made = make_model(family, **changes)
    torch.manual_seed(1)
    for name, weight in made.named_parameters():
        if name.endswith("bias") or "norm" in name:
            weight.add_(torch.randn(weight.shape) * 0.3)
    return made


def rows_of(prompts, siblings, longest):
    """Pages for `siblings` rows of each prompt: shared full pages, own ones behind them."""
    most = longest // PAGE + 1
    pages = iter(
        torch.randperm(
            len(prompts) * siblings * (most + 1) + 2, generator=torch.Generator().manual_seed(3)
        ).tolist()
    )
    tables = []
    for prompt in prompts:
        shared = [next(pages) for _ in range(len(prompt) // PAGE)]
        tables.append(
            [shared + [next(pages) for _ in range(most - len(shared))] for _ in range(siblings)]
        )
    return tables, KVCache(len(prompts) * siblings * (most + 1) + 2)


def generate(step, prompts, siblings, drawn, *, shared=True, together=True):
    """Logits of each prompt's last token and of every drawn token [prompts * siblings, T], as
    generated.
    """
    longest = max(len(prompt) for prompt in prompts) + drawn.shape[1]
    tables, cache = rows_of(prompts, siblings, longest)
    new = [
        Prefix(tokens=prompt, cached=0, tables=table)
        for prompt, table in zip(prompts, tables, strict=True)
    ]
    first = step(*NOTHING, cache, EMPTY, new)
    rows = []
    table = torch.tensor([row for group in tables for row in group], dtype=torch.int32)
    starts = torch.tensor([len(prompt) for prompt in prompts for _ in range(siblings)])
    runs = torch.arange(0, len(table) + 1, siblings, dtype=torch.int32) if shared else None
    pages = (
        torch.tensor([len(prompt) // PAGE for prompt in prompts], dtype=torch.int32)
        if shared
        else None
    )
    for t in range(drawn.shape[1]):
        positions = starts + t
        layout = SimpleNamespace(
            positions=positions,
            longest=int(positions.max()) + 1,
            table=table,
            runs=None if runs is None else lambda: (runs, pages),
        )
        if together:
            rows.append(step(drawn[:, t], positions, cache, layout))
        else:
            single = []
            for i in range(len(table)):
                layout = SimpleNamespace(
                    positions=positions[i : i + 1],
                    longest=int(positions[i]) + 1,
                    table=table[i : i + 1],
                    runs=None,
                )
                single.append(step(drawn[i : i + 1, t], positions[i : i + 1], cache, layout))
            rows.append(torch.cat(single))
    return first.repeat_interleave(siblings, 0), torch.stack(rows, 1)


def expected(model, prompts, siblings, drawn):
    logits = []
    for i, row in enumerate(drawn):
        prompt = torch.from_numpy(prompts[i // siblings])
        logits.append(model(torch.cat([prompt, row])[None]).logits[0, len(prompt) - 1 :])
    return torch.stack(logits)


def drawing(model, lengths=(33, 16, 5), siblings=3, count=20):
    generator = torch.Generator().manual_seed(7)
    vocabulary = model.config.vocab_size
    prompts = [
        torch.randint(0, vocabulary, (length,), generator=generator).numpy() for length in lengths
    ]
    return (
        prompts,
        siblings,
        torch.randint(0, vocabulary, (len(lengths) * siblings, count), generator=generator),
    )


def assert_near(found, wanted, share=1e-5):
    assert (found - wanted).abs().max() < share * wanted.abs().max()


def test_prefixes_and_decoded_tokens_have_the_logits_of_the_model(model):
    assert reason_against(model) is None and supports(model)
    prompts, siblings, drawn = drawing(model)
    first, rest = generate(FusedStep(model), prompts, siblings, drawn)
    assert_near(torch.cat([first[:, None], rest], 1), expected(model, prompts, siblings, drawn))


def test_the_bits_of_a_row_depend_neither_on_other_rows_nor_on_sharing_nor_on_threads(model):
    prompts, siblings, drawn = drawing(model, count=5)
    step = FusedStep(model)
    first, rest = generate(step, prompts, siblings, drawn)
    for how in ({"shared": False}, {"shared": False, "together": False}):
        again, others = generate(step, prompts, siblings, drawn, **how)
        assert torch.equal(first, again) and torch.equal(rest, others)
    torch.set_num_threads(3)
    try:
        again, others = generate(step, prompts, siblings, drawn)
    finally:
        torch.set_num_threads(1)
    assert torch.equal(first, again) and torch.equal(rest, others)
    for i, prompt in enumerate(prompts):
        mine = slice(i * siblings, (i + 1) * siblings)
        again, others = generate(step, [prompt], siblings, drawn[mine])
        assert torch.equal(first[mine], again) and torch.equal(rest[mine], others)


def test_a_prefix_has_the_bits_of_its_tokens_decoded_one_by_one(model):
    prompts, _, _ = drawing(model, lengths=(100, 9), count=1)
    step = FusedStep(model)
    whole, _ = generate(step, prompts, 1, torch.zeros(2, 1, dtype=torch.int64))
    for prompt, logits in zip(prompts, whole, strict=True):
        _, one_by_one = generate(step, [prompt[:1]], 1, torch.from_numpy(prompt[1:])[None])
        assert torch.equal(one_by_one[0, -1], logits)


def test_prefixes_go_on_behind_cached_pages_beside_rows_that_decode(make_model):
    model = make_model("mistral", sliding_window=20)
    step = FusedStep(model)
    prompts, siblings, drawn = drawing(model, lengths=(40, 70), siblings=1, count=1)
    tables, cache = rows_of(prompts, 1, 80)
    cached = [
        Prefix(tokens=prompts[0], cached=0, tables=tables[0]),
        Prefix(tokens=prompts[1][:32], cached=0, tables=tables[1]),
    ]
    step(*NOTHING, cache, EMPTY, cached)
    layout = SimpleNamespace(
        positions=torch.tensor([40]),
        longest=41,
        table=torch.tensor(tables[0], dtype=torch.int32),
        runs=None,
    )
    found = step(
        drawn[0],
        layout.positions,
        cache,
        layout,
        [Prefix(tokens=prompts[1], cached=2, tables=tables[1])],
    )
    wanted = expected(model, prompts, siblings, drawn)
    assert_near(found, torch.stack([wanted[0, 1], wanted[1, 0]]))


def test_a_prefix_may_read_pages_that_an_earlier_one_computes_in_the_same_step(make_model):
    model = make_model()
    step = FusedStep(model)
    (whole, other), _, _ = drawing(model, lengths=(100, 30), siblings=1, count=1)
    (mine, theirs), cache = rows_of([whole, other], 1, 120)
    common, longer = mine[0][:4], mine[0][:4] + theirs[0][4:8]
    begun = Prefix(tokens=whole[:64], cached=0, tables=[common])
    between = Prefix(tokens=other, cached=0, tables=[theirs[0][:2]])
    after = Prefix(tokens=whole, cached=4, tables=[longer])
    torch.set_num_threads(3)
    try:
        found = step(*NOTHING, cache, EMPTY, [begun, between, after])
    finally:
        torch.set_num_threads(1)
    for tokens, logits in zip((whole[:64], other, whole), found, strict=True):
        assert_near(logits, model(torch.from_numpy(tokens)[None]).logits[0, -1])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_prefix_that_begins_as_a_page_of_another_has_the_bits_of_one_computed_whole(
    model, threads
):
    step = FusedStep(model)
    (whole, other), _, _ = drawing(model, lengths=(300, 210), siblings=1, count=1)
    other[:190] = whole[:190]
    (mine, theirs), cache = rows_of([whole, other], 1, 300)
    first = Prefix(tokens=whole, cached=0, tables=mine)
    table = [*mine[0][:11], *theirs[0][11:]]
    second = Prefix(
        tokens=other, cached=11, tables=[table], near=mine[0][11], alike=190 - 11 * PAGE
    )
    assert second.new == 20
    torch.set_num_threads(threads)
    found = step(*NOTHING, cache, EMPTY, [first, second])
    torch.set_num_threads(1)
    alone = [
        step(
            *NOTHING,
            KVCache(20),
            EMPTY,
            [Prefix(tokens=prompt, cached=0, tables=[list(range(20))])],
        )
        for prompt in (whole, other)
    ]
    assert torch.equal(found, torch.cat(alone))


@pytest.mark.parametrize("tied", [False, True])
def test_new_weights_count_from_refresh_on_wherever_they_lie(make_model, tied):
    model, other = (make_model("qwen3", seed=seed, tie_word_embeddings=tied) for seed in (0, 1))
    step = FusedStep(model)
    prompts, siblings, drawn = drawing(model, count=3)
    for weight, new in zip(model.parameters(), other.parameters(), strict=True):
        weight.data = new.data.clone()
    step.refresh()
    first, rest = generate(step, prompts, siblings, drawn)
    assert_near(torch.cat([first[:, None], rest], 1), expected(other, prompts, siblings, drawn))


def rounded(matrix, products):
    """A linear of float64 whose input and weight are rounded to bfloat16 first."""

    def forward(x):
        products.append(matrix)
        weight = matrix.weight.bfloat16().double()
        bias = None if matrix.bias is None else matrix.bias.double()
        return torch.nn.functional.linear(x.bfloat16().double(), weight, bias).to(x.dtype)

    return forward


@pytest.mark.parametrize("family", ["llama", "qwen2", "llama, odd sizes"])
def test_products_in_bfloat16_round_weights_and_inputs_and_nothing_else(make_model, family):
    family, changes = MODELS[family]
    model = make_model(family, **changes)
    prompts, siblings, drawn = drawing(model, count=6)
    first, rest = generate(FusedStep(model, torch.bfloat16), prompts, siblings, drawn)
    products = []
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.forward = rounded(module, products)
    wanted = expected(model, prompts, siblings, drawn)
    found = torch.cat([first[:, None], rest], 1)
    assert products
    assert (found - wanted).pow(2).mean().sqrt() < 2e-3 * wanted.pow(2).mean().sqrt()


def test_a_bfloat16_model_keeps_a_bfloat16_cache_and_stays_near_its_float32_self(make_model):
    model = make_model("qwen2", hidden_size=64)
    for weight in model.parameters():
        weight.data = weight.bfloat16().float()
    prompts, siblings, drawn = drawing(model)
    wanted = expected(model, prompts, siblings, drawn)
    step = FusedStep(model.to(torch.bfloat16))
    first, rest = generate(step, prompts, siblings, drawn)
    assert first.dtype == torch.float32
    assert_near(torch.cat([first[:, None], rest], 1), wanted, share=0.05)
    again, others = generate(step, prompts, siblings, drawn, shared=False, together=False)
    assert torch.equal(first, again) and torch.equal(rest, others)


def test_models_of_another_make_are_not_supported(make_model):
    for family in ("gemma", "gemma2", "mixtral"):
        model = make_model(family)
        assert not supports(model) and "is not one of" in reason_against(model)
        with pytest.raises(ModelError, match=r"use the model's own forward"):
            FusedStep(model)
    assert "GELU" in reason_against(make_model(hidden_act="gelu"))
    changed = make_model()
    changed.model.layers[0].mlp.up_proj = torch.nn.Sequential(changed.model.layers[0].mlp.up_proj)
    assert "Sequential" in reason_against(changed)
    hooked = make_model()
    hooked.model.norm.register_forward_hook(lambda *_: None)
    assert "hook" in reason_against(hooked)
    assert "float32" in reason_against(make_model().double())
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    assert "rotary" in reason_against(make_model(rope_parameters=dynamic))


def test_tokens_and_positions_out_of_range_are_refused_before_anything_is_written(make_model):
    step = FusedStep(make_model())
    cache = KVCache(2)
    for token, position in ((-1, 0), (10**6, 0), (3, 16), (3, -1)):
        table = torch.zeros(1, 1, dtype=torch.int32)
        positions = torch.tensor([position])
        layout = SimpleNamespace(positions=positions, longest=40, table=table, runs=None)
        with pytest.raises(ModelError, match="row 0 is out of range"):
            step(torch.tensor([token]), positions, cache, layout)
    assert all(not side.any() for both in cache.layers for side in both)


def test_no_rows_have_no_logits(make_model):
    step = FusedStep(make_model())
    assert step(*NOTHING, KVCache(1), EMPTY).shape == (0, step.vocabulary)
