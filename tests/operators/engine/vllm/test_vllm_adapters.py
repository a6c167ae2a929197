"""Adapters in vLLM: what it is told of them, what is refused, and a folder of them to begin with.
Versions of them are in `test_engine_contract`.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from replaying import drive, replayed
from safetensors.torch import save_file

from dataflow.model import LoRA, Model
from operators.engine.interface import PromptStart
from operators.engine.sampler import Sampling
from operators.engine.vllm import internals
from operators.engine.vllm.adapter_weights import NUMBER, AdapterWeights
from operators.engine.vllm.engine import VllmEngine
from operators.engine.vllm.outline import outlined
from operators.engine.vllm.process import PYTHON
from operators.generator import Generator
from operators.models.folders import PREFIX, WEIGHTS_FILE, ModelError
from operators.models.loading import load_merged

NEEDS_VLLM = (
    pytest.mark.timeout(600),
    pytest.mark.slow,
    pytest.mark.skipif(PYTHON not in os.environ, reason=f"{PYTHON} names no interpreter"),
)
Q, OUT = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.o_proj"


def needs_vllm(test: Any) -> Any:
    for mark in NEEDS_VLLM:
        test = mark(test)
    return test


def saved(folder: Path, base: Path, width: int) -> Path:
    """Adapters of two layers, of other ranks and scales, as peft saves them."""
    folder.mkdir()
    config = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 2,
        "use_rslora": True,
        "alpha_pattern": {"o_proj": 6},
        "rank_pattern": {"o_proj": 9},
        "target_modules": ["q_proj", "o_proj"],
        "base_model_name_or_path": str(base),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    noise, tensors = torch.Generator().manual_seed(3), {}
    for path, rank in ((Q, 4), (OUT, 9)):
        for name, shape in (("A", (rank, width)), ("B", (width, rank))):
            tensors[f"{PREFIX}{path}.lora_{name}.weight"] = 0.3 * torch.randn(
                shape, generator=noise
            )
    save_file(tensors, folder / WEIGHTS_FILE)
    return folder


def test_vllm_is_told_of_each_layer_its_own_scale_and_to_make_room_for_the_widest(
    folder: Path, tmp_path: Path
) -> None:
    fresh = outlined(Model(str(folder), lora=LoRA(4, alpha=6, targets=("q_proj",))), True)
    names = f"{Q}.lora_A.default.weight", f"{Q}.lora_B.default.weight"
    assert fresh.adapters is not None and fresh.adapters.start is None
    assert fresh.adapters.layers[Q] == (*names, 1.5) and fresh.adapters.room == 8
    assert [fresh.shapes[name] for name in names] == [(4, 32), (32, 4)] and len(fresh.shapes) == 4
    start = saved(tmp_path / "adapters", folder, 32)
    going_on = outlined(Model(str(start), lora=LoRA()), True)
    assert going_on.folder == folder and going_on.adapters is not None
    assert {path: scale for path, (*_, scale) in going_on.adapters.layers.items()} == {
        Q: 2 / math.sqrt(4),
        OUT: 6 / math.sqrt(9),
    }
    assert going_on.adapters.room == 16 and going_on.adapters.start == str(start)
    with pytest.raises(ModelError, match=r"no room.*rank 513 at 'model.*at most that, or"):
        outlined(Model(str(folder), lora=LoRA(513)), True)


def test_a_generator_says_whether_vllm_can_take_its_adapters(folder: Path, tmp_path: Path) -> None:
    start = str(saved(tmp_path / "adapters", folder, 32))
    assert not Generator(Model(start, lora=LoRA()), engine="vllm").faults()
    (fault,) = Generator(Model(start), engine="vllm").faults()
    assert "holds adapters alone; give Model(..., lora=LoRA())" in fault
    for name in ("enable_lora", "max_lora_rank", "lora_dtype", "fully_sharded_loras"):
        (fault,) = Generator(Model(str(folder)), engine="vllm", vllm={name: 1}).faults()
        assert f"gives vLLM '{name}', which this project decides" in fault


class Beside:
    """A layer of vLLM's with adapters: computes with them, unless it is deaf."""

    def __init__(self, deaf: bool = False) -> None:
        self.tp_size, self.input_size, self.output_slices, self._deaf = 1, 6, (4,), deaf
        weight = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
        self.a, self.b = torch.zeros(1, 6), torch.zeros(4, 1)
        method = SimpleNamespace(apply=lambda layer, x, bias: x @ weight.T)
        self.base_layer = SimpleNamespace(quant_method=method, params_dtype=torch.float32)

    def apply(self, x: torch.Tensor, bias: None) -> torch.Tensor:
        base = self.base_layer.quant_method.apply(self.base_layer, x, bias)
        return base if self._deaf else base + x @ self.a.T @ self.b.T


