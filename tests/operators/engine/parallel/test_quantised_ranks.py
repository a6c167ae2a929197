"""Ranks that share out a quantised model hold the slices of what one rank quantises, and sample
what it samples.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from replaying import drive, recomputed
from rigs.operators import make_context
from slices_rig import part
from test_two_ranks import assert_alike, groups

from operators.engine.build import make_engine
from operators.engine.precision import linear_weights, quantise, unrounded
from operators.engine.precision.intake import SCALE
from transport.weights.encoding import Encoding
from transport.weights.layout.from_torch import layout_of
from transport.weights.tensor_encoder import Encoder

pytestmark = pytest.mark.usefixtures("forked")

WHOLE_STEPS = 2
"""Of what rounding inputs does to a log-probability, the most that rounding them by other scales
does."""

KV_HEADS = 2
"""Of the tiny models; more ranks than these hold some of them alike."""


def take(engine: Any, version: int, new: Mapping[str, torch.Tensor]) -> None:
    """New weights, as views of the weight plane's memory, in one process."""
    assert engine.tensors.keys() == new.keys()
    for name, tensor in engine.tensors.items():
        tensor.data = new[name].detach().clone()
    engine.adopted(version)


def encoded(model: Any, weights: str) -> dict[str, torch.Tensor]:
    """What one trainer rank sends."""
    parameters = dict(model.named_parameters())
    form = weights.removesuffix("_dynamic")
    encoding = Encoding(quantized=form, names=linear_weights(model))
    return Encoder(encoding, layout_of(parameters, [0]), 0, parameters).encode(parameters)


def slice_of(name: str, full: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """What a rank holds of what was quantised: scales as their rows, which all ranks have where
    rows are cut.
    """
    weight = name.removesuffix(SCALE)
    if name != weight and weight.removesuffix(".weight").endswith(("o_proj", "down_proj")):
        return full
    return part(weight, full, rank, size, KV_HEADS if size > KV_HEADS else None)


def digest(tensor: torch.Tensor) -> int:
    return int(
        xxhash.xxh3_64_intdigest(
            tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data
        )
    )


def assert_holds_slices(engine: Any, new: Mapping[str, torch.Tensor], size: int) -> None:
    for rank, digests in enumerate(engine.digests()):
        for name, full in new.items():
            assert digests.pop(name) == digest(slice_of(name, full, rank, size)), (
                f"{name} on rank {rank}"
            )
        assert not digests


def assert_samples_as_well(found: Mapping[int, Any], model: Any, weights: str) -> None:
    """Log-probabilities are as near as one rank's to those of the same quantised weights with
    inputs as they are.
    """
    one = copy.deepcopy(model)
    quantise(one, weights)
    mine, theirs = [], []
    for row in found.values():
        where = row["tokens"], row["versions"], row["start"]
        with unrounded(one):
            plain = recomputed({1: one}, *where)
        mine.append(np.abs(row["logprobs"][row["start"] :] - plain).max())
        theirs.append(np.abs(recomputed({1: one}, *where) - plain).max())
    assert max(theirs) > 0
    assert max(mine) <= WHOLE_STEPS * max(theirs) + 1e-5


@pytest.mark.parametrize(
    ("family", "weights", "size", "executor"),
    [
        ("llama", "int8", 2, "shared_memory"),
        ("qwen2", "int8_dynamic", 2, "gloo"),
        pytest.param("llama", "fp8", 2, "gloo", marks=pytest.mark.slow),
        pytest.param("mixtral", "int8", 2, "shared_memory", marks=pytest.mark.slow),
        pytest.param("mixtral", "int8", 2, "gloo", marks=pytest.mark.slow),
        pytest.param("gemma", "int8_dynamic", 2, "shared_memory", marks=pytest.mark.slow),
        pytest.param("llama", "int8", 4, "gloo", marks=pytest.mark.slow),
    ],
)
def test_what_one_trainer_rank_quantises_arrives_as_slices_and_is_sampled_from(
    family, weights, size, executor, declare, make_model, alone, fed
):
    declaration = declare(family, weights=weights)
    ranks = fed(declaration, size, executor=executor, quantized=declaration.quantized)
    engine, policy = ranks.engine, make_model(family, seed=1)
    new = encoded(policy, weights)
    assert ranks.shapes.keys() == new.keys()
    ranks.publish(1, new)
    assert ranks.take() == 1
    assert_holds_slices(engine, new, size)
    found = drive(engine, groups())
    if weights != "int8":
        assert_samples_as_well(found, policy, weights)
        return
    one = alone(declaration)
    take(one, 1, dict(policy.named_parameters()))
    assert_alike(found, drive(one, groups()))


@pytest.mark.parametrize(
    ("family", "executor"),
    [
        ("llama", "gloo"),
        pytest.param("llama", "shared_memory", marks=pytest.mark.slow),
        pytest.param("mixtral", "gloo", marks=pytest.mark.slow),
    ],
)
def test_ranks_that_quantise_full_weights_themselves_agree_on_the_scales_of_rows_that_are_cut(
    family, executor, declare, make_model, alone, fed
):
    declaration = declare(family, weights="int8")
    ranks, one = fed(declaration, executor=executor), alone(declaration)
    engine = ranks.engine
    for version in (1, 2):
        policy = make_model(family, seed=version)
        ranks.publish(version, dict(policy.named_parameters()))
        assert ranks.take() == version
        take(one, version, dict(policy.named_parameters()))
        new, own = encoded(policy, "int8"), dict(engine.model.named_buffers())
        for name in linear_weights(policy):
            path = name.removesuffix(".weight")
            for buffer, kind in (("weight", name), ("scale", name + SCALE)):
                mine = slice_of(kind, new[kind], 0, 2)
                assert digest(own[f"{path}.{buffer}"]) == digest(mine), (
                    f"{buffer} of {name} in version {version}"
                )
    assert_alike(drive(engine, groups()), drive(one, groups()))


@pytest.mark.gpu
@pytest.mark.parametrize("weights", ["int8", "int8_dynamic", "fp8"])
def test_two_gpus_hold_the_slices_of_what_one_trainer_rank_quantises(
    weights, declare, make_model, fed
):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    changes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    declaration = declare("llama", changes, weights=weights)
    object.__setattr__(declaration.model, "dtype", "bfloat16")
    context = make_context(node="generator", device="cuda:0", quantized=declaration.quantized)
    policy = make_model("llama", seed=1, **changes).bfloat16()
    new = encoded(policy, weights)
    ranks = fed(declaration, executor="gloo", device="cuda:0", quantized=declaration.quantized)
    ranks.publish(1, new)
    assert ranks.take() == 1
    assert_holds_slices(ranks.engine, new, 2)
    found = drive(ranks.engine, groups())
    ranks.engine.close()
    one = make_engine(declaration, context).engine
    take(one, 1, {name: tensor.cuda() for name, tensor in new.items()})
    expected = drive(one, groups())
    assert len(found) == len(expected) == 12
    assert all(np.isfinite(row["logprobs"]).all() for row in found.values())
