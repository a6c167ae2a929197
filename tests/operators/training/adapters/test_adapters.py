"""Adapters: which layers have them, what is trained and saved, and that a reader's merged weights
are the same.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rigs.adapter_files import save
from safetensors.torch import load_file
from trainer_rig import VOCABULARY, gradient, group, rows_of, tiny_llama

from dataflow import GraphError, Model
from dataflow.model import LoRA
from dataflow.model_files import start_fault
from operators import Generator, Trainer
from operators.models.adapters import Merged, adapted_layers, is_adapted, load, tensor_names
from operators.models.folders import ModelError
from operators.models.loading import (
    load_adapted,
    load_merged,
    load_model,
    load_tokenizer,
    outlined_to_train,
)
from operators.training.learner.build import forward_of, learner_of, state_tensors
from operators.warm_start.train import character_tokenizer

pytestmark = pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing.:FutureWarning",
    "ignore:Model has .tie_word_embeddings=True.:UserWarning",
    "ignore:Setting .save_embedding_layers.:UserWarning",
)


COMMIT = "0123456789abcdef" * 2 + "01234567"


RANK = 4


TOKENS = torch.arange(2, 20).reshape(2, 9)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    tiny_llama().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def declared(base: Path, **knobs: Any) -> Model:
    return Model(str(base), lora=LoRA(RANK, alpha=8, **knobs))


def moved(module: Any, by: float = 0.1) -> Any:
    """The module with all its adapters somewhere else."""
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in trained(module).values():
            weight += by * torch.randn(weight.shape, generator=draw)
    return module


def trained(module: Any) -> dict[str, torch.Tensor]:
    return {name: weight for name, weight in module.named_parameters() if weight.requires_grad}


def logprobs(module: Any) -> torch.Tensor:
    with torch.no_grad():
        return module(input_ids=TOKENS).logits.float().log_softmax(-1)


def sent(module: Any, merged: Merged) -> None:
    """What the weight plane does."""
    for name, weight in trained(module).items():
        merged.tensors[name].copy_(weight.detach())
    merged.adopted()


# What has adapters


def test_untrained_adapters_change_nothing_and_every_linear_layer_but_the_head_has_them(
    base: Path,
) -> None:
    module = load_adapted(declared(base))
    assert torch.equal(logprobs(module), logprobs(load_model(Model(str(base)))))
    widths = {
        "q": 32 + 32,
        "k": 32 + 16,
        "v": 32 + 16,
        "o": 32 + 32,
        "gate": 32 + 48,
        "up": 32 + 48,
        "down": 48 + 32,
    }
    assert sum(weight.numel() for weight in trained(module).values()) == 2 * RANK * sum(
        widths.values()
    )
    assert not any("lm_head" in name or "embed" in name for name in trained(module))


def test_the_seed_alone_decides_the_first_adapters(base: Path) -> None:
    first = trained(load_adapted(declared(base)))
    torch.manual_seed(99)
    again, other = (
        trained(load_adapted(declared(base))),
        trained(load_adapted(declared(base, seed=1))),
    )
    drawn = torch.rand(1)
    torch.manual_seed(99)
    assert torch.equal(drawn, torch.rand(1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first if "lora_A" in name)


def test_layers_are_named_by_their_last_names(base: Path) -> None:
    found = list(
        adapted_layers(
            load_model(Model(str(base))), LoRA(RANK, alpha=8, targets=("q_proj", "down_proj"))
        )
    )
    assert [path.rpartition(".")[2] for path in found] == ["q_proj", "down_proj"] * 2
    assert set(trained(load_adapted(declared(base, targets=("q_proj", "down_proj"))))) == {
        name for path in found for name in tensor_names(path)
    }


@pytest.mark.parametrize(
    ("targets", "why"),
    [
        (("q_proj", "query"), r"\['query'\], but LlamaForCausalLM has no .* found \['down_proj'"),
        (("lm_head",), "output layer"),
    ],
)
def test_names_that_cannot_be_adapted_are_refused(
    base: Path, targets: tuple[str, ...], why: str
) -> None:
    with pytest.raises(ModelError, match=why):
        load_adapted(declared(base, targets=targets))


def test_base_weights_are_in_the_models_dtype_and_adapters_with_their_moments_in_float32(
    base: Path,
) -> None:
    model = Model(str(base), dtype="bfloat16", lora=LoRA(RANK))
    module = load_adapted(model)
    own = trained(module)
    assert {weight.dtype for weight in own.values()} == {torch.float32}
    rest = {weight.dtype for name, weight in module.named_parameters() if name not in own}
    assert rest == {torch.bfloat16}
    trainer = Trainer(model, lr=1e-2)
    learner = learner_of(trainer, forward_of(trainer, module), node="trainer")
    gradient(learner, rows_of(group(0), group(1)))
    state = state_tensors(learner.optimizer, learner.parameters)
    assert set(learner.parameters) == set(own)
    assert {name.rpartition("/")[0] for name in state} == set(own)
    assert {moment.dtype for moment in state.values()} == {torch.float32}


# Training


def test_a_step_changes_the_adapters_alone(base: Path) -> None:
    trainer = Trainer(declared(base), lr=1e-2)
    module = load_adapted(trainer.model)
    before = {name: weight.detach().clone() for name, weight in module.named_parameters()}
    learner = learner_of(trainer, forward_of(trainer, module), node="trainer")
    rows = rows_of(group(0, advantages=[1.0, -1.0, 0.5]), group(1))
    for _ in range(2):
        for part in learner.begin(rows, 0):
            learner.micro(part)
        learner.end(1e-2)
    changed = {
        name for name, weight in module.named_parameters() if not torch.equal(weight, before[name])
    }
    assert changed == set(trained(module))


def test_adapters_train_the_same_packed_and_padded(base: Path) -> None:
    trainer = Trainer(declared(base), lr=1e-2)
    found = []
    for packed in (True, False):
        learner = learner_of(
            trainer, forward_of(trainer, moved(load_adapted(trainer.model))), node="trainer"
        )
        assert learner.forward.packs
        learner.forward.packs = packed
        if not packed:
            learner.forward.module.set_attn_implementation("sdpa")
        found.append(gradient(learner, rows_of(group(0), group(1))))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-4, atol=1e-6)


# A reader's side


def test_merged_weights_give_the_adapted_models_logprobs_version_by_version(base: Path) -> None:
    module = load_adapted(declared(base))
    plain, merged = load_merged(declared(base))
    assert merged is not None and set(merged.tensors) == set(trained(module))
    for _ in range(3):
        sent(moved(module), merged)
        torch.testing.assert_close(logprobs(plain), logprobs(module), rtol=0, atol=2e-5)


def test_merging_leaves_no_trace_in_later_versions(base: Path) -> None:
    plain, merged = load_merged(Model(str(base), dtype="bfloat16", lora=LoRA(RANK)))
    assert merged is not None
    before = {name: weight.clone() for name, weight in plain.named_parameters()}
    draw = torch.Generator().manual_seed(3)
    for scale in (1e3, 1e-3, 0.0):
        for tensor in merged.tensors.values():
            tensor.copy_(scale * torch.randn(tensor.shape, generator=draw))
        merged.adopted()
        same = [
            torch.equal(weight, before[name])
            for name, weight in plain.named_parameters()
            if "proj" in name
        ]
        assert all(same) if scale == 0.0 else not any(same)


def test_a_reader_keeps_the_adapted_layers_once_more(base: Path) -> None:
    plain, merged = load_merged(declared(base))
    assert merged is not None
    layers = [weight for name, weight in plain.named_parameters() if "proj" in name]
    assert merged.kept_bytes == sum(weight.nbytes for weight in layers)


def test_merged_bfloat16_weights_are_rounded_once(base: Path) -> None:
    plain, merged = load_merged(Model(str(base), dtype="bfloat16", lora=LoRA(RANK, alpha=4)))
    exact = load_model(Model(str(base)), dtype="bfloat16").double()
    assert merged is not None
    for tensor in merged.tensors.values():
        tensor.copy_(torch.randn(tensor.shape).bfloat16())
    merged.adopted()
    path = "model.layers.1.mlp.up_proj"
    a, b = (merged.tensors[name].double() for name in tensor_names(path))
    wanted = exact.get_submodule(path).weight + b @ a
    found = plain.get_submodule(path).weight.double()
    assert ((found - wanted).abs() <= wanted.abs() * 2**-8).all()


# Files


def test_peft_and_transformers_load_what_was_saved(base: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    module = moved(load_adapted(declared(base)))
    assert is_adapted(module) and not is_adapted(tiny_llama())
    (tmp_path / "saved").mkdir()
    save(tmp_path / "saved", module)
    by_peft = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base), tmp_path / "saved"
    )
    by_transformers = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    for loaded in (by_peft, by_transformers):
        assert torch.equal(logprobs(loaded), logprobs(module))
    assert len(load_file(tmp_path / "saved" / "adapter_model.safetensors")) == len(trained(module))


def test_a_saved_folder_is_a_source_for_the_trainer_and_for_readers(
    base: Path, tmp_path: Path
) -> None:
    module = moved(load_adapted(declared(base)))
    save(tmp_path, module)
    again = load_adapted(declared(tmp_path))
    assert torch.equal(logprobs(again), logprobs(module))
    assert trained(again).keys() == trained(module).keys()
    reader, merged = load_merged(declared(tmp_path))
    torch.testing.assert_close(logprobs(reader), logprobs(module), rtol=0, atol=1e-5)
    sent(moved(module), merged)  # type: ignore[arg-type]
    torch.testing.assert_close(logprobs(reader), logprobs(module), rtol=0, atol=1e-5)
    frozen, none = load_merged(Model(str(tmp_path)).frozen())
    assert none is None
    torch.testing.assert_close(logprobs(frozen), logprobs(again), rtol=0, atol=1e-5)


def test_adapters_of_another_shape_are_refused(base: Path, tmp_path: Path) -> None:
    save(tmp_path, load_adapted(declared(base)))
    other = load_adapted(Model(str(base), lora=LoRA(RANK + 1)))
    with pytest.raises(
        ModelError,
        match=r"do not fit the model: 28 tensors differ; found \[4, \d+\].*not \[5, \d+\]",
    ):
        load(tmp_path, other)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"torn")
    with pytest.raises(ModelError, match=r"adapter_model.safetensors is missing or broken"):
        load(tmp_path, other)


def test_adapters_that_are_more_than_plain_ones_are_not_merged(base: Path, tmp_path: Path) -> None:
    save(tmp_path, load_adapted(declared(base)))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    with pytest.raises(
        ModelError, match=r"only plain LoRA can; found LORA with {'use_dora': True}"
    ):
        load_merged(Model(str(tmp_path)))
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"peft_type": "IA3", "base_model_name_or_path": str(base)})
    )
    with pytest.raises(ModelError, match=r"only plain LoRA can; found IA3"):
        load_merged(Model(str(tmp_path)))


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"alpha_pattern": {"q_proj(": 3}}, "adapter_config.json is broken"),
        ({"alpha_pattern": {"q_proj": "3"}}, "alpha_pattern of 'q_proj' is '3'"),
        ({"base_model_name_or_path": "."}, "which holds adapters alone; merge those"),
    ],
)
def test_what_adapters_say_of_themselves_is_refused_by_name(
    base: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    said: dict[str, Any],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    save(tmp_path, load_adapted(declared(base)))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | said))
    with pytest.raises(ModelError, match=message):
        load_merged(Model(str(tmp_path)))


FOREIGN: dict[str, dict[str, Any]] = {
    "another scale": {"target_modules": ["q_proj", "v_proj"], "lora_alpha": 3},
    "rslora": {"target_modules": ["q_proj", "v_proj"], "use_rslora": True, "lora_dropout": 0.1},
    "patterns": {
        "target_modules": ["q_proj", "up_proj"],
        "rank_pattern": {"up_proj": 2, "0.self_attn.q_proj": 3},
        "alpha_pattern": {"^model.layers.1.mlp.up_proj": 5, "q_proj": 7},
    },
    "a regular expression": {"target_modules": r".*layers\.1\..*(q_proj|down_proj)"},
    "some layers": {
        "target_modules": ["q_proj", "k_proj"],
        "layers_to_transform": [1],
        "layers_pattern": "layers",
    },
    "left out": {"target_modules": "all-linear", "exclude_modules": ["down_proj"]},
}


def by_peft(base: Path, folder: Path, **knobs: Any) -> Any:
    """A folder of adapters that peft wrote, and peft's own model with them in float64."""
    import peft

    make: Any = peft.LoraConfig
    torch.manual_seed(0)
    module = peft.get_peft_model(
        load_model(Model(str(base))), make(**({"r": RANK, "task_type": "CAUSAL_LM"} | knobs))
    )
    module.peft_config["default"].base_model_name_or_path = str(base)
    moved(module).save_pretrained(str(folder))
    return module.double().eval()


