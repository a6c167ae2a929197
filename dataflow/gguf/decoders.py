"""What a GGUF file's metadata and tensors are as a decoder of transformers: config.json, and which
tensor is which.

Families: llama (with it Mistral and SmolLM2), qwen2, qwen3. Every key and tensor is known, or the
file is refused.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dataflow.gguf.content import GGUFContent, GGUFError, kinds_of_numbers

# A GGUF file's numbers as floats: what gguf turns back, some rows at a time.

AT_ONCE_BYTES = 32 << 20
"""The most floats that are made at once."""
_AS_THEY_ARE = ("F32", "F16", "BF16")
"""Kinds of numbers that safetensors has too."""


def stored_as(kind: str) -> str:
    """How a folder holds numbers of this kind: as they are where it can, else as float32, which is
    what they mean.
    """
    return kind if kind in _AS_THEY_ARE else "F32"


@functools.cache
def is_read(kind: str) -> bool:
    """Whether the installed gguf turns numbers of this kind back."""
    import gguf

    size = next(size for name, _, size in kinds_of_numbers().values() if name == kind)
    try:
        gguf.quants.dequantize(np.zeros((1, size), np.uint8), gguf.GGMLQuantizationType[kind])
    except NotImplementedError:
        return False
    return True


def dequantized(content: GGUFContent, name: str) -> Any:
    """A small tensor, float32."""
    shape = content.tensors[name].shape
    return np.concatenate(list(rows_of(content, name))).reshape(shape)


def rows_of(content: GGUFContent, name: str, *, heads: int = 0) -> Iterator[Any]:
    """A tensor, float32 [rows, columns], some rows after the other; one of one dimension as one
    row.

    heads: above 0, its rows are those of so many heads, in each the two of a rotated pair side by
    side: first all first ones come, then all second ones, as transformers has them.
    """
    import gguf

    tensor = content.tensors[name]
    rows = math.prod(tensor.shape[:-1])
    stored = np.memmap(
        content.path, np.uint8, "r", tensor.begin, (rows, tensor.nbytes // max(1, rows))
    )
    order = np.arange(rows)
    if heads:
        order = order.reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)
    step = max(1, AT_ONCE_BYTES // (4 * tensor.shape[-1]))
    for first in range(0, rows, step):
        chosen = np.asarray(stored[order[first : first + step]])
        yield gguf.quants.dequantize(chosen, gguf.GGMLQuantizationType[tensor.kind])


# The decoder that metadata and tensors are.

_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""By a file's general.architecture, which is transformers' model_type too."""
_INTERLEAVED = ("llama",)
"""Families whose files hold rows of queries and keys so that the two of a rotated pair stand side
by side."""
_COUNTS = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
}
_EPSILON, _KV_HEADS = "attention.layer_norm_rms_epsilon", "attention.head_count_kv"
_WIDTHS = ("attention.key_length", "attention.value_length", "rope.dimension_count")
_BASE, _SCALING, _FACTOR = "rope.freq_base", "rope.scaling.type", "rope.scaling.factor"
_KNOWN = {
    *_COUNTS.values(),
    _EPSILON,
    _KV_HEADS,
    *_WIDTHS,
    _BASE,
    _SCALING,
    _FACTOR,
    "vocab_size",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
}
_WITHOUT_EFFECT = {"expert_count": 0, "expert_used_count": 0, "attention.causal": True}
"""Further keys, each with the only value that is supported."""
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""How Llama 3.1 and 3.2 stretch their rope, but for the factor: files hold what comes of it
alone."""
_ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True)
class PlacedTensor:
    """One tensor of a model's folder, and where in the file it is."""

    name: str
    """As transformers calls it."""
    source: str
    """In the file."""
    shape: tuple[int, ...]
    dtype: str
    """In the folder, as safetensors calls it."""
    heads: int = 0
    """Above 0: its rows are those of so many heads, each with the two of a rotated pair side by
    side."""


@dataclass(frozen=True)
class DecoderInFile:
    """A model, as its file describes it."""

    config: Mapping[str, Any]
    """Of config.json."""
    tensors: Sequence[PlacedTensor]


