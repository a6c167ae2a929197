"""What begins at some position: engine, trainer and forward operators are right on both sides of
it, or refuse it.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from dataflow.errors import GraphError
from dataflow.model import Model
from dataflow.runtime import Context
from operators.engine.build import adapt, context_tokens_of
from operators.engine.decode import Engine
from operators.engine.interface import PromptStart
from operators.engine.native import packing
from operators.engine.native.attention import library
from operators.engine.sampler import Sampling
from operators.engine.vllm.engine import build_vllm
from operators.generator import Generator
from operators.models.borders import late_borders, moved_borders
from operators.models.folders import ModelError
from operators.models.loading import load_model
from operators.training.learner.policy import Policy
from operators.training.learner.rows import pack

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 192,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


BORDER, MOST = 48, 96


"""Where something begins, and the longest rollout."""


ROLLOUTS = ((5, 4), (4, 50), (20, MOST - 20))


"""Tokens of prompts and completions: before the border, over it, and far beyond it."""


LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.6],
    "long_factor": [1.5, 3.0, 5.0, 9.0],
    "rope_theta": 1e4,
    "original_max_position_embeddings": BORDER,
}


DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}


SCALED = {
    "rope_type": "yarn",
    "factor": 4.0,
    "rope_theta": 1e4,
    "original_max_position_embeddings": BORDER,
    "llama_4_scaling_beta": 0.5,
}


MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": BORDER}


CHANGING = {
    "phi3": ("Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": BORDER}),
    "llama, longrope": ("Llama", {"rope_parameters": LONGROPE}),
    "llama, dynamic": ("Llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": BORDER}),
    "gemma3, in some layers": (
        "Gemma3Text",
        MIXED
        | {
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "rope_parameters": {
                "full_attention": LONGROPE,
                "sliding_attention": DYNAMIC | {"rope_type": "default"},
            },
        },
    ),
}


CHUNKED = {"head_dim": 8, "no_rope_layers": [1, 0], "moe_layers": [], "intermediate_size_mlp": 48}


STAYING = {
    "mistral": ("Mistral", {"sliding_window": BORDER}),
    "qwen2": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": BORDER, "max_window_layers": 1},
    ),
    "gemma2": ("Gemma2", {"sliding_window": BORDER, "head_dim": 8, "query_pre_attn_scalar": 8}),
    "olmo3": ("Olmo3", MIXED),
    "smollm3": ("SmolLM3", MIXED | {"no_rope_layers": [1, 0], "use_sliding_window": True}),
    "ministral3": (
        "Ministral3",
        {"rope_parameters": SCALED, "head_dim": 8, "sliding_window": None},
    ),
    "llama4": ("Llama4Text", CHUNKED | {"attention_chunk_size": BORDER, "floor_scale": BORDER}),
    "gpt-oss": (
        "GptOss",
        MIXED | {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
}


REFUSED = {"llama4": "attention_chunk_size 48, floor_scale 48 begins", "gpt-oss": "s_aux"}


"""What the engine says to those that it cannot decode."""


def saved(folder: Path, kind: str, config: dict[str, Any]) -> Path:
    torch.manual_seed(0)
    made = getattr(transformers, kind + "Config")(**{**SIZES, **config})
    transformers.AutoModelForCausalLM.from_config(made, dtype=torch.float32).eval().save_pretrained(
        folder
    )
    return folder


def plain(folder: Path, tokens: np.ndarray, most: int) -> torch.Tensor:
    """Log-probabilities of the tokens, by transformers alone, in a forward pass over `most`
    positions.
    """
    module = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    padded = torch.from_numpy(np.r_[tokens, np.zeros(max(0, most - len(tokens)), np.int64)])
    with torch.no_grad():
        logs = module(input_ids=padded[None]).logits[0].log_softmax(-1)
    return logs[np.arange(len(tokens) - 1), tokens[1:]]


def prompts() -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    return [draw.integers(2, SIZES["vocab_size"], size) for size, _ in ROLLOUTS]


def generated(module: Any, most: int = MOST) -> list[tuple[np.ndarray, np.ndarray]]:
    """Tokens of each rollout, and what the engine noted of those that it drew."""
    proof = adapt(module.requires_grad_(False), "tiny", most)
    engine = Engine(
        module,
        slots=4,
        context_tokens=most,
        sampling=Sampling(),
        end_tokens=[],
        kernel=proof.kernel,
        fused=proof.fused,
        token_bytes=proof.token_bytes,
    )
    starts = [
        PromptStart(prompt=prompt, limit=min(most, sum(sizes)), tickets=[i], seeds=[i])
        for i, (prompt, sizes) in enumerate(zip(prompts(), ROLLOUTS, strict=True))
    ]
    ended = engine.step(starts)
    while engine.live:
        ended += engine.step()
    rows = sorted(ended, key=lambda row: row.ticket)
    return [(row.tokens.ids.astype(np.int64), row.tokens.logprobs[row.start :]) for row in rows]


def trained(module: Any, rollouts: list[np.ndarray]) -> list[torch.Tensor]:
    """What the trainer computes of them in one micro-batch."""
    offsets = np.r_[0, np.cumsum([len(tokens) for tokens in rollouts])]
    tree = pack(np.concatenate(rollouts), np.ones(offsets[-1], bool), offsets)
    with torch.no_grad():
        found = Policy(module).logprobs(tree)[0]
    return [found[torch.from_numpy(tree.row_T == row)] for row in range(len(rollouts))]


@pytest.mark.parametrize("kind", CHANGING)
def test_a_rope_that_changes_with_length_is_that_of_the_longest_sequence_for_every_rollout(
    kind, tmp_path
):
    folder = saved(tmp_path, *CHANGING[kind])
    model = Model(str(folder), context_tokens=MOST)
    rollouts = generated(load_model(model))
    for (tokens, noted), found in zip(
        rollouts, trained(load_model(model), [t for t, _ in rollouts]), strict=True
    ):
        wanted = plain(folder, tokens, MOST)
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)
        np.testing.assert_allclose(noted, wanted[-len(noted) :], atol=1e-4)
    assert (
        plain(folder, rollouts[0][0], 0) - plain(folder, rollouts[0][0], MOST)
    ).abs().max() > 0.1


@pytest.mark.parametrize("kind", CHANGING)
def test_below_the_border_such_a_rope_is_that_of_short_sequences(kind, tmp_path):
    folder = saved(tmp_path, *CHANGING[kind])
    rollouts = generated(load_model(Model(str(folder), context_tokens=BORDER)), BORDER)
    for tokens, noted in rollouts:
        np.testing.assert_allclose(noted, plain(folder, tokens, 0)[-len(noted) :], atol=1e-4)


@pytest.mark.parametrize("kind", sorted(CHANGING.keys() - {"llama, dynamic"}))
def test_a_rope_that_changes_below_the_models_length_needs_to_be_told_how_long_rollouts_are(
    kind, tmp_path
):
    folder = saved(tmp_path, *CHANGING[kind])
    with pytest.raises(
        ModelError, match=r"longrope.*up to 192 tokens.*Model\(\.\.\., context_tokens=N\)"
    ):
        load_model(Model(str(folder)))
    raw = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    for use in (Policy, lambda module: adapt(module, "raw")):
        with pytest.raises(ModelError, match="context_tokens=N"):
            use(raw)


def test_a_rope_that_cannot_keep_to_one_set_of_factors_is_refused(tmp_path):
    scales = LONGROPE | {"short_mscale": 1.1, "long_mscale": 1.3}
    folder = saved(
        tmp_path,
        "Phimoe",
        {"rope_parameters": scales, "num_local_experts": 2, "num_experts_per_tok": 1},
    )
    with pytest.raises(ModelError, match="PhimoeRotaryEmbedding cannot keep to one set"):
        load_model(Model(str(folder), context_tokens=MOST))
    load_model(Model(str(folder), context_tokens=BORDER))


def test_no_rollout_is_longer_than_a_model_without_rope_has_positions_for():
    config = transformers.GPT2Config(n_positions=BORDER)
    assert context_tokens_of(Generator(Model("gpt2"), context_tokens=BORDER), config) == BORDER
    for generator in (
        Generator(Model("gpt2"), context_tokens=MOST),
        Generator(Model("gpt2", context_tokens=MOST)),
    ):
        with pytest.raises(ModelError, match="each of 48 positions.*context_tokens=96"):
            context_tokens_of(generator, config)


def test_no_operator_takes_longer_rollouts_than_the_rope_was_settled_for(tmp_path):
    folder = saved(tmp_path, *CHANGING["llama, dynamic"])
    config = transformers.AutoConfig.from_pretrained(folder)
    assert context_tokens_of(Generator(Model(str(folder))), config) == BORDER
    assert context_tokens_of(Generator(Model(str(folder), context_tokens=MOST)), config) == MOST
    for most in (None, MOST):
        generator = Generator(Model(str(folder), context_tokens=most), context_tokens=MOST + 1)
        with pytest.raises(ModelError, match="context_tokens=97"):
            context_tokens_of(generator, config)
    with pytest.raises(GraphError, match="context_tokens"):
        Model("policy", context_tokens=1)
    with pytest.raises(ModelError, match=r"dynamic.*vLLM chooses by a rule of its own"):
        build_vllm(Generator(Model(str(folder)), engine="vllm"), Context(node="generator"))


@pytest.mark.parametrize("kind", STAYING)
def test_rollouts_on_both_sides_of_a_border_are_those_of_the_plain_forward_or_refused(
    kind, tmp_path
):
    folder = saved(tmp_path, *STAYING[kind])
    model = Model(str(folder))
    if kind in REFUSED:
        with pytest.raises(ModelError, match=REFUSED[kind]):
            generated(load_model(model))
        rollouts = [
            (np.resize(prompt, sum(sizes)), [])
            for prompt, sizes in zip(prompts(), ROLLOUTS, strict=True)
        ]
    else:
        rollouts = generated(load_model(model))
    for (tokens, noted), found in zip(
        rollouts, trained(load_model(model), [t for t, _ in rollouts]), strict=True
    ):
        wanted = plain(folder, tokens, 0)
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)
        np.testing.assert_allclose(noted, wanted[len(wanted) - len(noted) :], atol=1e-4)


def test_what_the_engine_cannot_do_beyond_a_border_it_does_before_it(tmp_path):
    folder = saved(tmp_path, *STAYING["llama4"])
    for tokens, noted in generated(load_model(Model(str(folder))), BORDER - 1):
        np.testing.assert_allclose(noted, plain(folder, tokens, 0)[-len(noted) :], atol=1e-4)


@pytest.mark.skipif(library() is None, reason="no C compiler at hand")
def test_a_fused_step_that_is_wrong_beyond_a_border_is_not_taken(tmp_path, monkeypatch):
    model = Model(str(saved(tmp_path, *STAYING["mistral"])))
    assert adapt(load_model(model), "tiny").fused is not None
    monkeypatch.setattr(packing, "window_of", lambda module, layer: 0)
    assert adapt(load_model(model), "tiny").fused is None


def test_borders_are_moved_for_a_proof_alone(tmp_path):
    module: Any = load_model(Model(str(saved(tmp_path, *STAYING["olmo3"]))))
    windows = [layer.self_attn.sliding_window for layer in module.model.layers]
    assert windows == [BORDER, None] and late_borders(module) == {"sliding_window": BORDER}
    assert late_borders(module, BORDER - 1) == {}
    with pytest.raises(KeyboardInterrupt), moved_borders(module, ["sliding_window"]):
        assert module.config.sliding_window == module.model.layers[0].self_attn.sliding_window == 3
        raise KeyboardInterrupt
    Policy(module)
    assert module.config.sliding_window == BORDER
    assert [layer.self_attn.sliding_window for layer in module.model.layers] == windows


def test_a_model_whose_numbers_depend_on_what_stands_beside_is_not_trained():
    config = transformers.BertConfig(**{**SIZES, "is_decoder": False})
    with pytest.raises(ModelError, match="stands behind or beside it"):
        Policy(transformers.BertLMHeadModel(config).eval())


def test_a_model_that_gives_other_rows_of_logits_than_were_asked_for_is_neither_decoded_nor_packed(
    tmp_path,
):
    folder = saved(tmp_path, "Llama", {})

    def careless() -> Any:
        module: Any = load_model(Model(str(folder)))
        forward = module.forward
        module.forward = lambda logits_to_keep=0, **given: forward(**given)
        return module

    with pytest.raises(ModelError, match="logits_to_keep"):
        adapt(careless(), "careless")
    assert not Policy(careless()).packs