@pytest.mark.parametrize("kind", FOREIGN)
def test_adapters_of_peft_go_on_as_peft_computes_them(
    base: Path, tmp_path: Path, kind: str
) -> None:
    wanted = logprobs(by_peft(base, tmp_path / "peft", **FOREIGN[kind]))
    model = Model(str(tmp_path / "peft"), lora=LoRA())
    module = load_adapted(model)
    reader, merged = load_merged(model)
    frozen, _ = load_merged(model.frozen())
    for found in (module, reader, frozen):
        torch.testing.assert_close(logprobs(found).double(), wanted.double(), rtol=0, atol=5e-5)
    outline = outlined_to_train(model)
    assert outline is not None and all(
        torch.equal(outline.values[name], weight) for name, weight in trained(module).items()
    )
    sent(moved(module), merged)  # type: ignore[arg-type]
    torch.testing.assert_close(logprobs(reader), logprobs(module), rtol=0, atol=2e-5)
    (tmp_path / "saved").mkdir()
    save(tmp_path / "saved", module)
    torch.testing.assert_close(
        logprobs(load_merged(Model(str(tmp_path / "saved")))[0]),
        logprobs(module),
        rtol=0,
        atol=2e-5,
    )
    kept, first = (
        json.loads((tmp_path / name / "adapter_config.json").read_text())
        for name in ("saved", "peft")
    )
    for key in FOREIGN[kind]:
        unordered = sorted if isinstance(first[key], list) else lambda value: value
        assert unordered(kept[key]) == unordered(first[key])


