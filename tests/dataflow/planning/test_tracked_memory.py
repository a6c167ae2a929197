"""What a plan counts of a trainer's rank is what its own code takes, tracked on fake tensors."""

from pathlib import Path

import pytest

from bench.memory.planned import CASES, CONFIGS, Case, planned, tracked_bytes, write

MIDDLE = {
    "model_type": "llama",
    "num_hidden_layers": 3,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 64000,
    "max_position_embeddings": 4096,
}
"""Small enough for seconds, and of the shape of larger ones."""


def over(case: Case, folder: Path) -> float:
    """What the plan counts more, as a share of what was tracked."""
    return planned(case, folder).total / tracked_bytes(case, folder).most - 1


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 2), (2, 1), (8, 2)])
def test_a_plan_counts_what_a_rank_takes(
    ranks: int, micro_batches: int, checkpointed: bool, tmp_path: Path
) -> None:
    case = Case(model="middle", ranks=ranks, micro_batches=micro_batches, checkpointed=checkpointed)
    assert abs(over(case, write(MIDDLE, tmp_path))) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case.model}-{case.ranks}-{case.checkpointed}"
)
def test_a_plan_of_a_large_model_counts_what_a_rank_takes(case: Case, tmp_path: Path) -> None:
    assert abs(over(case, write(CONFIGS[case.model], tmp_path))) < 0.1
