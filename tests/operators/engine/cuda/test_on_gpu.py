"""The engine on a GPU draws what the model says: with Triton kernels, replayed steps, late flags,
compiled layers.
"""

import numpy as np
import pytest
import torch
import transformers
from rigs.operators import make_context

from bench.generator.cases import save_words
from dataflow import Model
from operators import Generator
from operators.engine.build import adapt, build_native
from operators.engine.cuda.fuse import fuse_layers
from operators.engine.cuda.graphs import Repeats
from operators.engine.decode import Engine
from operators.engine.interface import STOPPED, TOO_LONG, PromptStart
from operators.engine.sampler import Sampling

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

VOCABULARY = 300
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "eos_token_id": None,
    "bos_token_id": None,
}
FAMILIES = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 64}),
    "mistral": ("MistralConfig", {"sliding_window": 21}),
    "gemma2": ("Gemma2Config", {"head_dim": 32, "sliding_window": 24, "query_pre_attn_scalar": 32}),
}


@pytest.fixture
def gpu() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    return torch.device("cuda", 0)


def make_model(device, family="qwen3", dtype=torch.float32, seed=0):
    kind, extra = FAMILIES[family]
    config = getattr(transformers, kind)(**{**SIZES, **extra})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=dtype
    )
    return model.to(device).eval().requires_grad_(False)


def make_engine(model, *, kernel=True, **options):
    proof = adapt(model, "small")
    assert proof.kernel is not None
    settings = {
        "slots": 32,
        "context_tokens": 160,
        "sampling": Sampling(),
        "end_tokens": [],
        **options,
    }
    chosen = proof.kernel if kernel else None
    return Engine(
        model, kernel=chosen, token_bytes=proof.token_bytes, cache_bytes=1 << 28, **settings
    )


def starts(groups=4, size=4, limit=90):
    rng = np.random.default_rng(1)
    return [
        PromptStart(
            prompt=rng.integers(1, VOCABULARY, 5 + 13 * group),
            limit=limit + 3 * group,
            tickets=range(group * size, (group + 1) * size),
            seeds=range(100 + group * size, 100 + (group + 1) * size),
        )
        for group in range(groups)
    ]


def drive(engine, given, between=None):
    """By ticket: tokens, log-probabilities, versions, length of the prompt, reason."""
    rows, step = {}, 0
    waiting = list(given)
    while waiting or engine.live:
        if between is not None:
            between(step)
        for row in engine.step([waiting.pop(0)] if waiting else []):
            assert row.ticket not in rows
            rows[row.ticket] = (
                row.tokens.ids,
                row.tokens.logprobs,
                row.tokens.versions,
                row.start,
                row.reason,
            )
        step += 1
    return rows


@torch.no_grad()
def check_logprobs(models, rows, tolerance):
    """Each token's log-probability is that of a full forward pass by the model of its version."""
    for tokens, logprobs, versions, start, _ in rows.values():
        for version in np.unique(versions[start:]):
            model = models[int(version)]
            device = next(model.parameters()).device
            ids = torch.from_numpy(tokens.astype(np.int64))[None].to(device)
            exact = model(ids, use_cache=False).logits[0, start - 1 : -1].float().log_softmax(-1)
            exact = exact.gather(1, ids[0, start:, None])[:, 0].cpu().numpy()
            mine = versions[start:] == version
            assert np.abs(exact - logprobs[start:])[mine].max() < tolerance


def same(one, two, tolerance=0.0):
    assert one.keys() == two.keys()
    for ticket in one:
        for left, right in zip(one[ticket], two[ticket], strict=True):
            np.testing.assert_allclose(left, right, atol=tolerance, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_torchs_operators(gpu, family):
    found = [
        drive(
            make_engine(
                make_model(gpu, family),
                kernel=kernel,
                graphs=kernel,
                sampling=Sampling(temperature=0),
            ),
            starts(),
        )
        for kernel in (True, False)
    ]
    same(*found)


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_equal_a_full_forward_pass_in_float32(gpu, family):
    rows = drive(make_engine(make_model(gpu, family)), starts())
    check_logprobs({0: make_model(gpu, family)}, rows, 1e-4)


def test_logprobs_equal_a_full_forward_pass_in_bfloat16_up_to_its_rounding(gpu):
    rows = drive(make_engine(make_model(gpu, dtype=torch.bfloat16)), starts())
    check_logprobs({0: make_model(gpu, dtype=torch.bfloat16)}, rows, 0.25)


def test_replayed_steps_are_bit_for_bit_those_that_are_not(gpu):
    replayed = make_engine(make_model(gpu, dtype=torch.bfloat16))
    rows = drive(replayed, starts())
    assert replayed.graphed.replays.captured > 0 and replayed.graphed.replays.refused is None
    plain = make_engine(make_model(gpu, dtype=torch.bfloat16), graphs=Repeats())
    same(rows, drive(plain, starts()))


def test_flags_read_late_change_no_rollout(gpu):
    ends = list(range(7, VOCABULARY, 25))
    found = [
        drive(make_engine(make_model(gpu), lag=lag, end_tokens=ends), starts()) for lag in (0, 1)
    ]
    same(*found, tolerance=1e-4)
    assert {row[4] for row in found[0].values()} == {STOPPED, TOO_LONG}
    for tokens, *_, start, reason in found[1].values():
        assert not np.isin(tokens[start:-1], ends).any()
        assert np.isin(tokens[-1], ends) == (reason == STOPPED)


def test_a_step_in_which_nothing_starts_or_ends_waits_for_nothing(gpu):
    engine = make_engine(make_model(gpu, dtype=torch.bfloat16))
    engine.step(starts(limit=150))
    for _ in range(40):
        engine.step()
    try:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(20):
            assert not engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    engine.close()


def test_new_weights_in_their_old_places_are_those_that_replayed_steps_use(gpu):
    models = {version: make_model(gpu, seed=version) for version in (0, 1, 2)}
    engine = make_engine(make_model(gpu), on_update="recompute")

    def between(step):
        if step in (20, 45):
            version = {20: 1, 45: 2}[step]
            for name, tensor in models[version].named_parameters():
                engine.tensors[name].copy_(tensor)
            engine.adopted(version)

    rows = drive(engine, starts(), between)
    assert engine.graphed.replays.captured > 0
    assert any(set(versions[start:]) == {0, 1, 2} for _, _, versions, start, _ in rows.values())
    check_logprobs(models, rows, 1e-4)


def test_a_generator_that_compiles_draws_from_the_same_distribution(gpu, tmp_path):
    model = make_model(gpu)
    model.save_pretrained(tmp_path)
    save_words(tmp_path, VOCABULARY)
    declared = Generator(
        Model(str(tmp_path)), compile=True, slots=32, context_tokens=160, cache_bytes=1 << 28
    )
    engine = build_native(declared, make_context(node="generator", device="cuda:0")).engine
    rows = drive(engine, starts())
    assert engine.graphed.replays.captured > 0
    assert all(layer._compiled_call_impl is not None for layer in engine.model.model.layers)
    check_logprobs({0: model}, rows, 1e-4)


def test_compiled_layers_change_logprobs_by_rounding_only(gpu):
    model = make_model(gpu)
    engine = make_engine(model)
    assert fuse_layers(model) == SIZES["num_hidden_layers"]
    rows = drive(engine, starts())
    assert engine.graphed.replays.captured > 0
    check_logprobs({0: make_model(gpu)}, rows, 1e-4)