@pytest.mark.parametrize(
    ("knobs", "why"),
    [
        ({"use_dora": True}, "'use_dora': True"),
        ({"modules_to_save": ["lm_head"]}, r"'modules_to_save': \['lm_head'\]"),
        ({"bias": "lora_only"}, "'bias': 'lora_only'"),
        ({"init_lora_weights": "pissa"}, "'init_lora_weights': 'pissa'"),
        ({"trainable_token_indices": [3]}, "'trainable_token_indices'"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "3 tensors that are none or stand alone"),
    ],
)
def test_adapters_that_are_more_than_two_matrices_are_refused_to_trainers_and_readers(
    base: Path, tmp_path: Path, knobs: dict[str, Any], why: str
) -> None:
    by_peft(base, tmp_path / "peft", **({"target_modules": ["q_proj"]} | knobs))
    for load_it in (lambda model: load_adapted(model), lambda model: load_merged(model.frozen())):
        with pytest.raises(ModelError, match=why):
            load_it(Model(str(tmp_path / "peft"), lora=LoRA()))


def test_what_a_graph_says_otherwise_than_the_folder_of_adapters_is_refused(
    base: Path, tmp_path: Path
) -> None:
    by_peft(base, tmp_path, target_modules=["q_proj", "v_proj"], lora_alpha=3)
    source = str(tmp_path)
    assert Model(source, lora=LoRA()).lora == LoRA(RANK, alpha=3)
    assert Model(source, lora=LoRA()) == Model(source, lora=LoRA(RANK, alpha=3))
    with pytest.raises(
        GraphError, match=r"LoRA has alpha=32, but the adapters in .*found rank=4, alpha=3 in"
    ):
        Model(source, lora=LoRA(alpha=32))
    with pytest.raises(GraphError, match=r"LoRA has rank=16"):
        Model(source, lora=LoRA(16))
    same = Model(source, lora=LoRA(targets=("v_proj", "q_proj")))
    assert (
        trained(load_adapted(same)).keys()
        == trained(load_adapted(Model(source, lora=LoRA()))).keys()
    )
    for make in (load_adapted, load_merged):
        with pytest.raises(
            ModelError,
            match=r"targets='all-linear' names: 10 layers differ; found 4 in the folder",
        ):
            make(Model(source, lora=LoRA(targets="all-linear")))


