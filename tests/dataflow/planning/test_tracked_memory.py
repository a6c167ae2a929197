"""What a plan counts of a trainer's rank is what its own code takes, tracked on fake tensors."""

from pathlib import Path
from typing import Any, Literal

import pytest

from bench.memory.planned import CASES, CONFIGS, Case, planned, tracked_bytes, write
from bench.memory.tracked import tracked_budget
from dataflow import Graph, Model
from dataflow.planning.memory_need import FILLED, need_of
from dataflow.planning.model_size import measured
from operators import Generator

MIDDLE: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 64000,
    "max_position_embeddings": 4096,
}
"""Small enough for seconds, and of the shape of larger ones."""


def check(case: Case, folder: Path) -> None:
    """At the most, and after a step, when weights, gradients, moments and copies are left."""
    held, need = tracked_bytes(case, folder), planned(case, folder)
    assert need.total == pytest.approx(held.most, rel=0.1)
    left = need.total - need.parts["activations"]
    assert left == pytest.approx(held.rest, rel=0.02)


@pytest.mark.parametrize(
    ("ranks", "micro_batches", "checkpointed", "knobs"),
    [
        (1, 1, True, {}),
        (2, 1, False, {}),
        (8, 2, True, {}),
        (8, 2, "products", {}),
        (4, 2, False, {"tensor_parallel": 2}),
        pytest.param(8, 2, True, {"tensor_parallel": 4}, marks=pytest.mark.slow),
        (2, 2, "offload", {"moments": "bfloat16"}),
    ],
)
def test_a_plan_counts_what_a_rank_takes(
    ranks: int,
    micro_batches: int,
    checkpointed: bool | Literal["products", "offload"],
    knobs: dict[str, Any],
    tmp_path: Path,
) -> None:
    case = Case(
        model="middle",
        ranks=ranks,
        micro_batches=micro_batches,
        checkpointed=checkpointed,
        knobs=tuple(knobs.items()),
    )
    check(case, write(MIDDLE, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case.model}-{case.ranks}-{case.checkpointed}"
)
def test_a_plan_of_a_large_model_counts_what_a_rank_takes(case: Case, tmp_path: Path) -> None:
    check(case, write(CONFIGS[case.model], tmp_path))


def test_a_plan_counts_the_passes_that_a_generator_makes_before_it_takes_its_cache(
    tmp_path: Path,
) -> None:
    generator = Generator(Model(str(write(MIDDLE, tmp_path)), dtype="bfloat16"), slots=64)
    budget = tracked_budget(generator, 80 << 30)
    need = need_of(Graph("passes"), generator, measured(str(tmp_path)), 1, on_gpu=True)
    assert need is not None
    assert budget.arriving == pytest.approx(need.parts["weights"], rel=1e-3)
    logits = 64 * MIDDLE["vocab_size"]
    for tracked, part in ((budget.passes, "a forward pass"), (budget.graphs, "captured steps")):
        assert tracked + 12 * logits == pytest.approx(need.parts[part], rel=0.1), part
    filled = 2 * budget.arriving + budget.passes + budget.graphs + budget.cache
    assert filled == pytest.approx(FILLED * (80 << 30), rel=1e-6)
