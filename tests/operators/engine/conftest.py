"""Tiny random models of several families, a character tokenizer, and folders that hold both."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models

ALPHABET = "abcdefghijklmnopqrstuvwxyz= .\n"
PAD, EOS = 0, 1
VOCABULARY = len(ALPHABET) + 2

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
    "bos_token_id": None,
    "initializer_range": 0.2,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 8}),
    "mistral": ("MistralConfig", {"sliding_window": 7}),
    "gemma": ("GemmaConfig", {"head_dim": 8}),
    "gemma2": ("Gemma2Config", {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "decoder_sparse_step": 1,
        },
    ),
}

QUICK = {
    "torch": ("llama", "gemma2", "mixtral"),
    "c": ("llama", "mistral", "gemma", "gemma2", "mixtral"),
    "fused": ("llama", "qwen2", "qwen3", "mistral"),
}
"""By engine, the families of `make test`; `make test-all` has every pair. What C cannot fuse is
there with attention in C, what it can with all of it, and each of torch's own ways of attention
once."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where a test is of every family and every engine, most pairs are slow."""
    for item in items:
        chosen = item.callspec.params if hasattr(item, "callspec") else {}
        engine, family = chosen.get("make_engine"), chosen.get("family")
        if engine in QUICK and family in FAMILIES and family not in QUICK[engine]:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def make_model() -> Callable[..., Any]:
    """A freshly initialised causal LM of a family, float32, the same for the same seed."""

    def make(family: str = "llama", seed: int = 0, **changes: Any) -> Any:
        kind, extra = FAMILIES[family]
        config = getattr(transformers, kind)(**{**SIZES, **extra, **changes})
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        return model.eval().requires_grad_(False)

    return make


@pytest.fixture(scope="session")
def shared_model(make_model: Callable[..., Any]) -> Callable[[str, str], Any]:
    """A model of a family that no test changes, one for each use: an engine attends otherwise than
    its oracle.
    """
    return functools.cache(lambda family, use: make_model(family))


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """One token per character of ALPHABET."""
    vocabulary = {
        "<pad>": PAD,
        "<eos>": EOS,
        **{letter: i + 2 for i, letter in enumerate(ALPHABET)},
    }
    core = Tokenizer(models.BPE(vocabulary, merges=[]))
    core.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<eos>",
        clean_up_tokenization_spaces=False,
    )


@pytest.fixture(scope="session")
def folder(
    tmp_path_factory: pytest.TempPathFactory, make_model: Callable[..., Any], tokenizer: Any
) -> Path:
    """A Hugging Face folder with a tiny Llama and its tokenizer."""
    path = tmp_path_factory.mktemp("policy")
    make_model("llama").save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(params=["torch", "c", "fused"])
def make_engine(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """An Engine for a model: torch's operators, attention in C, or all of it in C where that is
    possible.
    """
    from operators.engine import build
    from operators.engine.decode import Engine
    from operators.engine.native import attention as native
    from operators.engine.sampler import Sampling

    if request.param != "torch" and native.kernel() is None:
        pytest.skip("no C compiler at hand")

    def make(model: Any, **knobs: Any) -> Any:
        if "proof" not in vars(model):  # a model is proved once
            model.proof = build.adapt(model, "tiny")
        found = model.proof
        assert found.kernel is not None or native.kernel() is None
        knobs = {
            "slots": 16,
            "context_tokens": 64,
            "end_tokens": [EOS],
            "sampling": Sampling(),
            **knobs,
        }
        kernel = found.kernel if request.param != "torch" else None
        fused = found.fused if request.param == "fused" else None
        return Engine(model, kernel=kernel, fused=fused, token_bytes=found.token_bytes, **knobs)

    return make
