"""The language: what a graph says of itself, swapping, planning."""

import dataclasses
from dataclasses import dataclass

import networkx as nx
import pyarrow as pa
import pytest

from dataflow import Graph, GraphError, Model, join, scorer
from dataflow.node import Split, Traits
from dataflow.planning.hosts import Devices
from dataflow.planning.model_size import ModelSize
from dataflow.planning.plan import plan
from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer

POLICY = Model("policy")


@scorer
def reward(completion: str, answer: str, scale: float = 1.0) -> float:
    """1 for the right answer."""
    return scale * float(completion == answer)


@scorer
def length(completion: str) -> int:
    return len(completion)


def build(max_staleness: int = 2) -> Graph:
    graph, generator, trainer = (
        Graph("test"),
        FakeGenerator(model=POLICY),
        FakeTrainer(model=POLICY),
    )
    trainer(length(reward(generator(graph.source(FakePrompts())))))
    graph.feedback(trainer.weights, generator, max_staleness=max_staleness)
    return graph


def test_a_stream_keeps_its_columns_and_an_operator_adds_its_own() -> None:
    graph = Graph("test")
    stream = reward(FakeGenerator(model=POLICY)(graph.source(FakePrompts())))
    assert stream.columns["reward"] == pa.float64()
    assert {"answer", "completion", "group_id"} <= set(stream.columns)


def test_the_networkx_graph_tells_the_planes_apart_and_its_algorithms_work_on_it() -> None:
    graph = build().nx
    planes = nx.get_edge_attributes(graph, "plane")
    assert planes["prompts", "generator", "prompts"] == "data"
    assert planes["trainer", "generator", "weights"] == "weights"
    assert graph.edges["trainer", "generator", "weights"]["max_staleness"] == 2
    assert graph.edges["reward", "length", "prompts"]["added"] == ("reward",)
    data = nx.DiGraph((u, v) for u, v, plane in graph.edges(data="plane") if plane == "data")
    assert list(nx.topological_sort(data)) == [
        "prompts",
        "generator",
        "reward",
        "length",
        "trainer",
    ]
    assert not nx.is_directed_acyclic_graph(graph)


def test_one_operator_serves_the_streams_of_several_sources() -> None:
    graph, generator = Graph("test"), FakeGenerator(model=POLICY)
    first = reward(generator(graph.source(FakePrompts())))
    second = reward(generator(graph.source(FakePrompts(name="held_out"))))
    assert (first.node, first.source) == ("reward", "prompts")
    assert (second.node, second.source) == ("reward", "held_out")
    assert list(graph.operators) == ["prompts", "generator", "reward", "held_out"]


def test_applying_an_operator_again_to_the_same_stream_changes_nothing() -> None:
    graph = Graph("test")
    stream = graph.source(FakePrompts())
    generator = FakeGenerator(model=POLICY)
    assert generator(stream) == generator(stream)
    assert len(graph.calls) == 2


def test_swap_replaces_one_operator_in_a_copy_and_keeps_the_column() -> None:
    graph = build()
    swapped = graph.swap("reward", length.renamed("anything"))
    assert swapped.operators["reward"].function is length.function
    assert graph.operators["reward"].function is reward.function
    assert swapped.nx.edges["trainer", "generator", "weights"]["max_staleness"] == 2
    other = graph.swap("trainer", FakeTrainer(model=POLICY, prompts_per_step=3))
    assert other.feedbacks[0].weights.trainer.prompts_per_step == 3


def test_a_knob_given_at_the_application_makes_another_node() -> None:
    graph = Graph("test")
    rollouts = FakeGenerator(model=POLICY)(graph.source(FakePrompts()))
    reward(rollouts, scale=2.0)
    with pytest.raises(GraphError, match="two operators are called 'reward'"):
        reward(rollouts, scale=3.0)


def test_join_has_the_columns_of_all_branches() -> None:
    graph = Graph("test")
    rollouts = FakeGenerator(model=POLICY)(graph.source(FakePrompts()))
    joined = join(reward(rollouts), length(rollouts))
    assert {"reward", "length"} <= set(joined.columns)
    assert set(graph.nx.predecessors("join")) == {"reward", "length"}


