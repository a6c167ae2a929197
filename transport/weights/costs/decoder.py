"""The tensors of a decoder by its config alone: names, shapes, and how tensor parallelism cuts
them; no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transport.weights.errors import LayoutMismatch
from transport.weights.layout.layout import Shape

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Values of a config's model_type whose tensors are known here."""
MIXTURES = ("qwen3_moe", "deepseek_v3")
"""Those whose dimensions are known, and not their tensors."""
STYLES = {
    **{f"layers.*.self_attn.{letter}_proj": "colwise" for letter in "qkv"},
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
    "embed_tokens": "embedding_rowwise",
    "lm_head": "colwise_gather_output",
}
"""Their tensor-parallel plan in transformers; norms stay whole."""


_NUMBER = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names of the number of experts in configs."""


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Layers whose MLP is a mixture: each token goes through some of its experts."""

    number: int
    """Of a layer."""
    per_token: int
    inner: int
    """Width of one."""
    shared: int = 0
    """Experts through which every token goes besides."""
    dense_layers: int = 0
    """Layers, from the first, that have one MLP of the decoder's own width instead."""


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): the cache holds one narrow
    vector per token.
    """

    queries: int
    """Rank of the queries' projection; 0: they have none."""
    keys: int
    """Rank of keys and values; what the cache holds, beside `rotated`."""
    plain: int
    """Of a head's width, without rotary position."""
    rotated: int
    """With it; shared by all heads among the keys."""
    values: int
    """Width of a head's value."""


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """A decoder's dimensions."""

    layers: int
    width: int
    inner: int
    """Width of the MLP."""
    heads: int
    kv_heads: int
    vocabulary: int
    head_width: int
    family: str = "llama"
    tied: bool = False
    """Whether the output layer is the embedding."""
    attention_bias: bool = False
    mlp_bias: bool = False
    experts: Experts | None = None
    latent: Latent | None = None

    @classmethod
    def of(cls, model: str) -> Decoder:
        """By a name of `NAMED`, or the path of a config.json or of the folder that has one.

        LayoutMismatch where there is none, or its family is not known.
        """
        if model in NAMED:
            return NAMED[model]
        path = Path(model)
        path = path / "config.json" if path.is_dir() else path
        try:
            return cls.from_config(json.loads(path.read_text("utf-8")))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise LayoutMismatch(
                f"a model's dimensions cannot be read; found {model!r}: {type(error).__name__}:"
                f" {error}; give one of {sorted(NAMED)}, or a folder with a config.json of a family"
                f" of {list(FAMILIES)}"
            ) from None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Decoder:
        """The decoder of a config.json's fields. ValueError, KeyError or TypeError where some are
        missing.
        """
        family = config["model_type"]
        if family not in FAMILIES + MIXTURES:
            raise ValueError(f"model_type {family!r}")
        heads, width = int(config["num_attention_heads"]), int(config["hidden_size"])
        return cls(
            layers=int(config["num_hidden_layers"]),
            width=width,
            inner=int(config["intermediate_size"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            vocabulary=int(config["vocab_size"]),
            head_width=int(config.get("head_dim") or width // heads),
            family=family,
            tied=bool(config.get("tie_word_embeddings", False)),
            attention_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
            experts=_experts(config),
            latent=_latent(config),
        )

    def tensors(self, dtype: str) -> dict[str, tuple[Shape, str]]:
        """Name -> (shape, dtype) of every parameter; a tied output layer is none.

        LayoutMismatch for mixtures of experts and latent attention: no run cuts them.
        """
        if self.experts or self.latent:
            raise LayoutMismatch(
                f"tensors of a {self.family} are not known by name; found"
                f" {'a mixture of experts' if self.experts else 'latent attention'}; take a family"
                f" of {list(FAMILIES)}"
            )
        queries, keys = self.heads * self.head_width, self.kv_heads * self.head_width
        layer: dict[str, Shape] = {
            "self_attn.q_proj.weight": (queries, self.width),
            "self_attn.k_proj.weight": (keys, self.width),
            "self_attn.v_proj.weight": (keys, self.width),
            "self_attn.o_proj.weight": (self.width, queries),
            "mlp.gate_proj.weight": (self.inner, self.width),
            "mlp.up_proj.weight": (self.inner, self.width),
            "mlp.down_proj.weight": (self.width, self.inner),
            "input_layernorm.weight": (self.width,),
            "post_attention_layernorm.weight": (self.width,),
        }
        if self.family == "qwen3":
            layer |= {f"self_attn.{letter}_norm.weight": (self.head_width,) for letter in "qk"}
        biased = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
        biased = biased if self.attention_bias or self.family == "qwen2" else []
        biased += ["self_attn.o_proj"] if self.attention_bias else []
        biased += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"] if self.mlp_bias else []
        layer |= {f"{name}.bias": layer[f"{name}.weight"][:1] for name in biased}
        shapes: dict[str, Shape] = {"model.embed_tokens.weight": (self.vocabulary, self.width)}
        for number in range(self.layers):
            shapes |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
        shapes["model.norm.weight"] = (self.width,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocabulary, self.width)
        return {name: (shape, dtype) for name, shape in shapes.items()}


def _experts(config: Mapping[str, Any]) -> Experts | None:
    """By the names that Qwen's and DeepSeek's configs have. ValueError where layers alternate,
    which is not counted.
    """
    number = int(next((config[key] for key in _NUMBER if config.get(key)), 0))
    if not number:
        return None
    if config.get("mlp_only_layers") or int(config.get("decoder_sparse_step") or 1) != 1:
        raise ValueError("layers with experts that alternate with layers without")
    return Experts(
        number=number,
        per_token=int(config["num_experts_per_tok"]),
        inner=int(config["moe_intermediate_size"]),
        shared=int(config.get("n_shared_experts") or 0),
        dense_layers=int(config.get("first_k_dense_replace") or 0),
    )


def _latent(config: Mapping[str, Any]) -> Latent | None:
    if not config.get("kv_lora_rank"):
        return None
    return Latent(
        queries=int(config.get("q_lora_rank") or 0),
        keys=int(config["kv_lora_rank"]),
        plain=int(config["qk_nope_head_dim"]),
        rotated=int(config["qk_rope_head_dim"]),
        values=int(config["v_head_dim"]),
    )


def _llama3(layers: int, width: int, inner: int) -> Decoder:
    heads = width // 128
    return Decoder(
        layers=layers,
        width=width,
        inner=inner,
        heads=heads,
        kv_heads=8,
        vocabulary=128256,
        head_width=128,
    )


NAMED = {
    "llama-8b": _llama3(32, 4096, 14336),
    "llama-70b": _llama3(80, 8192, 28672),
    "llama-405b": _llama3(126, 16384, 53248),
}
"""Llama 3's, by what the paper calls them."""
