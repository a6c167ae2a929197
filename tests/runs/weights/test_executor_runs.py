"""Whole runs whose weights travel by another executor than the machine would choose."""

from pathlib import Path

import pyarrow.compute as pc
import pytest
from rigs.graphs import fake_graph, tiny_graph

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


def test_a_choice_that_cannot_be_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    for on, weights in ((None, "cuda_ipc"), (inline(), "gloo")):
        with pytest.raises(GraphError, match=f"by {weights}, which needs"):
            run(fake_graph(), on=on, weights=weights, runs=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
