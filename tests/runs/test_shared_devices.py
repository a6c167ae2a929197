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


def steps_of(graph: Any, runs: Path, **how: Any) -> tuple[RunFolder, list[Any], list[float]]:
    """What a run made, step by step: every token and its version; figures and log-probabilities."""
    result = run(graph, runs=runs, quiet=True, steps=STEPS, **how)
    assert (result.steps, result.verdict.clean) == (STEPS, True), result.verdict.line
    folder = RunFolder.open(result.folder)
    numbers = [line[name] for line in result.metrics if "loss" in line for name in FIGURES]
    tables = [folder.read_rollouts(step) for step in range(1, STEPS + 1)]
    tokens = [table.select(["group_id", "position", "tokens", "versions"]).to_pylist() for table in tables]
    numbers += [value for table in tables for row in table.column("logprobs").to_pylist() for value in row]
    return folder, tokens, numbers


def both(policy: Path, tmp_path: Path, knobs: dict[str, Any], *, exact: bool = True, **how: Any) -> RunFolder:
    """Run with a memory for each, and shared; the folder of the latter, which made the same, bit for bit if `exact`."""
    _, tokens, numbers = steps_of(tiny_graph(policy, max_staleness=0, **knobs), tmp_path / "alone", **how)
    graph = tiny_graph(policy, max_staleness=0, **knobs)
    folder, shared_tokens, shared_numbers = steps_of(graph, tmp_path / "shared", gpus="shared", **how)
    assert shared_tokens == tokens
    assert shared_numbers == (numbers if exact else pytest.approx(numbers, rel=1e-4, abs=1e-5))
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
    "int8": ({"generator_knobs": {"weights": "int8"}}, {"exact": False}),  # its products' last bits are the batch's
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
