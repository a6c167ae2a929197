"""Episodes whose turns vLLM answers, and runs over vLLM whose processes, its own and those above
them, are killed and stopped at random; where DATAFLOW_VLLM_PYTHON names an interpreter that has it.
"""

import os
from pathlib import Path
from typing import Any

import pytest
from episode_rig import TURNS, episode_graph, rollouts
from random_strikes import Place, RandomStriking, schedule
from rigs.graphs import tiny_graph
from rigs.machine import alive, wait_until
from rigs.policy import tiny_policy

from dataflow import run, scorer
from dataflow.folder.run_folder import RunFolder
from dataflow.history.verify.verdict import verify
from dataflow.limits import Limits, Patience
from operators import episode
from operators.engine.vllm.process import PYTHON

pytestmark = [
    pytest.mark.usefixtures("machine", "one_core"),
    pytest.mark.timeout(1800),
    pytest.mark.slow,
    pytest.mark.skipif(PYTHON not in os.environ, reason=f"{PYTHON} names no interpreter"),
]


@episode(max_turns=TURNS)
async def talk(chat: Any, answer: str) -> float:
    """As many turns as the prompt says, of which the world repeats the first letter."""
    good = 0
    for _ in range(int(answer)):
        said = await chat.say(max_tokens=4)
        good += said[:1] in "abcdefghijklm"
        chat.hear(f"{answer}{said[:1]}=")
    return float(good)


@scorer(isolate=False)
def reward(talk: float) -> float:
    return talk


def wide(folder: Path) -> Path:
    """A policy whose heads are as wide as vLLM's kernels for processors ask."""
    return tiny_policy(folder, layers=2, width=128, heads=4, mlp_width=256)


def test_turns_are_trained_with_the_logprobs_that_they_were_drawn_with(tmp_path: Path) -> None:
    g = episode_graph(wide(tmp_path / "wide"), talk, reward, max_staleness=0)
    object.__setattr__(g.operators["generator"], "engine", "vllm")
    result = run(g, steps=4, runs=tmp_path / "runs", quiet=True, limits=LIMITS)
    assert result.verdict.clean, result.verdict.line
    assert all(line["mismatch"] < 1e-5 for line in result.metrics if "loss" in line)
    rows = rollouts(result)
    assert set(rows.column("error").to_pylist()) == {None}
    turns = [max(turn) + 1 for turn in rows.column("turn").to_pylist()]
    assert turns == [int(answer) for answer in rows.column("answer").to_pylist()]


LIMITS = Limits(start_s=120.0, hang_s=30.0, stop_s=5.0, patience=Patience(first_s=0.05, of_one=12))
SHARED = Path("/dev/shm")
BLOWS = 7
"""Some 90 s of blows for each rank, most of them vLLM's start."""


@pytest.mark.parametrize(("ranks", "seed"), [(1, 0), (2, 1)])
def test_a_run_whose_vllm_is_killed_and_stopped_at_random_is_whole(
    ranks: int, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = f"test-{os.getpid()}-{ranks}"
    monkeypatch.setattr("operators.engine.vllm.engine._mark", lambda site: mark)
    graph = tiny_graph(
        wide(tmp_path / "wide"), generator_knobs={"engine": "vllm", "tensor_parallel": ranks}
    )
    places = [Place("trainer"), *(Place("generator", below) for below in range(3 + (ranks > 1)))]
    striking = RandomStriking(tmp_path / "runs", schedule(seed, places, BLOWS))
    trainer = graph.operators["trainer"]
    object.__setattr__(trainer, "build", striking.held(trainer).build)
    striking.start()
    try:
        result = run(graph, steps=striking.steps, runs=tmp_path / "runs", quiet=True, limits=LIMITS)
    finally:
        striking.finish()
    assert result.verdict.clean, result.verdict.line
    assert verify(result.folder).clean
    for step in range(1, striking.steps + 1):
        rows = RunFolder.open(result.folder).rollouts_of().read(step)
        assert set(rows.column("error").to_pylist()) == {None}
    wait_until(lambda: not alive(sorted(striking.hit)), 30.0)
    registered = {f"__KMP_REGISTERED_LIB_{pid}_{os.getuid()}" for pid in striking.hit}
    left = {file.name for file in SHARED.iterdir()}
    assert not {name for name in left if mark in name or name in registered}
