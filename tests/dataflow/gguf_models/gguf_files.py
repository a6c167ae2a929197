"""Small models as GGUF files, written from modules of transformers as llama.cpp's converter writes
them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

WIDTH, INNER, HEADS, KV_HEADS, HEAD_DIM, LAYERS, CONTEXT = 64, 96, 4, 2, 16, 2, 128
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("Ġ a", "i n", "Ġ Ġ", "1 2", "ĠĠ ĠĠ", "Ġ 3", "t h", "th in", "Ġa in")
NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
}


def tokens() -> list[str]:
    """Special ones, the bytes, and what merges make."""
    from tokenizers.pre_tokenizers import ByteLevel

    return [*SPECIAL, *sorted(ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]


def tiny_module(family: str, *, tied: bool = True, **more: Any) -> Any:
    """A model of transformers with random weights."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        family,
        vocab_size=len(tokens()),
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
        **{"rope_parameters": {"rope_type": "default", "rope_theta": 50_000.0}, **more},
    )
    module = transformers.AutoModelForCausalLM.from_config(config).eval()
    for name, weight in module.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(weight, 1.0 if "norm" in name else 0.0, 0.1)
    return module


def named(name: str) -> str:
    """A tensor's name in the file."""
    parts = name.split(".")
    layer = f"blk.{parts[2]}." if "layers" in parts else ""
    return f"{layer}{NAMES[parts[-2]]}.{parts[-1]}"


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a llama's queries or keys, as its files have them."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def tiny_gguf(
    path: Path,
    family: str = "llama",
    *,
    module: Any = None,
    kind: str = "F32",
    pre: str | None = "",
    model: str = "gpt2",
    template: str | None = TEMPLATE,
    words: Sequence[str] | None = None,
    merges: Sequence[str] = MERGES,
    said: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray | None] | None = None,
) -> Path:
    """Write one. kind: of matrices' numbers. said: further metadata; None for a key leaves it out.
    tensors: others, or None to leave one out.
    """
    module = tiny_module(family) if module is None else module
    words = tokens() if words is None else words
    pre = ("smollm" if family == "llama" else "qwen2") if pre == "" else pre
    writer = gguf.GGUFWriter(str(path), family)
    values: dict[str, Any] = {
        f"{family}.block_count": LAYERS,
        f"{family}.context_length": CONTEXT,
        f"{family}.embedding_length": WIDTH,
        f"{family}.feed_forward_length": INNER,
        f"{family}.attention.head_count": HEADS,
        f"{family}.attention.head_count_kv": KV_HEADS,
        f"{family}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{family}.rope.freq_base": 50_000.0,
        f"{family}.attention.key_length": HEAD_DIM,
        f"{family}.attention.value_length": HEAD_DIM,
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": list(words),
        "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(words) - len(SPECIAL)),
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": template,
        **(said or {}),
    }
    for key, value in values.items():
        if value is not None:
            kinds = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}
            getattr(writer, f"add_{kinds[type(value)]}")(key, value)
    found: dict[str, np.ndarray | None] = {}
    for name, weight in module.state_dict().items():
        if name == "lm_head.weight" and module.config.tie_word_embeddings:
            continue
        array = weight.float().numpy()
        if family == "llama" and named(name).split(".")[-2] in ("attn_q", "attn_k"):
            array = interleaved(array, HEADS if "attn_q" in named(name) else KV_HEADS)
        found[named(name)] = array
    for name, array in {**found, **(tensors or {})}.items():
        if array is None:
            continue
        of = gguf.GGMLQuantizationType[kind if array.ndim == 2 else "F32"]
        writer.add_tensor(name, gguf.quants.quantize(array, of), raw_dtype=of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
