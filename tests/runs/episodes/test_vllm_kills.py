"""Runs over vLLM whose processes, vLLM's own and those above them, are killed and stopped at
random; where DATAFLOW_VLLM_PYTHON names an interpreter that has it.
"""

import os
from pathlib import Path

import pytest
from random_strikes import Place, RandomStriking, schedule
from rigs.graphs import tiny_graph
from rigs.machine import alive, wait_until
from rigs.policy import tiny_policy

from dataflow import run
from dataflow.folder.run_folder import RunFolder
from dataflow.history.verify.verdict import verify
from dataflow.limits import Limits, Patience
from operators.engine.vllm.process import PYTHON

pytestmark = [
    pytest.mark.usefixtures("machine", "one_core"),
    pytest.mark.timeout(1800),
    pytest.mark.slow,
    pytest.mark.skipif(PYTHON not in os.environ, reason=f"{PYTHON} names no interpreter"),
]

LIMITS = Limits(start_s=120.0, hang_s=30.0, stop_s=5.0, patience=Patience(first_s=0.05, of_one=12))
SHARED = Path("/dev/shm")
BLOWS = 7
"""Some 90 s of blows for each rank, most of them vLLM's start."""


@pytest.mark.parametrize(("ranks", "seed"), [(1, 0), (2, 1)])
def test_a_run_whose_vllm_is_killed_and_stopped_at_random_is_whole(
    ranks: int, seed: int, tmp_path: Path
) -> None:
    policy = tiny_policy(tmp_path / "wide", layers=2, width=128, heads=4, mlp_width=256)
    graph = tiny_graph(policy, generator_knobs={"engine": "vllm", "tensor_parallel": ranks})
    places = [Place("trainer"), *(Place("generator", below) for below in range(3 + (ranks > 1)))]
    striking = RandomStriking(tmp_path / "runs", schedule(seed, places, BLOWS))
    before = set(SHARED.iterdir())
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
    assert not {
        file.name
        for file in set(SHARED.iterdir()) - before
        if file.name.startswith(("sem.", "psm", "vllm", "__KMP"))
    }
