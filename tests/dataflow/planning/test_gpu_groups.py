"""Who shares devices with whom, who takes turns, and which sharing is refused."""

from typing import Any

import pytest
from rigs.graphs import fake_graph, reward

from dataflow import Graph, GraphError, Model
from dataflow.app import main
from dataflow.planning.gpu_groups import at_once, awake_at_once, read_wishes
from dataflow.planning.hosts import Devices
from dataflow.planning.placement import Need
from dataflow.planning.plan import Plan, plan
from dataflow.scheduler import scaling
from dataflow.scheduler.table import Table
from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer
from operators import Generator, Prompts, Trainer
from operators.credit import advantage

PAIR = ("generator", "trainer")


def planned(
    gpus: Any, *, count: int = 0, cpus: int = 4, graph: Graph | None = None, **how: Any
) -> Plan:
    return plan(graph or fake_graph(), Devices(cpus=cpus, gpus=count), gpus=gpus, **how)


def real(feedback: bool = True, **knobs: Any) -> Graph:
    g, model = Graph("real"), Model("policy")
    generator, trainer = Generator(model, **knobs), Trainer(model, prompts_per_step=2)
    if not feedback:
        generator = Generator(Model("teacher").frozen(), **knobs)
    trainer(advantage(reward(generator(g.source(Prompts([{"prompt": "a"}]))))))
    if feedback:
        g.feedback(trainer.weights, generator, max_staleness=0)
    return g


@pytest.mark.parametrize(
    ("gpus", "count", "turns", "devices"),
    [
        ({"generator": 8, "trainer": "generator"}, 8, (PAIR,), "gpu 0-7"),
        ({"trainer": 2, "generator": "trainer"}, 8, (PAIR,), "gpu 0-1"),
        ({"trainer": "generator"}, 0, (PAIR,), "main memory"),
        ("shared", 0, (PAIR,), "main memory"),
        ("shared", 2, (PAIR,), "gpu 0-1"),
        ({"generator": 1, "trainer": 1}, 2, (), ""),
        (None, 2, (), ""),
    ],
)
def test_a_node_that_names_another_takes_turns_with_it(
    gpus: Any, count: int, turns: Any, devices: str
) -> None:
    made = planned(gpus, count=count)
    assert made.turns == turns
    assert made.placements["trainer"].gpus == made.placements["generator"].gpus or not turns
    told = [line for line in made.explain().splitlines() if "take turns" in line]
    wanted = (
        f"'generator' and 'trainer' take turns on {devices}: one is awake at a time, the others"
        " have given their "
    )
    assert told == ([wanted + "memory back and wait until its work is done"] if turns else [])
    assert any("in turn with trainer" in frame.label for frame in made.frames()) == bool(turns)


def test_shared_is_all_that_computes() -> None:
    assert read_wishes(fake_graph(), "shared", 3) == {"generator": 3, "trainer": "generator"}
    assert read_wishes(fake_graph(), "shared", 0) == {"trainer": "generator"}


def test_who_takes_turns_has_all_cores_in_its_turn() -> None:
    asynchronous, shared = planned(None), planned("shared")
    assert [asynchronous.placements[node].threads for node in PAIR] == [2, 2]
    assert [shared.placements[node].threads for node in PAIR] == [4, 4]
    assert at_once((("a", "b"), ("c",)), {"a": 2, "b": 3, "c": 1, "d": 4}) == 8


def test_of_nodes_in_turn_the_larger_one_counts_on_each_device_and_all_replicas_of_it() -> None:
    need = {size: Need({"weights": size}) for size in (1, 2, 3, 5)}
    needs = [
        ("generator-0", "generator", "cpu", need[2]),
        ("generator-1", "generator", "cpu", need[2]),
        ("trainer-0", "trainer", "cpu", need[3]),
        ("judge-0", "judge", "cpu", need[1]),
        ("generator-2", "generator", "cuda:0", need[2]),
        ("trainer-0.1", "trainer", "cuda:0", need[5]),
    ]
    found = [process for process, _, _ in awake_at_once((PAIR,), needs)]
    assert found == ["generator-0", "generator-1", "judge-0", "trainer-0.1"]
    assert len(awake_at_once((), needs)) == len(needs)


@pytest.mark.parametrize(
    ("gpus", "graph", "message"),
    [
        ("all", None, r"gpus is 'all', which says nothing; .* or 'shared'"),
        (
            {"trainer": "trainer"},
            None,
            r"'trainer' is to share the devices of 'trainer', which has none of its own",
        ),
        ({"trainer": "judge"}, None, r"devices of 'judge' are to be shared, but the graph has"),
        ({"reward": "generator"}, None, r"'reward' is to share devices, but it uses none"),
        (
            "shared",
            real(engine="vllm"),
            r"'generator' cannot take turns .*\['trainer'\]: it keeps its memory",
        ),
    ],
)
def test_sharing_that_cannot_work_is_refused_and_says_why(
    gpus: Any, graph: Graph | None, message: str
) -> None:
    with pytest.raises(GraphError, match=message):
        planned(gpus, graph=graph)


def test_replicas_that_join_get_the_devices_that_their_node_shares() -> None:
    made = planned(
        {"generator": 2, "trainer": "generator"},
        count=3,
        replicas={"generator": 2},
        ranks={"trainer": 2},
    )
    table = Table(graph=fake_graph(), plan=made)
    scaling.check(table, {"generator": 3})
    with pytest.raises(GraphError, match="3 GPUs have room for 3 beside the others"):
        scaling.check(table, {"generator": 4})


@pytest.mark.parametrize("knobs", [{"tensor_parallel": 2}, {"feedback": False}])
def test_generators_of_several_ranks_and_frozen_ones_take_turns(knobs: Any) -> None:
    assert planned("shared", graph=real(**knobs)).turns == (PAIR,)


def test_the_command_line_says_it_in_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    def build() -> Graph:
        g, model = Graph("tiny"), Model("fake-policy")
        generator, trainer = FakeGenerator(model=model), FakeTrainer(model=model)
        trainer(generator(g.source(FakePrompts(size=None))))
        g.feedback(trainer.weights, generator, max_staleness=0)
        return g

    main(build, args=["--gpus", "trainer=generator", "--explain"])
    assert "take turns on main memory" in capsys.readouterr().out