class Manager:
    """vLLM's, of one layer."""

    def __init__(self, layer: Beside, forgets: bool) -> None:
        self.modules, self.packed_modules = {"model.q_proj": layer}, dict[str, list[str]]()
        self._forgets, self.added = forgets, dict[int, Any]()

    def remove_adapter(self, number: int) -> None:
        self.added.pop(number, None)

    def add_adapter(self, adapters: Any) -> None:
        assert adapters.number not in self.added, "vLLM would keep the ones from before"
        if not self._forgets:
            self.added[adapters.number] = adapters

    def activate_adapter(self, number: int) -> None:
        if number in self.added:
            given = self.added[number].loras["model.q_proj"]
            layer = self.modules["model.q_proj"]
            layer.a, layer.b = given.a.clone(), given.b * given.scaling

    def set_adapter_mapping(self, mapping: Any) -> None:
        assert mapping == ((NUMBER, NUMBER), (NUMBER, NUMBER), True)


@pytest.fixture
def on_a_rank(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[AdapterWeights, Manager]]:
    """Makes adapters on a rank of a vLLM of one layer that has `deaf` layers, `forgets` adapters,
    or is another model.
    """

    def make(
        *, deaf: bool = False, forgets: bool = False, path: str = "model.q_proj", **model: bool
    ) -> tuple[AdapterWeights, Manager]:
        found = {
            "LoRAMapping": lambda tokens, prompts, is_prefill: (tokens, prompts, is_prefill),
            "LoRAModel": lambda number, rank, loras: SimpleNamespace(number=number, loras=loras),
            "LoRALayerWeights": lambda name, rank, alpha, a, b, scaling: SimpleNamespace(
                rank=rank, a=a, b=b, scaling=scaling
            ),
            "is_moe_model": lambda module: model.get("mixes", False),
            "parse_fine_tuned_lora_name": lambda name, mapper: (
                name.removeprefix(PREFIX).removesuffix(".lora_A.weight"),
                True,
            ),
        }
        for module, names in internals.LORA_NAMES.items():
            made = ModuleType(module)
            for name in names:
                setattr(made, name, found[name])
            monkeypatch.setitem(sys.modules, module, made)
        manager = Manager(Beside(deaf), forgets)
        worker: Any = SimpleNamespace(
            device="cpu",
            model_runner=SimpleNamespace(
                model=SimpleNamespace(),
                lora_manager=SimpleNamespace(_adapter_manager=manager),
                list_loras=lambda: set(manager.added),
            ),
            vllm_config=SimpleNamespace(
                lora_config=SimpleNamespace(lora_dtype=torch.float32),
                model_config=SimpleNamespace(use_mla=model.get("absorbs", False)),
            ),
        )
        shapes = {"a": (2, 6), "b": (4, 2)}
        weights = AdapterWeights(worker, {path: ("a", "b", 0.5)}, shapes, None)
        assert weights.recorded() == {"a": [((0, 2), (0, 6))], "b": [((0, 4), (0, 2))]}
        tensors = {name: torch.full(shape, math.nan) for name, shape in shapes.items()}
        weights.attach({}, tensors)
        weights.tensors_of_test = tensors  # type: ignore[attr-defined]
        return weights, manager

    return make


