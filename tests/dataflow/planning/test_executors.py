"""How weights travel is chosen from where two ranks sit, shown in the plan, and refused where it
cannot be.
"""

import dataclasses
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataflow import Graph, GraphError, Model
from dataflow.node import Split, Traits
from dataflow.planning.executors import EXECUTORS, RankSeat, choose, explain, obstacle
from dataflow.planning.hosts import Devices
from dataflow.planning.model_size import ModelSize
from dataflow.planning.plan import Plan, plan
from dataflow.runner import make_plan
from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer
from dataflow.worker.weight_ports import FanOut

POLICY = Model("policy")


SIZES = {"policy": ModelSize(parameters=2_150_000)}


GPUS = Devices(cpus=8, gpus=8)


@dataclass(frozen=True, eq=False)
class DealtOut(FakeGenerator):
    """A generator whose model may lie on several devices."""

    tensor_parallel: int = 2

    @property
    def traits(self) -> Traits:
        return dataclasses.replace(
            super().traits, split=Split(tensor_parallel=self.tensor_parallel)
        )


def build(generator: FakeGenerator | None = None) -> Graph:
    graph, trainer = Graph("test"), FakeTrainer(model=POLICY)
    generator = generator or FakeGenerator(model=POLICY)
    trainer(generator(graph.source(FakePrompts())))
    graph.feedback(trainer.weights, generator, max_staleness=1)
    return graph


def weights_line(made: Plan) -> str:
    (line,) = [line for line in made.explain().splitlines() if line.startswith("weights")]
    return line


# The choice


SEATS = [
    RankSeat(process=process, device=device, machine=machine)
    for process, device, machine in itertools.product(
        "ab", ("cpu", "cuda:0", "cuda:1"), ("here", "there")
    )
]


@pytest.mark.parametrize(
    ("source", "destination", "executor"),
    [
        (RankSeat(process="a"), RankSeat(process="a"), "local"),
        (RankSeat(process="a", device="cuda:0"), RankSeat(process="a"), "local"),
        (RankSeat(process="a"), RankSeat(process="b"), "shared_memory"),
        (RankSeat(process="a", device="cuda:0"), RankSeat(process="b"), "shared_memory"),
        (RankSeat(process="a"), RankSeat(process="b", device="cuda:0"), "shared_memory"),
        (
            RankSeat(process="a", device="cuda:0"),
            RankSeat(process="b", device="cuda:0"),
            "cuda_ipc",
        ),
        (
            RankSeat(process="a", device="cuda:0"),
            RankSeat(process="b", device="cuda:7"),
            "cuda_ipc",
        ),
        (RankSeat(process="a", machine="x"), RankSeat(process="a", machine="y"), "gloo"),
        (
            RankSeat(process="a", device="cuda:0", machine="x"),
            RankSeat(process="b", machine="y"),
            "gloo",
        ),
        (
            RankSeat(process="a", device="cuda:0", machine="x"),
            RankSeat(process="a", device="cuda:0", machine="y"),
            "nccl",
        ),
    ],
)
def test_the_executor_follows_from_where_the_two_ranks_sit(
    source: RankSeat, destination: RankSeat, executor: str
) -> None:
    assert choose([source], [destination]) == executor


def test_one_executor_serves_every_pair_of_a_trainer_s_ranks_and_a_reader_s() -> None:
    here, there = (
        (RankSeat(process="a", device="cuda:0"), RankSeat(process="b", device="cuda:1")),
        RankSeat(process="c"),
    )
    assert choose(here, [there]) == "shared_memory"
    assert choose(here, [there, RankSeat(process="d", machine="there")]) == "gloo"
    apart = [
        RankSeat(process="c", device="cuda:0", machine="there"),
        RankSeat(process="d", device="cuda:2"),
    ]
    assert choose(here, apart) == "nccl"
    assert choose(here, [*apart, RankSeat(process="e", device="cuda:1")]) == "gloo", (
        "two ranks cannot share a GPU"
    )


