"""Whole runs of trainers and generators that share a model out in several ways at once make the
steps of one rank.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rigs.graphs import tiny_graph
from rigs.policy import tiny_policy
from rigs.sent import Sent
from test_live_shards import TO, drawn, greedy, losses

from dataflow import run
from dataflow.model import LoRA

pytestmark = [pytest.mark.usefixtures("machine", "one_core"), pytest.mark.timeout(300)]


LORA = LoRA(4, alpha=8)


WIDTH, MLP = 32, 64


def made(policy: Path, folder: Path, trainer: int, generator: int, steps: int, **knobs: Any) -> Any:
    """A synchronous run, for which the order of additions matters little."""
    lora = knobs.pop("lora", None)
    graph = tiny_graph(
        policy,
        max_staleness=0,
        max_tokens=16,
        prompts_per_step=2,
        lr=1e-3,
        eps=1e-3,
        **knobs,
        generator_knobs={"tensor_parallel": generator},
        model_knobs={} if lora is None else {"lora": lora},
    )
    result = run(
        graph,
        ranks={"trainer": trainer},
        steps=steps,
        seed=3,
        weights="gloo",
        runs=folder,
        quiet=True,
    )
    assert result.verdict.clean, result.verdict.line
    return result


def assert_alike(many: Any, one: Any, steps: int) -> None:
    np.testing.assert_allclose(losses(many.folder), losses(one.folder), rtol=0, atol=1e-5)
    np.testing.assert_allclose(norms(many), norms(one), rtol=1e-5)
    assert len(losses(one.folder)) == steps
    for step in range(1, steps + 1):
        assert drawn(many, step) == drawn(one, step)


def norms(result: Any) -> list[float]:
    return [line["grad_norm"] for line in result.metrics if "loss" in line]


@pytest.mark.parametrize(
    ("trainer", "generator", "knobs"),
    [
        (2, 2, {}),
        pytest.param(2, 2, {"tensor_parallel": 2}, marks=pytest.mark.slow),
        pytest.param(4, 2, {"tensor_parallel": 2}, marks=pytest.mark.slow),
        pytest.param(4, 1, {"dp_replicate": 2}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_adapters_travel_alone_from_several_ranks_to_several_as_from_one_to_one(
    policy: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    trainer: int,
    generator: int,
    knobs: dict[str, int],
) -> None:
    pytest.importorskip("peft")
    steps = 3
    one = made(policy, tmp_path / "one", 1, 1, steps, lora=LORA)
    sent = Sent(tmp_path / "sent", monkeypatch)
    many = made(policy, tmp_path / "many", trainer, generator, steps, lora=LORA, **knobs)
    assert_alike(many, one, steps)
    (times,) = set(sent.transfers(TO).values())
    # B of what is cut by rows, A of what is cut by columns
    cut = LORA.rank * (WIDTH * 3 + MLP * 2 + WIDTH + MLP)
    whole = LORA.rank * (WIDTH * 5 + WIDTH * 2)  # the other one of each
    assert sum(sent.payload(TO).values()) == 4 * times * (cut + generator * whole), (
        "adapters, and nothing else"
    )
    assert greedy(many, generator) == greedy(one, 1)


@pytest.mark.slow
def test_replicas_of_shards_make_the_run_of_one_rank_and_share_the_sending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = tiny_policy(tmp_path / "policy", layers=2, width=128, heads=4, mlp_width=256)
    one = made(policy, tmp_path / "one", 1, 1, 4)
    sent = Sent(tmp_path / "sent", monkeypatch)
    many = made(policy, tmp_path / "many", 4, 2, 4, dp_replicate=2)
    assert_alike(many, one, 4)
    by_rank = [0] * 4
    for (sender, _), nbytes in sent.payload(TO).items():
        by_rank[sender] += nbytes
    assert max(by_rank) - min(by_rank) < 0.05 * sum(by_rank), by_rank


@pytest.mark.slow
def test_ranks_that_hold_the_same_key_value_head_make_the_run_of_one_rank(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    policy = tiny_policy(tmp_path / "policy")
    config = AutoConfig.from_pretrained(policy)
    config.num_key_value_heads = 1
    AutoModelForCausalLM.from_config(config).save_pretrained(policy)
    one = made(policy, tmp_path / "one", 1, 1, 3)
    many = made(policy, tmp_path / "many", 4, 2, 3, tensor_parallel=2)
    assert_alike(many, one, 3)
