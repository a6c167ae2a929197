"""A whole run with a generator on two ranks is the run that one process makes, also where one of
them is killed.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from rigs.graphs import tiny_graph
from rigs.operators import struck

from dataflow import Graph, run, verify
from dataflow.errors import WorkerDied
from dataflow.folder.faults import read_faults
from dataflow.folder.run_folder import RunFolder
from dataflow.limits import Limits, Patience

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.usefixtures("machine", "one_core"),
]


def first_step(result: Any) -> list[Any]:
    return list(RunFolder.open(result.folder).rollouts_of().read(1).column("tokens").to_pylist())


def tokens(result: Any, step: int) -> dict[int, list[int]]:
    """By rollout: in which order a step has them depends on which group was complete first."""
    rows = RunFolder.open(result.folder).rollouts_of().read(step)
    return dict(
        zip(rows.column("rollout_id").to_pylist(), rows.column("tokens").to_pylist(), strict=True)
    )


def test_a_run_on_two_ranks_samples_what_one_rank_samples_and_takes_every_version(
    folder: Path, tmp_path: Path
) -> None:
    results = [
        run(
            tiny_graph(folder, max_staleness=0, generator_knobs={"tensor_parallel": ranks}),
            steps=3,
            seed=1,
            runs=tmp_path / str(ranks),
            quiet=True,
        )
        for ranks in (1, 2)
    ]
    assert [result.steps for result in results] == [3, 3]
    assert results[1].verdict.clean, results[1].verdict.line
    assert first_step(results[0]) == first_step(results[1])
    versions = (
        RunFolder.open(results[1].folder).rollouts_of().read(3).column("versions").to_pylist()
    )
    assert {max(row) for row in versions} == {2}


def losing_rank_1(graph: Graph, told: Path, times: int, after: int) -> Graph:
    """The same graph, whose generator loses rank 1 after so many slices of work, in its first
    `times` attempts; the process id of rank 1 becomes a line of `told` in every attempt that comes
    so far.
    """
    told.touch()

    def blow() -> None:
        (rank,), known = psutil.Process().children(), pids(told)
        if rank.pid in known:  # in a pause after that slice
            return
        told.write_text("".join(f"{pid}\n" for pid in [*known, rank.pid]))
        if len(known) < times:
            os.kill(rank.pid, signal.SIGKILL)

    generator = graph.operators["generator"]
    object.__setattr__(generator, "build", struck(generator, blow, after).build)
    return graph


def pids(told: Path) -> list[int]:
    return [int(line) for line in told.read_text().split()]


def death(pid: int) -> str:
    return rf"rank 1 of 'generator' \(pid {pid}\) ended by signal 9 while rank 0 waited for it in "


def test_a_generator_that_loses_a_rank_restarts_on_two_and_the_run_goes_on_as_if_it_had_not(
    folder: Path, tmp_path: Path
) -> None:
    undisturbed = run(
        tiny_graph(folder, max_staleness=0), steps=1, seed=1, runs=tmp_path / "whole", quiet=True
    )
    graph = tiny_graph(folder, max_staleness=0, generator_knobs={"tensor_parallel": 2})
    graph = losing_rank_1(graph, tmp_path / "told", times=1, after=4)
    result = run(graph, steps=3, seed=1, runs=tmp_path / "runs", quiet=True)

    killed, successor = pids(tmp_path / "told")
    assert killed != successor
    (fault,) = read_faults(result.folder)
    assert (fault["worker"], fault["attempt"], fault["recovered_s"] > 0) == ("generator-0", 0, True)
    assert re.match("failed: " + death(killed), fault["cause"]), fault["cause"]

    assert result.steps == 3 and result.verdict.clean, result.verdict.line
    assert (
        "worker 'generator-0' ended 1 times when it should not, and came back 1 times"
        in result.verdict.notes
    )
    assert tokens(result, 1) == tokens(undisturbed, 1), (
        "what was drawn before and after is what one process draws"
    )
    versions = RunFolder.open(result.folder).rollouts_of().read(3).column("versions").to_pylist()
    assert {max(row) for row in versions} == {2}


def test_a_run_whose_generator_keeps_losing_a_rank_ends_with_its_name_and_leaves_no_process(
    folder: Path, tmp_path: Path
) -> None:
    graph = tiny_graph(folder, max_staleness=0, generator_knobs={"tensor_parallel": 2})
    graph = losing_rank_1(graph, tmp_path / "told", times=2, after=1)
    limits = Limits(patience=Patience(first_s=0.05, of_one=2))
    with pytest.raises(WorkerDied, match=r"'generator-0' failed 2 times .* no progress") as raised:
        run(graph, steps=3, runs=tmp_path / "runs", quiet=True, limits=limits)

    first, second = pids(tmp_path / "told")
    assert re.search(f"{death(first)}.*{death(second)}", str(raised.value)), str(raised.value)
    ended = (tmp_path / "runs" / "latest").resolve()
    faults = [
        (fault["worker"], fault["attempt"], fault["recovered_s"] is None)
        for fault in read_faults(ended)
    ]
    assert faults == [("generator-0", 0, False), ("generator-0", 1, True)]
    assert verify(ended).clean, verify(ended).line