def test_adapters_on_the_hub_are_refused(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = tmp_path / "hub" / "models--some--adapters"
    by_peft(base, hub / "snapshots" / COMMIT, target_modules=["q_proj"])
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text(COMMIT)
    for module in (
        "huggingface_hub.constants",
        "transformers.utils.hub",
        "transformers.integrations.peft",
    ):
        monkeypatch.setattr(f"{module}.HF_HUB_CACHE", str(tmp_path / "hub"), raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for load_it in (load_model, load_adapted):
        with pytest.raises(
            ModelError, match="some/adapters holds adapters of another model, found on the hub"
        ):
            load_it(Model("some/adapters", lora=LoRA()))


def test_a_folder_of_adapters_is_not_trained_whole_nor_read_where_a_model_lies_beside_them(
    base: Path, tmp_path: Path
) -> None:
    by_peft(base, tmp_path, target_modules=["q_proj"])
    character_tokenizer("abc", 64).save_pretrained(base)
    assert (
        load_tokenizer(Model(str(tmp_path))).get_vocab()
        == load_tokenizer(Model(str(base))).get_vocab()
    )
    (fault,) = Trainer(Model(str(tmp_path))).faults()
    assert "holds adapters alone; give Model(..., lora=LoRA()) to go on with these" in fault
    assert not Trainer(Model(str(tmp_path), lora=LoRA())).faults()
    assert [
        fault
        for fault in Generator(Model(str(tmp_path)), engine="vllm").faults()
        if "adapters alone" in fault
    ]
    (tmp_path / "config.json").write_text((base / "config.json").read_text())
    assert not Trainer(Model(str(tmp_path), lora=LoRA())).faults()
    assert start_fault(Model(str(tmp_path), lora=LoRA())) is None
    (tmp_path / "model.safetensors").write_bytes((base / "model.safetensors").read_bytes())
    assert "a whole model and adapters beside it" in str(start_fault(Model(str(tmp_path))))


# Declarations


def test_equal_declarations_are_one_model_and_others_are_not() -> None:
    model = Model("m", lora=LoRA(8, targets=["q_proj"]))  # type: ignore[arg-type]
    assert model == Model("m", lora=LoRA(8, targets=("q_proj",))) and hash(model) == hash(
        Model("m", lora=LoRA(8, targets=("q_proj",)))
    )
    assert model != Model("m") and model != Model("m", lora=LoRA(8))


# Declarations


def test_the_frozen_model_is_the_base_alone() -> None:
    assert Model("m", lora=LoRA()).frozen() == Model("m").frozen()


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: LoRA(0), "rank=0"),
        (lambda: LoRA(alpha=0), "alpha=0"),
        (lambda: LoRA(targets=()), r"targets=\(\)"),
        (lambda: LoRA(targets="q_proj"), "targets='q_proj'"),
        (lambda: LoRA(seed=-1), "seed=-1"),
        (lambda: Model("m", lora=8), "'lora' is 8"),
        (lambda: Model("m", head="value", lora=LoRA()), "head 'value'"),
    ],
)
def test_declarations_that_cannot_be_right_are_refused(make: Any, why: str) -> None:
    with pytest.raises(GraphError, match=why):
        make()


def test_a_generator_that_cannot_merge_adapters_is_refused() -> None:
    (found,) = Generator(Model("m", lora=LoRA()), weights="int8").faults()
    assert "merges adapters" in found and "weights='int8'" in found
    assert not Generator(Model("m"), weights="int8").faults()
    assert not Generator(Model("m", lora=LoRA()), engine="vllm").faults()
    assert not Generator(Model("m", lora=LoRA()), tensor_parallel=2).faults()


def test_without_peft_the_error_says_what_to_install(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(
        ModelError,
        match=r"'base' has adapters .* need peft; found .*pip install 'dataflow-rl\[lora\]'",
    ):
        load_adapted(declared(base))
    plain, merged = load_merged(declared(base))
    assert merged is not None and plain.config.vocab_size == VOCABULARY
