"""What a plan counts of activations is what autograd saves."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dataflow.model import LoRA, Model
from dataflow.planning.memory_need import Passes
from dataflow.planning.model_size import ModelSize, measured
from operators.models import adapters
from operators.training.learner import policy
from operators.training.learner.memory import recompute_activations
from operators.training.learner.policy import Policy
from operators.training.learner.rows import pack

WIDTHS = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 320,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
RANK = 4


def module(family: str, layers: int, dtype: torch.dtype, lora: bool) -> Any:
    import transformers

    config = transformers.AutoConfig.for_model(
        family, **WIDTHS, num_hidden_layers=layers, pad_token_id=0
    )
    made = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    if lora:
        made.requires_grad_(False)
        made = adapters.add(made, LoRA(RANK, alpha=8, targets="all-linear"), Model("policy"), None)
    return made


def saved_bytes(made: Any, compute: torch.dtype | None, tokens: int) -> int:
    """Of distinct tensors that a forward pass over so many tokens saves, without parameters."""
    parameters = {weight.untyped_storage().data_ptr() for weight in made.parameters()}
    found: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    learner = Policy(made, compute=compute)
    ids = np.random.default_rng(0).integers(1, WIDTHS["vocab_size"], tokens)
    packed = pack(ids, np.arange(tokens) % 64 > 0, np.arange(0, tokens + 1, 64))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        alive = learner.logprobs(packed)
    del alive
    return sum(found.values())


def size_of(family: str, tmp_path: Path) -> ModelSize:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": family, **WIDTHS, "num_hidden_layers": 2})
    )
    size = measured(str(tmp_path))
    assert size is not None
    return size


@pytest.mark.parametrize(
    ("family", "dtype", "compute", "lora", "checkpointed"),
    [
        ("llama", torch.bfloat16, torch.bfloat16, False, False),
        ("qwen2", torch.float32, None, False, False),
        ("qwen3", torch.bfloat16, torch.bfloat16, False, False),
        ("llama", torch.bfloat16, torch.bfloat16, True, False),
        ("llama", torch.bfloat16, torch.bfloat16, False, True),
    ],
)
def test_a_layer_keeps_of_each_token_what_a_plan_counts(
    family: str,
    dtype: torch.dtype,
    compute: torch.dtype | None,
    lora: bool,
    checkpointed: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(policy, "MOST_LOGITS", 0)
    kept = {}
    for layers in (1, 2):
        for tokens in (128, 256):
            made = module(family, layers, dtype, lora)
            if checkpointed:
                recompute_activations(made)
            kept[layers, tokens] = saved_bytes(made, compute, tokens)
    each = (kept[2, 256] - kept[2, 128] - kept[1, 256] + kept[1, 128]) / 128
    size = size_of(family, tmp_path)
    passes = Passes(
        size=size,
        wide=compute is None,
        trains=not lora,
        rank=RANK if lora else 0,
    )
    counted = passes.of_input * size.width if checkpointed else passes.of_layer
    assert counted == pytest.approx(each, rel=0.03)
