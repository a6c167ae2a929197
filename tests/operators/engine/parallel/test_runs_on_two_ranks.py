"""A whole run with a generator on two ranks is the run that one process makes."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from rigs.graphs import tiny_graph

from dataflow import RunError, run
from dataflow.run_folder import RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240), pytest.mark.usefixtures("machine", "one_core")]


def followers() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if "operators.engine.parallel.follower" in process.cmdline():
                found.append(process)
        except psutil.Error:
            continue
    return found


def first_step(result: Any) -> list[Any]:
    return list(RunFolder.open(result.folder).read_rollouts(1).column("tokens").to_pylist())


def test_a_run_on_two_ranks_samples_what_one_rank_samples_and_takes_every_version(folder: Path, tmp_path: Path) -> None:
    results = [
        run(
            tiny_graph(folder, max_staleness=0, generator_knobs={"tensor_parallel": ranks}),
            steps=3, seed=1, runs=tmp_path / str(ranks), quiet=True,
        )
        for ranks in (1, 2)
    ]  # fmt: skip
    assert [result.steps for result in results] == [3, 3]
    assert results[1].verdict.clean, results[1].verdict.line
    assert first_step(results[0]) == first_step(results[1])
    versions = RunFolder.open(results[1].folder).read_rollouts(3).column("versions").to_pylist()
    assert {max(row) for row in versions} == {2}
    assert followers() == []


def test_a_run_whose_generator_loses_a_rank_ends_with_its_name_and_leaves_no_process(
    folder: Path, tmp_path: Path
) -> None:
    def kill() -> None:
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            if list(tmp_path.glob("*/rollouts/*1.arrow")):
                for process in followers():
                    os.kill(process.pid, signal.SIGKILL)
                return
            time.sleep(0.05)

    threading.Thread(target=kill, daemon=True).start()
    with pytest.raises(RunError, match=r"rank 1 of 'generator' .* ended by signal 9"):
        run(tiny_graph(folder, generator_knobs={"tensor_parallel": 2}), steps=10_000, runs=tmp_path, quiet=True)
    assert followers() == []
