"""Two ranks with half a model each generate what one process with the whole model does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from replaying import drive
from rigs.operators import make_context
from slices_rig import assert_slices, values

from operators.engine.build import make_engine
from operators.engine.interface import ABORTED, PromptStart
from operators.engine.parallel.lockstep import make_parallel
from operators.engine.sampler import Sampling
from operators.engine.stop_strings import StopStrings

pytestmark = pytest.mark.usefixtures("forked")


SLOW = [
    pytest.param(family, marks=pytest.mark.slow)
    for family in ("qwen2", "qwen3", "mistral", "gemma", "mixtral")
]


def groups(**rest: Any) -> list[PromptStart]:
    """Prompts of a few lengths, some longer than a page, with three rollouts each."""
    random = np.random.default_rng(0)
    return [
        PromptStart(
            prompt=random.integers(2, 32, length),
            limit=length + 14,
            tickets=range(3 * i, 3 * i + 3),
            seeds=range(100 * i, 100 * i + 3),
            **rest,
        )
        for i, length in enumerate((1, 20, 5, 33))
    ]


def take(engine: Any, version: int, new: Mapping[str, torch.Tensor]) -> None:
    """New weights, as one process finds them."""
    for name, tensor in engine.tensors.items():
        tensor.data.copy_(new[name])
    engine.adopted(version)


def assert_alike(found: Mapping[int, Any], expected: Mapping[int, Any]) -> None:
    assert found.keys() == expected.keys()
    for ticket, row in expected.items():
        assert found[ticket]["tokens"].tolist() == row["tokens"].tolist()
        assert found[ticket]["versions"].tolist() == row["versions"].tolist()
        np.testing.assert_allclose(found[ticket]["logprobs"], row["logprobs"], rtol=0, atol=1e-5)
        assert (found[ticket]["reason"], found[ticket]["text"]) == (row["reason"], row["text"])


@pytest.mark.parametrize("family", ["llama", *SLOW])
def test_two_ranks_draw_what_one_draws(family, declare, alone, together):
    declaration = declare(family)
    expected = drive(alone(declaration), groups())
    engine = together(declaration)
    assert_alike(drive(engine, groups()), expected)
    assert engine.cache.layers[0][0].shape[1] * 2 == engine.model.config.num_key_value_heads


@pytest.mark.slow
@pytest.mark.parametrize("on_update", ["keep", pytest.param("recompute", marks=pytest.mark.slow)])
def test_updates_aborts_and_looks_in_between_leave_two_ranks_like_one(
    on_update, declare, make_model, alone, fed
):
    declaration = declare("qwen3", on_update=on_update, temperature=0.7)
    newer = {
        version: dict(make_model("qwen3", seed=version).named_parameters()) for version in (1, 2)
    }

    def run(engine: Any, update: Callable[[int], object]) -> tuple[Any, ...]:
        seen: list[Any] = []

        def at_step(step: int) -> None:
            if step in (4, 9):
                update(1 + (step > 4))
            if step == 6:
                row = engine.progress(1)
                seen.append((row.tokens.ids.tolist(), row.tokens.versions.tolist()))
                gone = engine.abort([0, 2, 99])
                seen.append(
                    sorted((row.ticket, row.tokens.ids.tolist(), row.reason) for row in gone)
                )

        return drive(engine, groups(), at_step), seen

    def publish(version: int) -> None:
        ranks.publish(version, newer[version])
        assert ranks.take() == version

    one = alone(declaration)
    expected, seen = run(one, lambda version: take(one, version, newer[version]))
    ranks = fed(declaration)
    found, seen_together = run(ranks.engine, publish)
    assert_alike(found, expected)
    assert seen_together == seen
    assert [(ticket, reason) for ticket, _, reason in seen[1]] == [(0, ABORTED), (2, ABORTED)]
    assert {int(v) for row in found.values() for v in row["versions"]} == {-1, 0, 1, 2}


@pytest.mark.slow
def test_prompts_with_knobs_and_stop_strings_of_their_own_end_alike_on_all_ranks(
    declare, alone, together, tokenizer
):
    declaration = declare("llama", stop=("a", "e", "oo"))
    own = {
        "sampling": Sampling(temperature=1.3, top_k=9),
        "stop": StopStrings(tokenizer, ("b", "gh", "s")),
    }
    starts = [*groups()[:2], *groups(**own)[2:]]
    expected = drive(alone(declaration), starts)
    assert any(row["text"] is not None for ticket, row in expected.items() if ticket < 6)
    assert any(row["text"] is not None for ticket, row in expected.items() if ticket >= 6)
    assert_alike(drive(together(declaration), starts), expected)


@pytest.mark.parametrize(
    ("family", "size", "changes", "executor"),
    [
        ("qwen2", 2, {"tie_word_embeddings": True, "vocab_size": 33}, "gloo"),
        pytest.param("mixtral", 2, {}, "gloo", marks=pytest.mark.slow),
        pytest.param("mixtral", 2, {}, "shared_memory", marks=pytest.mark.slow),
        pytest.param("llama", 4, {"num_key_value_heads": 4}, "gloo", marks=pytest.mark.slow),
    ],
)
def test_at_first_and_after_updates_each_rank_holds_its_slices_alone(
    family, size, changes, executor, declare, make_model, fed
):
    ranks = fed(declare(family, changes), size, executor=executor)
    assert_slices(ranks.engine, dict(make_model(family, **changes).named_parameters()), size)
    for version in (1, 2):
        new = dict(make_model(family, seed=version, **changes).named_parameters())
        assert set(ranks.shapes) == set(new)
        ranks.publish(version, new)
        assert ranks.take() == version
    assert ranks.engine.version == 2
    assert_slices(ranks.engine, new, size)
    if executor == "gloo":
        share = sum(shard.local.nbytes + 64 for shard in ranks.shards.values())
        taken = [buffer.memory.nbytes for buffer in ranks.opens.end[0]._buffers._buffers]
        assert len(taken) <= 2 and max(taken) <= share, (
            "rank 0 receives its own share, and no whole model"
        )


@pytest.mark.parametrize(
    ("family", "size", "heads", "executor"),
    [
        ("qwen2", 2, 1, "gloo"),
        pytest.param("qwen3", 2, 1, "shared_memory", marks=pytest.mark.slow),
        pytest.param("llama", 4, 2, "gloo", marks=pytest.mark.slow),
    ],
)
def test_ranks_that_hold_the_same_key_value_head_draw_what_one_draws(
    family, size, heads, executor, declare, make_model, alone, fed
):
    changes = {"num_key_value_heads": heads}
    declaration = declare(family, changes)
    one, ranks = alone(declaration), fed(declaration, size, executor=executor)
    assert_alike(drive(ranks.engine, groups()), drive(one, groups()))
    assert ranks.engine.cache.layers[0][0].shape[1] == 1
    new = dict(make_model(family, seed=1, **changes).named_parameters())
    ranks.publish(1, new)
    assert ranks.take() == 1
    assert_slices(ranks.engine, new, size, heads)
    take(one, 1, new)
    assert_alike(drive(ranks.engine, groups()), drive(one, groups()))


@pytest.mark.slow
@pytest.mark.usefixtures("fresh")
def test_four_ranks_draw_what_one_draws(declare, alone, together):
    declaration = declare("llama", {"num_key_value_heads": 4})
    assert_alike(drive(together(declaration, 4), groups()), drive(alone(declaration), groups()))


@pytest.mark.slow
def test_two_ranks_in_bfloat16_hold_and_draw_in_bfloat16(declare, fed):
    declaration = declare("llama")
    object.__setattr__(declaration.model, "dtype", "bfloat16")
    ranks = fed(declaration, executor="gloo")
    ranks.publish(1, {name: tensor.bfloat16() for name, tensor in values(ranks.shapes, 1).items()})
    assert ranks.take() == 1
    assert_slices(
        ranks.engine,
        {name: tensor.bfloat16() for name, tensor in values(ranks.shapes, 1).items()},
        2,
    )
    found = drive(ranks.engine, groups())
    assert len(found) == 12 and all(np.isfinite(row["logprobs"]).all() for row in found.values())
    assert {shard.local.dtype for shard in ranks.shards.values()} == {torch.bfloat16}


@pytest.mark.gpu
def test_two_gpus_draw_what_one_draws(declare, alone):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    declaration = declare("llama", temperature=0.0)
    context = make_context(node="generator", device="cuda:0")
    expected = drive(make_engine(declaration, context).engine, groups())
    engine = make_parallel(declaration, context, 2).engine
    try:
        assert_alike(drive(engine, groups()), expected)
    finally:
        engine.close()
