"""Tiny models of transformers with a number per token or per text; imports torch."""

from typing import Any

import torch
import transformers

SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}


def classifier(family: str, kind: str, seed: int = 0, **changes: Any) -> Any:
    """`family`For`kind` with one label and random weights, float32, the same for the same seed."""
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, "num_labels": 1, **changes})
    return getattr(transformers, f"{family}For{kind}")(config).eval()
