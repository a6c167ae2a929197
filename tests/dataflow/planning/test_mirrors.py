"""The plan says which readers of a host share one way of their weights over the network, and who
takes them in.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from dataflow import Devices, Graph, Model, plan
from dataflow.planning.executors import WeightPath
from dataflow.planning.hosts import Host
from dataflow.planning.mirrors import mirror_lines, mirrored, readers_beside
from dataflow.planning.plan import Plan
from dataflow.runner import make_plan
from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer
from dataflow.weight_ends import Refresh

POLICY = Model("policy")


def build() -> Graph:
    graph, trainer, generator = (
        Graph("test"),
        FakeTrainer(model=POLICY),
        FakeGenerator(model=POLICY),
    )
    trainer(generator(graph.source(FakePrompts())))
    graph.feedback(trainer.weights, generator, max_staleness=1)
    return graph


def made(place: Mapping[str, Any], replicas: int, hosts: str = "abc", **how: Any) -> Plan:
    devices = Devices.of([Host(name=name, cpus=4) for name in hosts])
    return make_plan(build(), devices=devices, replicas={"generator": replicas}, place=place, **how)


def path(reader: str, replica: int, host: str, **facts: Any) -> WeightPath:
    known: dict[str, Any] = {
        "executor": "gloo",
        "is_apart": True,
        "nbytes": 100,
        "whole_bytes": 100,
    }
    return WeightPath(
        trainer="trainer", reader=reader, replica=replica, host=host, **(known | facts)
    )


def takers(paths: Sequence[WeightPath]) -> dict[str, str]:
    return {each.name: each.mirror for each in mirrored(paths)}


def test_of_the_readers_of_a_host_the_first_takes_versions_in_for_all_of_them() -> None:
    plan = made({"trainer": "a", "generator": ("b", "c")}, 4)
    assert [each.mirror for each in plan.weight_paths] == [
        "generator-0",
        "generator-1",
        "generator-0",
        "generator-1",
    ]
    assert plan.readers_beside("trainer", None, "b") == ("generator-0", "generator-2")
    assert plan.readers_beside("trainer", None, "c") == ("generator-1", "generator-3")
    assert plan.executors() == {("trainer", "generator"): "gloo x2, handed on x2"}
    assert (
        "weights trainer -> b and c: of 2 readers (generator) of each host one ('generator-0' on b)"
        " takes each version over the network, and hands it to 1 other in shared memory"
        in plan.explain().splitlines()
    )


def test_readers_beside_their_trainer_and_those_that_are_alone_on_a_host_take_their_own() -> None:
    plan = made({"trainer": "a", "generator": ("a", "b", "c")}, 5)
    assert {each.name: each.mirror for each in plan.weight_paths} == {
        "generator-0": "",
        "generator-1": "generator-1",
        "generator-2": "",
        "generator-3": "",
        "generator-4": "generator-1",
    }
    assert (
        plan.readers_beside("trainer", None, "a") == plan.readers_beside("trainer", None, "c") == ()
    )
    assert plan.readers_beside("trainer", None, "nowhere") == ()


def test_an_executor_that_the_user_names_is_taken_by_all() -> None:
    plan = made({"trainer": "a", "generator": "b"}, 3, weights="gloo")
    assert {each.mirror for each in plan.weight_paths} == {""} and "handed on" not in plan.explain()


def test_the_picture_says_that_versions_are_handed_on(tmp_path: Path) -> None:
    plan = made({"trainer": "a", "generator": "b"}, 3)
    for suffix in ("svg", "dot", "mmd", "html"):
        assert "gloo x1, handed on x2" in build().draw(tmp_path / f"g.{suffix}", plan).read_text()


@pytest.mark.parametrize(
    ("ranks", "nbytes", "pays"),
    [
        (1, 100, False),
        (2, 50, False),
        (2, 60, False),
        (2, 75, True),
        (4, 50, True),
        (2, None, False),
    ],
)
def test_ranks_of_one_reader_share_where_they_need_the_same_pieces(
    ranks: int, nbytes: int | None, pays: bool
) -> None:
    """Layers alone they share out, and each takes its own; embeddings and head each of them needs
    whole.
    """
    one = path("reference", 0, "b", ranks=ranks, nbytes=nbytes)
    assert takers([one]) == {"reference-0": "reference-0" if pays else ""}
    if pays:
        assert mirror_lines(mirrored([one])) == [
            "weights trainer -> b: of 1 reader (reference) 'reference-0' takes each version over"
            " the network, and hands it to all of its ranks in shared memory"
        ]


def test_what_differs_is_not_shared() -> None:
    """Another trainer, other versions, another host; a reader that a GPU's memory is reached by
    nccl.
    """
    assert set(takers([path("generator", 0, "b"), path("generator", 1, "c")]).values()) == {""}
    assert set(
        takers(
            [path("generator", 0, "b"), path("reference", 0, "b", refresh=Refresh(every=2))]
        ).values()
    ) == {""}
    assert set(takers([path("generator", n, "b", executor="nccl") for n in range(2)]).values()) == {
        ""
    }
    both = [path("generator", 0, "b"), path("judge", 0, "b")]
    assert takers(both) == {"generator-0": "generator-0", "judge-0": "generator-0"}
    assert readers_beside(mirrored(both), "trainer", None, "b") == ("generator-0", "judge-0")


def test_a_plan_over_very_many_hosts_says_it_in_one_line() -> None:
    paths = [path("generator", replica, f"h{replica // 8}") for replica in range(4096)]
    (line,) = mirror_lines(mirrored(paths))
    assert line.startswith(
        "weights trainer -> h0, h1 and 510 more: of 8 readers (generator) of each host one"
    )
    assert line.endswith("hands it to 7 others in shared memory")


def test_a_run_on_one_machine_has_none() -> None:
    assert {
        each.mirror
        for each in plan(build(), Devices(cpus=2), replicas={"generator": 3}).weight_paths
    } == {""}
