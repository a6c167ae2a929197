"""Whole runs whose nodes take turns on one memory: the same steps as with a memory for each, one awake at a time."""

from pathlib import Path
from typing import Any

import pytest
from rigs.graphs import tiny_graph

from dataflow import LoRA, inline, run
from dataflow.folder.run_folder import RunFolder

pytestmark = [pytest.mark.usefixtures("one_core"), pytest.mark.timeout(120)]

FIGURES = ("loss", "grad_norm", "reward_mean", "completion_tokens_mean", "staleness_max")
STEPS = 3


def steps_of(graph: Any, runs: Path, **how: Any) -> tuple[RunFolder, list[Any]]:
    """What a run made, step by step: its figures, every token, its version and log-probability."""
    result = run(graph, runs=runs, quiet=True, steps=STEPS, **how)
    assert (result.steps, result.verdict.clean) == (STEPS, True), result.verdict.line
    folder = RunFolder.open(result.folder)
    figures = [{name: line[name] for name in FIGURES} for line in result.metrics if "loss" in line]
    columns = ["group_id", "position", "tokens", "versions", "logprobs"]
    tables = [folder.read_rollouts(step).select(columns) for step in range(1, STEPS + 1)]
    return folder, [*figures, *(table.to_pylist() for table in tables)]


def both(policy: Path, tmp_path: Path, knobs: dict[str, Any], **how: Any) -> RunFolder:
    """Run with a memory for each, and shared; the folder of the latter, which made the same, bit for bit."""
    _, alone = steps_of(tiny_graph(policy, max_staleness=0, **knobs), tmp_path / "alone", **how)
    folder, shared = steps_of(tiny_graph(policy, max_staleness=0, **knobs), tmp_path / "shared", gpus="shared", **how)
    assert shared == alone
    assert any("take turns on main memory" in line for line in folder.read_json("config.json")["plan"])
    return folder


def test_a_run_in_one_process_makes_the_same_steps_in_turns(policy: Path, tmp_path: Path) -> None:
    both(policy, tmp_path, {}, on=inline())


WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "shared memory": ({}, {}),
    "two ranks": ({}, {"ranks": {"trainer": 2}}),
    "gloo": ({}, {"weights": "gloo"}),
    "replicas": ({}, {"replicas": {"generator": 2}}),
    "adapters": ({"model_knobs": {"lora": LoRA(rank=4)}}, {}),
    "int8": ({"generator_knobs": {"weights": "int8"}}, {}),
    "bfloat16": ({"model_knobs": {"dtype": "bfloat16"}}, {}),
    "evaluations": ({"eval_every": 1}, {}),
}


@pytest.mark.parametrize(
    "way", [way if way in ("shared memory", "two ranks") else pytest.param(way, marks=pytest.mark.slow) for way in WAYS]
)
def test_a_run_in_processes_makes_the_same_steps_in_turns(
    way: str, policy: Path, machine: None, tmp_path: Path
) -> None:
    knobs, how = WAYS[way]
    both(policy, tmp_path, knobs, **how)
