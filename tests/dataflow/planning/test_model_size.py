"""How large a model is, with adapters and without, against what is really made of it."""

from pathlib import Path

import pytest

from dataflow import Graph, Model
from dataflow.model import LoRA
from dataflow.planning.model_size import measure_models
from operators import Generator, Prompts
from operators.models.loading import load_adapted, load_merged


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "down_proj")])
def test_sizes_with_adapters_are_those_of_what_is_made(
    policy: Path, targets: str | tuple[str, ...]
) -> None:
    model = Model(str(policy), lora=LoRA(4, targets=targets))
    g = Graph("g")
    Generator(model)(g.source(Prompts([{"prompt": "a"}])))
    (size,) = measure_models(g).values()
    module = load_adapted(model)
    plain, merged = load_merged(model)
    assert merged is not None
    trained = sum(weight.nbytes for weight in module.parameters() if weight.requires_grad)
    whole = sum(weight.nbytes for weight in plain.parameters())
    assert size.sent_bytes("float32", model.lora) == trained
    assert size.sent_bytes("bfloat16") * 2 == whole
    assert size.memory_bytes("float32", True, model.lora) == whole + 4 * trained
    assert size.memory_bytes("float32", False, model.lora) == whole + merged.kept_bytes + trained
