"""Whole runs of a trainer on several ranks: each offers its own shards, and the generator has every
version.
"""

import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from rigs.graphs import tiny_graph
from rigs.ranks import ranks_of

from dataflow import GraphError, RunError, inline, run
from dataflow.folder.run_folder import RunFolder
from dataflow.limits import Limits, Patience

pytestmark = [pytest.mark.usefixtures("machine", "one_core"), pytest.mark.timeout(180)]


def test_a_run_on_two_ranks_is_clean_and_its_generator_takes_every_version(
    policy: Path, tmp_path: Path
) -> None:
    result = run(
        tiny_graph(policy, max_staleness=0),
        ranks={"trainer": 2},
        steps=4,
        runs=tmp_path,
        quiet=True,
    )
    assert result.verdict.clean, result.verdict.line
    steps = [line for line in result.metrics if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert all(line["mismatch"] < 1e-5 for line in steps), (
        "each rank's shards have arrived, where they belong"
    )
    versions = RunFolder.open(result.folder).rollouts_of().read(4).column("versions").to_pylist()
    assert {max(row) for row in versions} == {3}


@pytest.mark.slow
def test_ranks_make_the_run_that_one_rank_makes(policy: Path, tmp_path: Path) -> None:
    found = []
    for number, (ranks, knobs) in enumerate([(1, {}), (2, {}), (4, {"tensor_parallel": 2})]):
        graph = tiny_graph(policy, max_staleness=0, lr=1e-3, eps=1e-3, **knobs)
        result = run(
            graph,
            ranks={"trainer": ranks},
            steps=3,
            seed=1,
            runs=tmp_path / str(number),
            quiet=True,
        )
        assert result.verdict.clean, result.verdict.line
        found.append(
            [(line["loss"], line["grad_norm"]) for line in result.metrics if "loss" in line]
        )
    np.testing.assert_allclose(found[1:], [found[0]] * 2, rtol=1e-3, atol=1e-6)


@pytest.mark.slow
def test_a_run_that_may_lose_no_trainer_rank_ends_with_its_name_and_leaves_no_process(
    policy: Path, tmp_path: Path
) -> None:
    def kill() -> None:
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            if list(tmp_path.glob("*/rollouts/*1.arrow")):
                for pid in ranks_of("trainer"):
                    os.kill(pid, signal.SIGKILL)
                return
            time.sleep(0.05)

    threading.Thread(target=kill, daemon=True).start()
    with pytest.raises(RunError, match=r"rank 1 of 'trainer' .* ended by signal 9"):
        run(
            tiny_graph(policy),
            ranks={"trainer": 2},
            steps=10_000,
            runs=tmp_path,
            quiet=True,
            limits=Limits(patience=Patience(of_one=1)),
        )


def test_a_run_in_one_process_has_one_rank(policy: Path, tmp_path: Path) -> None:
    with pytest.raises(GraphError, match="to run on 2 ranks, but a run in one process"):
        run(tiny_graph(policy), ranks={"trainer": 2}, on=inline(), runs=tmp_path, quiet=True)
    assert list(tmp_path.iterdir()) == []