@pytest.mark.parametrize(("source", "destination"), [*itertools.product(SEATS, SEATS)])
def test_what_is_chosen_can_serve_and_the_choice_does_not_depend_on_the_direction(
    source: RankSeat, destination: RankSeat
) -> None:
    chosen = choose([source], [destination])
    assert obstacle(chosen, source, destination) is None
    assert chosen == choose([destination], [source])
    for executor in EXECUTORS:
        assert obstacle(executor, source, destination) == obstacle(executor, destination, source)


def test_two_processes_may_be_forced_onto_gloo_wherever_they_sit() -> None:
    for source, destination in itertools.product(SEATS, SEATS):
        together = (source.machine, source.process) == (destination.machine, destination.process)
        assert (obstacle("gloo", source, destination) is None) == (not together)


# The plan


def test_a_cpu_run_goes_through_shared_memory_and_an_inline_one_stays_within_its_process() -> None:
    made = plan(build(), Devices(cpus=2), replicas={"generator": 3}, sizes=SIZES)
    assert (
        weights_line(made)
        == "weights trainer -> generator: shared_memory (1 trainer rank -> 3 readers, up to 8.2 MiB"
        " each)"
    )
    assert [(path.replica, path.ranks, path.trainer_ranks) for path in made.weight_paths] == [
        (0, 1, 1),
        (1, 1, 1),
        (2, 1, 1),
    ]
    assert plan(build(), Devices(cpus=1), one_process=True).executors() == {
        ("trainer", "generator"): "local"
    }


def test_a_reader_of_several_ranks_needs_processes() -> None:
    with pytest.raises(
        GraphError,
        match="'generator' is to take trained weights on 2 ranks, but a run in one process",
    ):
        plan(build(DealtOut(model=POLICY)), Devices(cpus=1), one_process=True)


@dataclass(frozen=True, eq=False)
class Apart(FakeGenerator):
    """Its engine is another process."""

    @property
    def traits(self) -> Traits:
        return dataclasses.replace(super().traits, split=Split(apart=True))


def test_a_reader_whose_engine_is_another_process_needs_processes() -> None:
    with pytest.raises(GraphError, match="weights in processes of its engine, but a run in one"):
        plan(build(Apart(model=POLICY)), Devices(cpus=1), one_process=True)
    assert plan(build(Apart(model=POLICY)), Devices(cpus=2)).executors() == {
        ("trainer", "generator"): "shared_memory"
    }


def test_gpus_of_one_machine_go_by_cuda_ipc_whether_they_are_shared_or_not() -> None:
    for gpus in ({"generator": 2, "trainer": 1}, {"generator": 1, "trainer": "generator"}):
        assert plan(build(), GPUS, gpus=gpus).executors() == {("trainer", "generator"): "cuda_ipc"}
    assert plan(build(), GPUS, gpus={"trainer": 1}).executors() == {
        ("trainer", "generator"): "shared_memory"
    }


def test_every_replica_that_reads_is_in_the_plan_and_one_line_sums_them_up() -> None:
    made = plan(
        build(DealtOut(model=POLICY)), GPUS, gpus={"generator": 4, "trainer": 2}, sizes=SIZES
    )
    assert [(p.replica, p.trainer_ranks, p.ranks) for p in made.weight_paths] == [
        (0, 2, 2),
        (1, 2, 2),
    ]
    assert (
        weights_line(made)
        == "weights trainer -> generator: cuda_ipc (2 trainer ranks -> 2 readers of 2 ranks, up to"
        " 4.1 MiB each, from the weights themselves: an update waits for who is taking them)"
    )


def test_pairs_that_differ_are_counted() -> None:
    paths = plan(build(), Devices(cpus=2), replicas={"generator": 2}).weight_paths
    other = [
        type(path)(**{**_fields(path), "executor": "gloo", "replica": 2}) for path in paths[:1]
    ]
    assert explain((*paths, *other)) == [
        "weights trainer -> generator: shared_memory x2, gloo x1 (1 trainer rank -> 3 readers, from"
        " copies of the weights)"
    ]


def _fields(path: Any) -> dict[str, Any]:
    return {name: getattr(path, name) for name in path.__slots__}


def test_a_newcomer_gets_its_weights_as_the_others_do() -> None:
    made = plan(build(), Devices(cpus=2), replicas={"generator": 2})
    assert [made.executor("trainer", "generator", replica) for replica in (0, 1, 7)] == [
        "shared_memory"
    ] * 3


