"""A model that is read by slices is the one that transformers loads: every tensor bit for bit, and
all that it says.
"""

import itertools
import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from dataflow.model import Model
from operators.models import loading
from operators.models.slices import boxes, held, overlap, runs_of

SIZES = {
    "vocab_size": 33,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}


FAMILIES = {
    "llama": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0}},
    ),
    "tied llama": ("LlamaConfig", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 8, "tie_word_embeddings": True}),
    "gemma2": ("Gemma2Config", {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2 moe": (
        "Qwen2MoeConfig",
        {
            "num_experts": 3,
            "moe_intermediate_size": 8,
            "num_experts_per_tok": 2,
            "shared_expert_intermediate_size": 24,
        },
    ),
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
}


HEADS = {
    "lm": "AutoModelForCausalLM",
    "value": "AutoModelForTokenClassification",
    "score": "AutoModelForSequenceClassification",
}


def written(
    folder: Path, family: str = "llama", head: str = "lm", dtype: str = "float32", **options
) -> Path:
    """A folder with a model of random weights; every tensor differs from what it is at first."""
    kind, extra = FAMILIES[family]
    config = getattr(transformers, kind)(**{**SIZES, **extra})
    config.num_labels = 1
    torch.manual_seed(5)
    module = getattr(transformers, HEADS[head]).from_config(config)
    with torch.no_grad():
        for weight in module.parameters():
            weight.add_(torch.randn(weight.shape) * 0.01)
    module.to(getattr(torch, dtype)).save_pretrained(folder, **options)
    return folder


def same(model: Model, **options) -> None:
    """Read by slices, and as transformers does: the same."""
    assert loading.outlined(model, **options) is not None
    found = loading.load_model(model, **options)
    wanted = loading._loaded_at_once(model, options.get("dtype"), options.get("attention"))
    assert type(found) is type(wanted) and not found.training
    for tensors in ("named_parameters", "named_buffers"):
        of_found, of_wanted = dict(getattr(found, tensors)()), dict(getattr(wanted, tensors)())
        assert list(of_found) == list(of_wanted)
        for name, tensor in of_wanted.items():
            assert (of_found[name].dtype, of_found[name].device) == (tensor.dtype, tensor.device), (
                name
            )
            assert torch.equal(of_found[name], tensor), name
            assert of_found[name].requires_grad == tensor.requires_grad, name
    assert {**found.config.to_dict()} == {**wanted.config.to_dict()}
    assert found.config._attn_implementation == wanted.config._attn_implementation
    if wanted.can_generate():
        assert found.generation_config.to_dict() == wanted.generation_config.to_dict()
    assert torch.equal(
        found(input_ids=torch.arange(9)[None]).logits,
        wanted(input_ids=torch.arange(9)[None]).logits,
    )
    for mine, theirs in zip(saved(found), saved(wanted), strict=True):
        assert mine == theirs


def saved(module):
    """Names and shapes that `save_pretrained` would write."""
    from transformers.core_model_loading import revert_weight_conversion

    return sorted(
        (name, tensor.shape)
        for name, tensor in revert_weight_conversion(module, module.state_dict()).items()
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_read_as_transformers_does(family, tmp_path):
    same(Model(str(written(tmp_path, family))))


@pytest.mark.parametrize(
    ("stored", "dtype"), [("bfloat16", "float32"), ("float32", "bfloat16"), ("bfloat16", None)]
)
def test_weights_are_cast_as_transformers_does(stored, dtype, tmp_path):
    same(Model(str(written(tmp_path, "qwen3", dtype=stored)), dtype="bfloat16"), dtype=dtype)


def test_a_folder_of_many_files_is_read_as_transformers_does(tmp_path):
    folder = written(tmp_path, "mixtral", max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 5
    same(Model(str(folder)), attention="eager")


@pytest.mark.parametrize("head", ["value", "score"])
def test_heads_are_read_as_transformers_does(head, tmp_path):
    same(Model(str(written(tmp_path, "qwen2", head)), head=head))


def test_a_head_that_is_not_there_begins_at_0(tmp_path):
    model = Model(str(written(tmp_path, "tied llama")), head="value")
    same(model)
    assert not loading.load_model(model).score.weight.any()


def test_names_without_the_prefix_of_the_base_model_are_known(tmp_path):
    folder = written(tmp_path, "tied llama")
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name.removeprefix("model."): tensor for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )
    same(Model(str(folder)))


def test_what_takes_more_than_putting_tensors_together_is_loaded_at_once(tmp_path):
    folder = written(tmp_path / "plain", "tied llama")
    tensors = load_file(folder / "model.safetensors")
    twice = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}
    save_file(twice, folder / "model.safetensors", metadata={"format": "pt"})
    assert loading.outlined(Model(str(folder))) is None
    assert torch.equal(
        loading.load_model(Model(str(folder))).lm_head.weight, twice["lm_head.weight"]
    )
    quantised = written(tmp_path / "quantised")
    config = json.loads((quantised / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (quantised / "config.json").write_text(json.dumps(config))
    assert loading.outlined(Model(str(quantised))) is None


def test_boxes_of_runs_cover_what_they_name():
    whole = torch.arange(4 * 6).view(4, 6)
    runs = [[(1, 2), (3, 4)], [(0, 2), (4, 5)]]
    part = torch.full((2, 3), -1)
    for first, at, size in boxes(runs):
        part[at[0] : at[0] + size[0], at[1] : at[1] + size[1]] = whole[
            first[0] : first[0] + size[0], first[1] : first[1] + size[1]
        ]
    assert part.tolist() == [[6, 7, 10], [18, 19, 22]]
    assert runs_of([2, 3, 4, 8, 9]) == [(2, 5), (8, 10)] and runs_of([]) == []
    assert held(whole) == [[(0, 4)], [(0, 6)]]


def test_overlaps_are_those_of_sets():
    for a, s, b, t in itertools.product(range(4), range(1, 4), range(4), range(1, 4)):
        common = sorted({*range(a, a + s)} & {*range(b, b + t)})
        found = overlap([a], [s], [b], [t])
        assert found == (([common[0]], [len(common)]) if common else None)