def decoder_in(content: GGUFContent) -> DecoderInFile:
    """The model in a file. GGUFError names anything in it that is not known here."""
    family = content.need("general.architecture", str)
    if family not in _CLASSES:
        raise GGUFError(
            f"{content.path.name} holds a model of architecture '{family}', which is not converted;"
            f" only {', '.join(_CLASSES)} are; give its folder of safetensors instead"
        )
    own = {
        key.removeprefix(f"{family}."): value
        for key, value in content.metadata.items()
        if key.startswith(f"{family}.")
    }
    odd = [
        key for key, value in own.items() if key not in _KNOWN and _WITHOUT_EFFECT.get(key) != value
    ]
    if odd:
        raise GGUFError(
            f"{content.path.name} says {family}.{odd[0]}={own[odd[0]]!r:.60}, and what that changes"
            " in the model is not known here; give its folder of safetensors instead"
        )
    numbers = {name: _count(content, f"{family}.{key}") for name, key in _COUNTS.items()}
    heads = numbers["num_attention_heads"]
    numbers["num_key_value_heads"] = (
        _count(content, f"{family}.{_KV_HEADS}") if _KV_HEADS in own else heads
    )
    widths = {own[key] for key in _WIDTHS if key in own} or {numbers["hidden_size"] // heads}
    if len(widths) != 1 or heads % numbers["num_key_value_heads"]:
        raise GGUFError(
            f"{content.path.name} has heads that no decoder here has:"
            f" { ({key: own.get(key) for key in _WIDTHS}) }, {heads} heads,"
            f" {numbers['num_key_value_heads']} of keys and values; give its folder of safetensors"
            " instead"
        )
    vocabulary = len(content.need("tokenizer.ggml.tokens", list))
    if own.get("vocab_size", vocabulary) != vocabulary:
        raise GGUFError(
            f"{content.path.name} is damaged: vocab_size is {own['vocab_size']}, but it has"
            f" {vocabulary} tokens; copy it again"
        )
    width = int(widths.pop())
    shapes = _shapes(family, numbers, width, vocabulary)
    tied = "output.weight" not in content.tensors
    if tied:
        del shapes["output.weight"]
    tensors = list(
        _placed(
            content, shapes, heads if family in _INTERLEAVED else 0, numbers["num_key_value_heads"]
        )
    )
    config = {
        "architectures": [_CLASSES[family]],
        "model_type": family,
        "vocab_size": vocabulary,
        **numbers,
        "head_dim": width,
        "hidden_act": "silu",
        "rms_norm_eps": shortest(content.need(f"{family}.{_EPSILON}", float)),
        "rope_parameters": _rope(content, own, width),
        "tie_word_embeddings": tied,
        "dtype": {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[_widest(tensors)],
        **_special(content),
    }
    if family == "llama":
        config |= {"attention_bias": False, "mlp_bias": False}
    if family == "qwen3":
        config["attention_bias"] = False
    return DecoderInFile(config, tensors)


def shortest(number: float) -> float:
    """A number of the file, which has the precision of float32, in the fewest digits that give it
    again.
    """
    return float(str(np.float32(number)))


def _count(content: GGUFContent, key: str) -> int:
    value: int = content.need(key, int)
    if value < 1:
        raise GGUFError(f"{content.path.name} is damaged: {key} is {value}; copy it again")
    return value


def _shapes(
    family: str, numbers: Mapping[str, int], width: int, vocabulary: int
) -> dict[str, tuple[str, Any]]:
    """By the name in a file, transformers' name of a tensor and its shape."""
    hidden, inner = numbers["hidden_size"], numbers["intermediate_size"]
    queries, keys = numbers["num_attention_heads"] * width, numbers["num_key_value_heads"] * width
    layer: dict[str, tuple[str, Any]] = {
        "attn_norm": ("input_layernorm", (hidden,)),
        "ffn_norm": ("post_attention_layernorm", (hidden,)),
        "attn_q": ("self_attn.q_proj", (queries, hidden)),
        "attn_k": ("self_attn.k_proj", (keys, hidden)),
        "attn_v": ("self_attn.v_proj", (keys, hidden)),
        "attn_output": ("self_attn.o_proj", (hidden, queries)),
        "ffn_gate": ("mlp.gate_proj", (inner, hidden)),
        "ffn_up": ("mlp.up_proj", (inner, hidden)),
        "ffn_down": ("mlp.down_proj", (hidden, inner)),
    }
    if family == "qwen3":
        layer |= {
            "attn_q_norm": ("self_attn.q_norm", (width,)),
            "attn_k_norm": ("self_attn.k_norm", (width,)),
        }
    ends = {
        "token_embd": ("model.embed_tokens", (vocabulary, hidden)),
        "output_norm": ("model.norm", (hidden,)),
        "output": ("lm_head", (vocabulary, hidden)),
    }
    shapes = {
        f"{name}.weight": (f"{theirs}.weight", shape) for name, (theirs, shape) in ends.items()
    }
    for number in range(numbers["num_hidden_layers"]):
        for name, (theirs, shape) in layer.items():
            shapes[f"blk.{number}.{name}.weight"] = f"model.layers.{number}.{theirs}.weight", shape
            if family == "qwen2" and name in ("attn_q", "attn_k", "attn_v"):
                shapes[f"blk.{number}.{name}.bias"] = (
                    f"model.layers.{number}.{theirs}.bias",
                    shape[:1],
                )
    return shapes


def _placed(
    content: GGUFContent, shapes: Mapping[str, tuple[str, Any]], heads: int, key_heads: int
) -> Iterator[PlacedTensor]:
    """Each tensor of the model; GGUFError unless the file has these, in these shapes, and no
    other.
    """
    missing, extra = (
        shapes.keys() - content.tensors.keys(),
        content.tensors.keys() - shapes.keys() - {_ROPE_FACTORS},
    )
    if missing or extra:
        raise GGUFError(
            f"{content.path.name} holds other tensors than a model of its kind has:"
            f" {sorted(missing)[:3]} are missing, {sorted(extra)[:3]} are not known; give its"
            " folder of safetensors instead"
        )
    for name, (theirs, shape) in shapes.items():
        tensor = content.tensors[name]
        if tensor.shape != shape:
            raise GGUFError(
                f"{content.path.name} is damaged: '{name}' is {list(tensor.shape)}, where"
                f" {list(shape)} has to stand; copy it again"
            )
        if not is_read(tensor.kind):
            raise GGUFError(
                f"{content.path.name} holds '{name}' in {tensor.kind}, which the package gguf"
                " cannot"
                " turn back into numbers; give a file in another quantisation, as Q8_0"
            )
        permuted_heads = {"attn_q": heads, "attn_k": heads and key_heads}.get(
            name.split(".")[-2], 0
        )
        yield PlacedTensor(theirs, name, shape, stored_as(tensor.kind), permuted_heads)


def _widest(tensors: Sequence[PlacedTensor]) -> str:
    """The type of the largest tensors; transformers wants one type of a model."""
    return max(tensors, key=lambda tensor: math.prod(tensor.shape)).dtype


def _rope(content: GGUFContent, own: Mapping[str, Any], width: int) -> dict[str, Any]:
    base = shortest(own.get(_BASE, 10_000.0))
    rope: dict[str, Any] = {"rope_theta": base, "rope_type": "default"}
    factor = shortest(own.get(_FACTOR, 0.0))
    kind = own.get(_SCALING, "linear" if factor > 0 else "none")
    if kind == "linear" and factor not in (0.0, 1.0):
        rope |= {"rope_type": "linear", "factor": factor}
    elif kind not in ("none", "linear"):
        raise GGUFError(
            f"{content.path.name} stretches its rope by '{kind}', which is not converted; give "
            "its folder of safetensors instead"
        )
    if _ROPE_FACTORS not in content.tensors:
        return rope
    factors = dequantized(content, _ROPE_FACTORS)
    stretched = {**rope, "rope_type": "llama3", "factor": float(factors.max()), **_LLAMA3}
    if rope["rope_type"] != "default" or not _makes(stretched, factors, width):
        raise GGUFError(
            f"{content.path.name} has a tensor {_ROPE_FACTORS} that is not how Llama 3 stretches"
            " its rope, and what else it may be is not known here; give its folder of safetensors"
            " instead"
        )
    return stretched


def _makes(rope: Mapping[str, Any], factors: Any, width: int) -> bool:
    """Whether a rope of the kind llama3 divides its frequencies by these factors."""
    if factors.shape != (width // 2,):
        return False
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    frequencies = 1.0 / rope["rope_theta"] ** (np.arange(0, width, 2) / width)
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return bool(np.allclose(1.0 / ((1.0 - smooth) / factor + smooth), factors, rtol=1e-4, atol=0.0))


def _special(content: GGUFContent) -> dict[str, int]:
    """Ids of special tokens, which a config has too."""
    keys = {
        "bos_token_id": "bos_token_id",
        "eos_token_id": "eos_token_id",
        "pad_token_id": "padding_token_id",
    }
    metadata = content.metadata
    return {
        name: metadata[f"tokenizer.ggml.{key}"]
        for name, key in keys.items()
        if f"tokenizer.ggml.{key}" in metadata
    }
