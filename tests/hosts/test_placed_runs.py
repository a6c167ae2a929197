"""A run whose replicas sit where the user says, beside the trainer and apart from it."""

from collections.abc import Callable
from pathlib import Path

import pytest
from rigs.hosts.cluster import Cluster

from dataflow.folder.run_folder import RunFolder


@pytest.mark.slow
def test_weights_reach_a_reader_beside_the_trainer_by_memory_and_one_apart_over_the_network(
    make_cluster: Callable[..., Cluster], policy: Path, shared: Path
) -> None:
    """At staleness 0 no group of the second step is generated before its replica has the first
    step's weights.
    """
    cluster = make_cluster("a", "b")
    place = {"generator": ("a", "b"), "trainer": "b"}
    seen = shared / "policy"
    seen.mkdir()
    for file in policy.iterdir():
        (seen / file.name).write_bytes(file.read_bytes())
    knobs = {"policy": str(seen), "max_staleness": 0}
    cluster.start("tiny", knobs, place=place, replicas={"generator": 2}, steps=3)
    verdict = cluster.ended()
    assert verdict.clean, verdict.line
    config = RunFolder.open(cluster.run_folder).read_json("config.json")
    assert config["hosts"] == {
        "prompts": ["a"],
        "generator": ["a", "b"],
        "reward": ["b"],
        "advantage": ["b"],
        "trainer": ["b"],
    }
    assert any(
        "weights trainer -> generator: gloo x1, shared_memory x1" in line for line in config["plan"]
    )