def test_light_operators_in_a_row_share_a_worker() -> None:
    placements = plan(build(), Devices(cpus=2)).placements
    assert placements["reward"].worker == placements["length"].worker == "reward"
    assert (
        len({placements[node].worker for node in ("prompts", "generator", "reward", "trainer")})
        == 4
    )


def test_synchronous_operators_take_turns_on_all_cores_and_asynchronous_ones_share_them() -> None:
    synchronous = plan(build(0), Devices(cpus=4)).placements
    asynchronous = plan(build(1), Devices(cpus=4)).placements
    assert (synchronous["generator"].threads, synchronous["trainer"].threads) == (4, 4)
    assert (asynchronous["generator"].threads, asynchronous["trainer"].threads) == (2, 2)


def test_gpus_become_replicas_of_a_generator_and_ranks_of_a_trainer() -> None:
    devices = Devices(cpus=8, gpus=8)
    apart = plan(build(), devices, gpus={"generator": 6, "trainer": 2}).placements
    assert (apart["generator"].replicas, apart["generator"].gpus) == (6, (0, 1, 2, 3, 4, 5))
    assert (apart["trainer"].ranks, apart["trainer"].gpus) == (2, (6, 7))
    assert apart["generator"].device(5) == "cuda:5"
    shared = plan(build(), devices, gpus={"generator": 8, "trainer": "generator"}).placements
    assert shared["trainer"].gpus == shared["generator"].gpus == tuple(range(8))


@dataclass(frozen=True, eq=False)
class DealtOut(FakeGenerator):
    """A generator whose model may lie on several devices."""

    tensor_parallel: int = 2

    @property
    def traits(self) -> Traits:
        return dataclasses.replace(
            super().traits, split=Split(tensor_parallel=self.tensor_parallel)
        )


def dealt_out(max_staleness: int = 2) -> Graph:
    return build(max_staleness).swap("generator", DealtOut(model=POLICY))


def test_a_replica_of_a_tensor_parallel_generator_takes_as_many_gpus_as_it_has_ranks() -> None:
    devices = Devices(cpus=8, gpus=8)
    sizes = {"policy": ModelSize(parameters=1000)}
    placements = plan(
        dealt_out(), devices, gpus={"generator": 6, "trainer": 1}, sizes=sizes
    ).placements
    generator = placements["generator"]
    assert (generator.replicas, generator.ranks) == (3, 2)
    assert [generator.device(replica) for replica in range(3)] == ["cuda:0", "cuda:2", "cuda:4"]
    assert generator.memory_bytes == 1000 * 4 // 2
    # a version on its way to readers lies there too
    assert placements["trainer"].memory_bytes == 1000 * (16 + 4)


def test_gpus_that_do_not_make_whole_replicas_are_refused() -> None:
    with pytest.raises(
        GraphError, match=r"given 3 GPUs, but each of its replicas takes 2 .*multiple of 2"
    ):
        plan(dealt_out(), Devices(cpus=8, gpus=8), gpus={"generator": 3})


def test_a_cpu_generators_ranks_share_the_cores_with_each_other_and_what_runs_beside_them() -> None:
    assert plan(dealt_out(0), Devices(cpus=4)).placements["generator"].threads == 2
    placements = plan(dealt_out(), Devices(cpus=6)).placements
    assert placements["generator"].threads == placements["trainer"].threads == 2
    assert (placements["generator"].replicas, placements["generator"].ranks) == (1, 2)


def test_the_plan_is_a_pure_function_and_explains_itself() -> None:
    first, second = plan(build(), Devices(cpus=2)), plan(build(), Devices(cpus=2))
    assert first == second
    text = first.explain()
    assert "generator" in text and "24 prompts in flight" in text
    assert "a message on a data edge has at most 64.0 MiB; a larger group goes in parts" in text
    assert "at most 128.0 KiB;" in plan(build(), Devices(cpus=2), message_bytes=1 << 17).explain()
