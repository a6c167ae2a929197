"""Where replicas sit in a run over hosts: ranks together, no host overloaded, light workers beside
their neighbours.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from dataflow import Devices, Graph, GraphError, Model, Plan, plan, scorer
from dataflow.history.describe import plan_facts
from dataflow.node import Split, Traits
from dataflow.planning.hosts import Host
from dataflow.planning.model_size import ModelSize
from dataflow.runner import make_plan
from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer
from operators import Logprobs

POLICY = Model("policy")


@scorer
def reward(completion: str) -> float:
    """Characters."""
    return float(len(completion))


@scorer(per="group")
def advantage(reward: Any) -> Any:
    """How much better than its siblings."""
    return reward - reward.mean()


@dataclass(frozen=True, eq=False)
class DealtOut(FakeGenerator):
    """A generator whose model may lie on several devices."""

    tensor_parallel: int = 2

    @property
    def traits(self) -> Traits:
        return dataclasses.replace(
            super().traits, split=Split(tensor_parallel=self.tensor_parallel)
        )


def build(generator: FakeGenerator | None = None, max_staleness: int = 1) -> Graph:
    graph, trainer = Graph("test"), FakeTrainer(model=POLICY)
    generator = generator or FakeGenerator(model=POLICY)
    trainer(reward(generator(graph.source(FakePrompts()))))
    graph.feedback(trainer.weights, generator, max_staleness=max_staleness)
    return graph


def hosts(count: int, **facts: int) -> Devices:
    return Devices.of([Host(name=name, **({"cpus": 4} | facts)) for name in "abcdefgh"[:count]])


def where(made: Plan) -> dict[str, tuple[str, ...]]:
    return {node: placement.hosts for node, placement in made.placements.items()}


# The rule


def test_replicas_and_a_trainer_have_a_host_each_and_scorers_sit_beside_their_generator() -> None:
    made = plan(build(), hosts(3), replicas={"generator": 2})
    assert where(made) == {
        "prompts": ("a",),
        "generator": ("a", "b"),
        "reward": ("a",),
        "trainer": ("c",),
    }
    assert [made.host("generator", 1), made.host("reward", 0)] == ["b", "a"]
    assert made.placements["generator"].threads == made.placements["trainer"].threads == 4


def test_a_light_worker_sits_where_most_of_its_neighbours_are() -> None:
    made = plan(build(), hosts(2), replicas={"generator": 3}, place={"trainer": "b"})
    assert where(made)["generator"] == ("a", "a", "b") and where(made)["reward"] == ("b",)


def test_light_operators_behind_a_reference_sit_beside_it_and_its_trainer() -> None:
    graph, trainer, generator = (
        Graph("test"),
        FakeTrainer(model=POLICY),
        FakeGenerator(model=POLICY),
    )
    reference = Logprobs(POLICY.frozen(), name="reference")
    trainer(advantage(reference(reward(generator(graph.source(FakePrompts()))))))
    graph.feedback(trainer.weights, generator, max_staleness=1)
    made = plan(graph, hosts(2), place={"generator": "a", "reference": "b", "trainer": "b"})
    assert where(made)["reward"] == ("a",) and where(made)["advantage"] == ("b",)


def test_a_machine_of_its_own_is_planned_as_before_and_a_single_host_alike_but_for_its_name() -> (
    None
):
    one = Host(name="only", cpus=8, gpus=8)
    how: dict[str, Any] = {"gpus": {"generator": 6, "trainer": 2}}
    alone, named = (
        plan(build(), Devices(cpus=8, gpus=8), **how),
        plan(build(), Devices.of([one]), **how),
    )
    for node, placement in named.placements.items():
        assert set(placement.hosts) == {"only"}
        bare = dataclasses.replace(placement, hosts=(), first_gpus=())
        assert bare == alone.placements[node]
    assert alone.weight_paths == named.weight_paths
    assert alone.placements["trainer"].gpus == (6, 7)


def test_the_largest_unit_on_accelerators_has_its_host_first_and_others_fill_what_is_left() -> None:
    made = plan(build(), hosts(2, gpus=8), gpus={"generator": 8, "trainer": 8})
    generator, trainer = made.placements["generator"], made.placements["trainer"]
    assert (trainer.hosts, trainer.ranks, trainer.gpus) == (("a",), 8, tuple(range(8)))
    assert (set(generator.hosts), generator.gpus) == ({"b"}, tuple(range(8, 16)))
    assert [generator.device(replica) for replica in (0, 7)] == [
        "cuda:0",
        "cuda:7",
    ], "numbers on its own host"


def test_ranks_stay_together_where_a_row_would_cross_hosts() -> None:
    made = plan(build(DealtOut(model=POLICY)), hosts(3, gpus=3), gpus={"generator": 6})
    generator = made.placements["generator"]
    assert generator.hosts == ("a", "b", "c") and generator.gpus == (0, 1, 3, 4, 6, 7)
    assert [generator.device(2, rank) for rank in (0, 1)] == ["cuda:0", "cuda:1"]
    with pytest.raises(
        GraphError,
        match=r"each replica of 'generator' needs 2 GPUs in a row on one host, of 4 that are",
    ):
        plan(build(DealtOut(model=POLICY)), hosts(3, gpus=3), gpus={"generator": 8})


def test_those_who_take_turns_sit_on_one_host() -> None:
    for how in (
        {"gpus": {"generator": 4, "trainer": "generator"}},
        {"gpus": {"trainer": "generator"}, "replicas": {"generator": 2}},
    ):
        made = plan(build(), hosts(2, gpus=4), **how, place={"trainer": "b"})
        assert (
            set(made.placements["generator"].hosts)
            == set(made.placements["trainer"].hosts)
            == {"b"}
        )
    shared = plan(
        build(),
        hosts(2, gpus=4),
        gpus={"generator": 4, "trainer": "generator"},
        place={"generator": "b"},
    )
    assert shared.placements["trainer"].gpus == shared.placements["generator"].gpus == (4, 5, 6, 7)


def test_cpu_processes_go_where_fewest_are_per_core_and_threads_are_shared_host_by_host() -> None:
    devices = Devices.of([Host(name="small", cpus=2), Host(name="large", cpus=12)])
    made = plan(build(), devices, replicas={"generator": 6})
    generator = made.placements["generator"]
    assert [*generator.hosts, *made.placements["trainer"].hosts].count("small") == 1
    assert {
        generator.threads_of(replica)
        for replica, host in enumerate(generator.hosts)
        if host == "large"
    } == {2}
    assert {
        generator.threads_of(replica)
        for replica, host in enumerate(generator.hosts)
        if host == "small"
    } <= {2}
    uneven = plan(
        build(),
        devices,
        replicas={"generator": 2},
        place={"generator": ("small", "large"), "trainer": "large"},
    )
    assert (
        uneven.placements["generator"].threads_there == (2, 6)
        and uneven.placements["generator"].threads_of(9) == 2
    )


def test_memory_counts_host_by_host() -> None:
    sizes = {"policy": ModelSize(parameters=1000)}
    room = {"tight": 5_000, "wide": 90_000}
    devices = Devices.of(
        [Host(name=name, cpus=4, memory_bytes=size) for name, size in room.items()]
    )
    assert where(plan(build(), devices, sizes=sizes))["trainer"] == ("wide",), (
        "it needs 16,000 bytes"
    )
    with pytest.raises(
        GraphError, match="does not fit into main memory of host 'tight'.*'trainer-0'"
    ):
        plan(build(), devices, sizes=sizes, place={"trainer": "tight"})
    gpus = Devices.of(
        [Host(name=name, cpus=4, gpus=1, gpu_memory_bytes=size) for name, size in room.items()]
    )
    made = plan(build(), gpus, gpus={"trainer": 1, "generator": 1}, sizes=sizes)
    assert (where(made)["trainer"], where(made)["generator"]) == (("wide",), ("tight",))


# Weights


def test_weights_go_by_memory_within_a_host_and_by_collectives_between_two() -> None:
    made = plan(
        build(),
        hosts(2),
        replicas={"generator": 3},
        place={"trainer": "a", "generator": ("b", "a")},
    )
    assert where(made)["generator"] == ("b", "a", "b")
    assert [path.executor for path in made.weight_paths] == ["gloo", "shared_memory", "gloo"]
    made = plan(build(), hosts(2, gpus=4), gpus={"trainer": 2, "generator": 4})
    assert [made.executor("trainer", "generator", replica) for replica in range(4)] == [
        "cuda_ipc",
        "cuda_ipc",
        "nccl",
        "nccl",
    ]


def test_who_has_moved_gets_weights_as_its_new_host_allows() -> None:
    made = plan(
        build(),
        hosts(2),
        replicas={"generator": 2},
        place={"trainer": "a", "generator": ("a", "b")},
    )
    assert made.executor("trainer", "generator", 0, apart=True) == "gloo"
    assert made.executor("trainer", "generator", 1, apart=False) == "shared_memory"
    forced = plan(build(), hosts(2), replicas={"generator": 2}, weights="gloo")
    assert forced.executor("trainer", "generator", 0, apart=False) == "gloo"


# Pins and refusals


def test_pinned_replicas_take_their_hosts_in_turn_before_anybody_else_is_seated() -> None:
    made = make_plan(
        build(),
        devices=hosts(3, gpus=2),
        gpus={"generator": 4, "trainer": 2},
        place={"generator": ("a", "c")},
    )
    assert where(made)["generator"] == ("a", "c", "a", "c") and where(made)["trainer"] == ("b",)
    assert made.placements["generator"].gpus == (0, 4, 1, 5)


# Pins and refusals


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (
            {"place": {"generator": "z"}},
            r"'generator' is to be on host 'z', but the run has \['a', 'b'\]; name one",
        ),
        (
            {"place": {"genrator": "a"}},
            r"given to 'genrator', but the graph has .*did you mean 'generator'",
        ),
        (
            {"place": {"generator": ("a", "b")}},
            r"on 2 hosts, a, b, but has 1 replica, .*name 1 at most",
        ),
        ({"place": {"trainer": ("a", "b")}}, r"all ranks of a replica are on one host"),
        (
            {"place": {"generator": ()}},
            r"'generator' is to be on hosts \[\]; name one or more, each of them once",
        ),
        ({"place": {"generator": ("a", "a")}, "replicas": {"generator": 2}}, r"each of them once"),
        (
            {"gpus": {"trainer": 3}},
            r"'trainer' needs 3 GPUs in a row on one host, but 'a' has 2 of 2 GPUs free",
        ),
        (
            {"gpus": {"trainer": 5}},
            r"the run asks for 5 GPUs, \{'trainer': 5\}, but its 2 hosts have 4",
        ),
        (
            {"ranks": {"trainer": 5}},
            r"'trainer' needs 5 cores on one host, but 'a' has 4 cores, 'b' has 4 cores",
        ),
        (
            {"gpus": {"trainer": 2, "generator": 1}, "place": {"trainer": "b", "generator": "b"}},
            (
                r"'generator' needs 1 GPU on host 'b', where place puts it, but 'b' has 0 of 2 GPUs"
                r" free; name another"
            ),
        ),
        (
            {"gpus": {"generator": 3, "trainer": "generator"}},
            (
                r"'generator' and 'trainer', which take turns, needs 3 GPUs in a row on one host,"
                r" but 'a' has 2 of 2"
            ),
        ),
        (
            {
                "gpus": {"generator": 2, "trainer": "generator"},
                "place": {"generator": "a", "trainer": "b"},
            },
            (
                r"place puts 'generator' on a, 'trainer' on b, but they take turns on the same"
                r" devices; name one host"
            ),
        ),
        ({"gpus": {"reward": 1}}, r"'reward' is given 1 GPUs, but it uses no device; leave it out"),
        (
            {"weights": "shared_memory"},
            r"cannot be forced to go by shared_memory in a run over hosts.*gloo",
        ),
        (
            {"one_process": True},
            r"a run in one process has one machine, but is to be planned over 2 hosts",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(how: Mapping[str, Any], said: str) -> None:
    with pytest.raises(GraphError, match=said):
        plan(build(), hosts(2, gpus=2), **how)


def test_light_operators_of_one_worker_are_pinned_together_and_one_machine_names_no_host() -> None:
    graph, generator = Graph("test"), FakeGenerator(model=POLICY)
    FakeTrainer(model=Model("other"))(advantage(reward(generator(graph.source(FakePrompts())))))
    assert where(plan(graph, hosts(2), place={"advantage": "b"}))["reward"] == ("b",)
    with pytest.raises(
        GraphError, match="'reward' on a, 'advantage' on b, but they share a worker"
    ):
        plan(graph, hosts(2), place={"reward": "a", "advantage": "b"})
    with pytest.raises(
        GraphError,
        match="but this run has this machine alone; run it over hosts, or leave place= out",
    ):
        plan(graph, Devices(cpus=2), place={"generator": "a"})


# Ports


@dataclass(frozen=True, eq=False)
class Listening(FakeGenerator):
    """A generator whose replicas each listen on a port."""

    port: int = 0

    @property
    def traits(self) -> Traits:
        return dataclasses.replace(super().traits, port=self.port)


def test_two_replicas_on_one_host_cannot_listen_on_one_port() -> None:
    said = (
        r"'generator-0' and 'generator-{}' would both listen on port 8100 of {}, where only one"
        r" can; give port=0"
    )
    graph = build(Listening(model=POLICY, port=8100))
    with pytest.raises(GraphError, match=said.format(1, "this machine")):
        plan(graph, Devices(cpus=4), replicas={"generator": 2})
    with pytest.raises(GraphError, match=said.format(2, "host 'a'")):
        plan(graph, hosts(2), replicas={"generator": 3}, place={"generator": ("a", "b")})
    assert where(plan(graph, hosts(2), replicas={"generator": 2}))["generator"] == ("a", "b")
    assert plan(graph, Devices(cpus=4)).placements["generator"].port == 8100
    free = plan(build(Listening(model=POLICY)), Devices(cpus=4), replicas={"generator": 2})
    assert free.placements["generator"].replicas == 2


def test_replicas_that_listen_on_one_port_have_a_host_each_while_there_are_so_many() -> None:
    devices = Devices.of([Host(name="wide", cpus=64), Host(name="small", cpus=2)])
    graph = build(Listening(model=POLICY, port=8100))
    made = plan(graph, devices, replicas={"generator": 2})
    assert where(made)["generator"] == ("wide", "small")
    free = plan(build(Listening(model=POLICY)), devices, replicas={"generator": 2})
    assert where(free)["generator"] == ("wide", "wide")


# For people


def test_the_plan_tells_of_every_host_what_it_has_and_of_those_that_are_alike_once() -> None:
    facts = {"cpus": 96, "gpus": 8, "gpu_memory_bytes": 80 << 30}
    devices = Devices.of([Host(name=f"n{number}", kind="H100", **facts) for number in range(40)])
    text = plan(build(), devices, gpus={"generator": 300, "trainer": 8}).explain().splitlines()
    assert text[0].endswith("hosts") and text[3].endswith(
        "300 GPUs       -       n1, n2 and 36 more"
    )
    assert [line for line in text if line.startswith("host")] == [
        "host n0 (H100, 96 cores, 8 GPUs of 80.0 GiB): trainer on gpu 0-7",
        "host n1 (H100, 96 cores, 8 GPUs of 80.0 GiB): prompts, 8 x generator on gpu 0-7, reward",
        (
            "hosts n2, n3 and 34 more (H100, 96 cores, 8 GPUs of 80.0 GiB): each 8 x generator on"
            " gpu 0-7"
        ),
        "host n38 (H100, 96 cores, 8 GPUs of 80.0 GiB): 4 x generator on gpu 0-3",
        "host n39 (H100, 96 cores, 8 GPUs of 80.0 GiB): nothing",
    ]
    turns = plan(
        build(),
        hosts(2, gpus=4),
        gpus={"generator": 4, "trainer": "generator"},
        place={"trainer": "b"},
    )
    assert "'generator' and 'trainer' take turns on gpu 0-3 of host b" in turns.explain()
    assert "weights between hosts go by gloo and nccl, not encrypted" in turns.explain()


def test_of_this_machine_alone_nothing_is_said_of_hosts() -> None:
    made = plan(build(), Devices(cpus=4, gpus=2), gpus={"generator": 1, "trainer": 1})
    assert "host" not in made.explain() and not any(frame.where for frame in made.frames())
    assert plan_facts(build(), made).keys().isdisjoint({"hosts"})


def test_frames_and_the_folder_say_where_each_node_was_planned() -> None:
    made = plan(build(), hosts(3), replicas={"generator": 2})
    assert {frame.nodes: frame.where for frame in made.frames()} == {
        ("prompts",): "host a",
        ("generator",): "hosts a and b",
        ("reward",): "host a",
        ("trainer",): "host c",
    }
    assert plan_facts(build(), made)["hosts"] == {
        "prompts": ["a"],
        "generator": ["a", "b"],
        "reward": ["a"],
        "trainer": ["c"],
    }
