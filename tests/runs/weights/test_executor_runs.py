"""Whole runs whose weights travel by another executor than the machine would choose."""

import os
import re
import threading
from collections import Counter
from pathlib import Path

import pyarrow.compute as pc
import pytest
from rigs.graphs import fake_graph, tiny_graph
from rigs.machine import descendants

from dataflow import GraphError, inline, run
from dataflow.folder.run_folder import RunFolder

pytestmark = [pytest.mark.usefixtures("one_core"), pytest.mark.timeout(120)]


def test_a_laptop_runs_the_path_of_a_cluster_and_trains_only_what_its_own_weights_made(
    policy: Path, machine: None, tmp_path: Path
) -> None:
    graph = tiny_graph(policy, max_staleness=0)
    result = run(
        graph, steps=3, weights="gloo", replicas={"generator": 2}, runs=tmp_path, quiet=True
    )
    folder = RunFolder.open(result.folder)
    assert (result.steps, result.verdict.clean) == (3, True), result.verdict.line
    assert any(
        "weights trainer -> generator: gloo" in line
        for line in folder.read_json("config.json")["plan"]
    )
    assert "gloo" in folder.graph_svg.read_text()
    for step in (1, 2, 3):
        versions = pc.list_flatten(folder.rollouts_of().read(step).column("versions"))
        assert set(pc.unique(versions).to_pylist()) == {-1, step - 1}


def mapped_segments() -> set[str]:
    """Of weights, that any process of this one's descendants maps."""
    segments: set[str] = set()
    for pid in descendants(os.getpid()):
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
        except OSError:
            continue
        segments |= {
            f"{pid} {path}" for path in re.findall(r"\S+/dataflow-[0-9a-f]+-[0-9a-f]{12}\b", maps)
        }
    return segments


def test_trainer_and_all_readers_of_one_host_map_the_same_segment(
    policy: Path, machine: None, tmp_path: Path
) -> None:
    processes: list[int] = []
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.05):
            of_segment = Counter(entry.split(" ")[1] for entry in mapped_segments())
            processes.append(max(of_segment.values(), default=0))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        result = run(
            tiny_graph(policy), steps=8, replicas={"generator": 3}, runs=tmp_path, quiet=True
        )
    finally:
        ended.set()
        watcher.join()
    assert result.verdict.clean, result.verdict.line
    assert max(processes) >= 1 + 3, "a process that one of them forks maps it as well"
    sent = RunFolder.open(result.folder).read_metrics()[-1]["weights_sent"]
    assert set(sent) == {"generator-0", "generator-1", "generator-2"}


def test_a_choice_that_cannot_be_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    for on, weights in ((None, "cuda_ipc"), (inline(), "gloo")):
        with pytest.raises(GraphError, match=f"by {weights}, which needs"):
            run(fake_graph(), on=on, weights=weights, runs=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