def test_a_rank_begins_with_adapters_that_change_nothing_and_computes_with_each_version(
    on_a_rank: Any,
) -> None:
    weights, manager = on_a_rank()
    assert weights.prove() == []
    layer, x = manager.modules["model.q_proj"], torch.ones(1, 6)
    plain = layer.base_layer.quant_method.apply(None, x, None)
    assert torch.equal(layer.apply(x, None), plain)
    for value in (1.0, 2.0):
        weights.tensors_of_test["a"].fill_(value)
        weights.tensors_of_test["b"].fill_(1.0)
        weights.load()
        weights.tensors_of_test["a"].fill_(7.0)  # the next version arrives
        weights.tensors_of_test["b"].fill_(7.0)
        assert torch.allclose(layer.apply(x, None) - plain, torch.full((1, 4), value * 6 * 2 * 0.5))


@pytest.mark.parametrize(
    ("vllm", "why"),
    [
        (
            {"deaf": True},
            r"does not compute with the adapters.*layer 'model.q_proj' \(Beside\) off",
        ),
        ({"path": "model.query"}, r"no adapters beside 1 of .*'model.query'; leave it out of LoRA"),
        (
            {"path": "model.kv_b_proj", "absorbs": True},
            r"no adapters beside .*'model.kv_b_proj'",
        ),
        ({"mixes": True}, r"mixture of experts beside adapters .* by kernels for GPUs"),
    ],
)
def test_what_vllm_would_compute_without_adapters_is_refused(
    vllm: dict[str, Any], why: str, on_a_rank: Any
) -> None:
    with pytest.raises(ModelError, match=why):
        on_a_rank(**vllm)[0].prove()


def test_adapters_that_vllm_does_not_list_are_no_version(on_a_rank: Any) -> None:
    with pytest.raises(RuntimeError, match="does not list the adapters"):
        on_a_rank(forgets=True)[0].prove()


@needs_vllm
def test_a_mixture_of_experts_is_refused_on_processors(
    make_model: Callable[..., Any], tmp_path: Path
) -> None:
    make_model("qwen3_moe", hidden_size=128, head_dim=32).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"mixture of experts.*use engine=\"native\""):
        started(Model(str(tmp_path), lora=LoRA(4)))


@needs_vllm
@torch.no_grad()
def test_rollouts_begin_with_the_adapters_of_a_folder(
    make_model: Callable[..., Any], tmp_path: Path
) -> None:
    base = tmp_path / "base"
    make_model("llama", hidden_size=128, head_dim=32, intermediate_size=128).save_pretrained(base)
    model = Model(str(saved(tmp_path / "adapters", base, 128)), lora=LoRA())
    engine = started(model)
    try:
        prompts = [np.arange(2, 9), np.arange(5, 25)]
        found = drive(
            engine,
            [
                PromptStart(prompt=prompt, limit=len(prompt) + 20, tickets=[at], seeds=[at])
                for at, prompt in enumerate(prompts)
            ],
        )
    finally:
        engine.close()
    merged = load_merged(model)[0]
    base_only = make_model("llama", hidden_size=128, head_dim=32, intermediate_size=128)
    for row in found.values():
        versions, start = np.zeros(len(row["tokens"]), int), row["start"]
        expected = replayed({0: merged}, row["tokens"], versions, start)
        np.testing.assert_allclose(row["logprobs"][start:], expected, atol=1e-4)
        without = replayed({0: base_only}, row["tokens"], versions, start)
        assert np.abs(without - expected).max() > 1e-2


def started(model: Model) -> VllmEngine:
    return VllmEngine(
        model,
        python=os.environ[PYTHON],
        slots=4,
        context_tokens=64,
        sampling=Sampling(),
        end_tokens=[1],
    )
