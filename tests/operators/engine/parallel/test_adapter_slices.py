"""Ranks that take adapters alone and merge them into their slices compute with the weights that one
rank merges.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from replaying import drive
from rigs.adapter_files import save
from rigs.operators import make_context
from slices_rig import part, values
from test_two_ranks import assert_alike, groups, take

from dataflow.model import LoRA, Model
from operators.engine.build import make_engine
from operators.engine.parallel.lockstep import make_parallel
from operators.generator import Generator
from operators.models.loading import load_adapted

pytestmark = pytest.mark.usefixtures("forked")


def adapted(declaration: Generator, dtype: str) -> Generator:
    """The same, with adapters beside all of its linear layers."""
    return dataclasses.replace(
        declaration, model=dataclasses.replace(declaration.model, lora=LoRA(3), dtype=dtype)
    )


def mine(name: str, full: torch.Tensor, rank: int, size: int, heads: int) -> torch.Tensor:
    """What a rank takes of an adapter: of A the columns that it has of the layer, of B the rows, or
    all.
    """
    path, _, adapter = name.partition(".lora_")
    if adapter.startswith("A") == path.endswith(("o_proj", "down_proj")):
        return part(f"{path}.weight", full, rank, size, heads)
    return full


@pytest.mark.parametrize(
    ("family", "size", "heads", "executor", "dtype"),
    [
        ("llama", 2, 2, "gloo", "float32"),
        pytest.param("qwen2", 2, 1, "shared_memory", "float32", marks=pytest.mark.slow),
        pytest.param("llama", 4, 2, "gloo", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_ranks_merge_into_their_slices_what_one_rank_merges(
    family, size, heads, executor, dtype, declare, alone, fed
) -> None:
    declaration = adapted(declare(family, {"num_key_value_heads": heads}), dtype)
    one: Any = alone(declaration)
    ranks = fed(declaration, size, executor=executor)
    assert set(ranks.shapes) == set(one.tensors), "adapters alone travel"
    before = {name: weight.clone() for name, weight in one.model.named_parameters()}
    drawn = []
    for version in (1, 2):
        new = values(ranks.shapes, version)
        ranks.publish(version, new)
        assert ranks.take() == version
        take(one, version, new)
        for rank, digests in enumerate(ranks.engine.digests()):
            for name, full in new.items():
                own = mine(name, full, rank, size, heads).contiguous()
                assert digests[name] == xxhash.xxh3_64_intdigest(own.numpy().tobytes()), (
                    f"{name} on rank {rank}"
                )
        paths = {name.partition(".lora_")[0] for name in new}
        for path in paths:
            whole = one.model.get_submodule(path).weight
            assert not torch.equal(whole, before[f"{path}.weight"])
            held = ranks.engine.model.get_submodule(path).weight
            assert torch.equal(held, part(f"{path}.weight", whole, 0, size, heads)), path
        if dtype == "float32":
            assert_alike(drive(ranks.engine, groups()), drive(one, groups()))
        drawn.append(drive(ranks.engine, groups())[0]["tokens"].tolist())
    assert drawn[0] != drawn[1]


def of_a_folder(declaration: Generator, folder: Path) -> Generator:
    """The same, with adapters that a trainer might have left."""
    pytest.importorskip("peft")
    trained = load_adapted(Model(declaration.model.source, lora=LoRA(3)))
    with torch.no_grad():
        for name, weight in trained.named_parameters():
            if weight.requires_grad:
                weight.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
    folder.mkdir()
    save(folder, trained)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(declaration.model.source) / name, folder)
    return dataclasses.replace(
        declaration, model=dataclasses.replace(declaration.model, source=str(folder), lora=LoRA(3))
    )


def test_ranks_begin_with_the_adapters_of_a_folder(declare, alone, together, tmp_path) -> None:
    plain = declare("llama")
    declaration = of_a_folder(plain, tmp_path / "adapters")
    expected = drive(alone(declaration), groups())
    assert_alike(drive(together(declaration), groups()), expected)
    before = drive(alone(plain), groups())
    assert any(
        row["tokens"].tolist() != before[ticket]["tokens"].tolist()
        for ticket, row in expected.items()
    )


@pytest.mark.gpu
def test_two_gpus_merge_adapters_into_their_slices(declare, tmp_path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    declaration = of_a_folder(declare("llama", temperature=0.0), tmp_path / "adapters")
    context = make_context(node="generator", device="cuda:0")
    expected = drive(make_engine(declaration, context).engine, groups())
    engine = make_parallel(declaration, context, 2).engine
    try:
        assert_alike(drive(engine, groups()), expected)
    finally:
        engine.close()