def test_a_graph_without_feedback_has_no_line_about_weights() -> None:
    graph = Graph("test")
    FakeTrainer(model=Model("other"))(FakeGenerator(model=POLICY)(graph.source(FakePrompts())))
    assert "weights" not in plan(graph, Devices(cpus=2)).explain()


def test_the_picture_names_the_executor_on_the_weights_edge(tmp_path: Path) -> None:
    graph = build()
    for suffix in ("svg", "dot", "mmd", "html"):
        planned = graph.draw(
            tmp_path / f"planned.{suffix}", plan(graph, Devices(cpus=2))
        ).read_text()
        bare = graph.draw(tmp_path / f"bare.{suffix}").read_text()
        assert "shared_memory" in planned and "shared_memory" not in bare


# Forced


def test_a_forced_executor_stands_in_the_plan() -> None:
    made = make_plan(build(), devices=Devices(cpus=2), weights="gloo")
    assert weights_line(made).startswith("weights trainer -> generator: gloo (")
    assert made.executor("trainer", "generator", 0) == "gloo"


# Forced


@pytest.mark.parametrize(
    ("weights", "how", "said"),
    [
        ("glo", {}, r"no weight executor 'glo'.*did you mean 'gloo'.*name one of these"),
        (
            "local",
            {},
            (
                r"by local, which needs both ends in one process; they sit on cpu and cpu; leave"
                r" weights= out"
            ),
        ),
        (
            "cuda_ipc",
            {},
            (
                r"by cuda_ipc, which needs both ends on GPUs; they sit on cpu and cpu;.*use"
                r" shared_memory"
            ),
        ),
        (
            "nccl",
            {"gpus": {"trainer": 1}},
            r"by nccl, which needs both ends on GPUs; they sit on cuda:0 and cpu",
        ),
        (
            "nccl",
            {"gpus": {"generator": 1, "trainer": "generator"}},
            r"needs a GPU of its own for each end.*cuda_ipc",
        ),
        (
            "gloo",
            {"one_process": True},
            r"needs two processes; they sit on cpu and cpu of one process;.*use local",
        ),
    ],
)
def test_a_forced_executor_that_cannot_serve_is_refused_with_what_it_needs(
    weights: str, how: dict[str, Any], said: str
) -> None:
    with pytest.raises(GraphError, match=said):
        plan(build(), GPUS, weights=weights, **how)


# Several at once


class End:
    def __init__(self, takes: bool) -> None:
        self.takes, self.calls, self.socket = takes, [], object()
        self.sent: dict[str, Any] = {}

    def publish(self, version: int, tensors: Any) -> bool:
        self.calls.append(("publish", version))
        return self.takes

    def settle(self, timeout_s: float) -> bool:
        self.calls.append(("settle", timeout_s))
        return self.takes

    def tell(self, note: Any) -> None:
        self.calls.append(("tell", note))

    def poll(self) -> None:
        self.calls.append(("poll",))


def test_a_trainer_with_readers_of_two_kinds_offers_each_version_to_both() -> None:
    first, second = End(takes=False), End(takes=True)
    both = FanOut([first, second], lambda version: version, 1.0)
    assert both.publish(1, {}) is False
    both.tell({"dropped": 2})
    both.poll()
    assert first.calls == second.calls == [("publish", 1), ("tell", {"dropped": 2}), ("poll",)]
    first.takes = True
    assert both.publish(2, {}) is True


@given(
    st.lists(
        st.tuples(*[st.sampled_from("ab")] * 2, st.sampled_from(["cpu", "cuda:0", "cuda:1"])),
        min_size=2,
    )
)
def test_of_many_ranks_sets_tell_what_all_pairs_would(
    drawn: list[tuple[str, str, str]],
) -> None:
    seats = [
        RankSeat(machine=machine, process=process, device=device)
        for machine, process, device in drawn
    ]
    for at in range(1, len(seats)):
        here, there = seats[:at], seats[at:]
        fits = [
            each
            for each in EXECUTORS
            if all(obstacle(each, a, b) is None for a in here for b in there)
        ]
        if fits:
            assert choose(here, there) == fits[0]
        else:
            with pytest.raises(StopIteration):
                choose(here, there)
