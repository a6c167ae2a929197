"""Where a worker goes whose host is lost: ranks together, no accelerator twice, the same for the
same table.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dataflow import Devices, Graph, Model, Plan, plan, scorer
from dataflow.node import Traits
from dataflow.planning.hosts import Host
from dataflow.planning.model_size import ModelSize
from dataflow.planning.placing import most_replicas, rehost
from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer
from operators import Logprobs

POLICY = Model("policy")


@dataclass(frozen=True)
class Sitting:
    """A worker in its place."""

    worker: str
    replica: int
    host: str
    gpus: tuple[int, ...] = ()
    rank_hosts: tuple[str, ...] = ()


@scorer
def reward(completion: str) -> float:
    """Characters."""
    return float(len(completion))


@dataclass(frozen=True, eq=False)
class DealtOut(FakeGenerator):
    """A generator whose model lies on several devices."""

    tensor_parallel: int = 1

    @property
    def traits(self) -> Traits:
        return dataclasses.replace(super().traits, tensor_parallel=self.tensor_parallel)


@dataclass(frozen=True, eq=False)
class Listening(FakeGenerator):
    """A generator whose replicas each listen on one port."""

    @property
    def traits(self) -> Traits:
        return dataclasses.replace(super().traits, port=8100)


def build(tensor_parallel: int = 1) -> Graph:
    graph, trainer = Graph("test"), FakeTrainer(model=POLICY)
    generator = DealtOut(name="generator", model=POLICY, tensor_parallel=tensor_parallel)
    trainer(reward(generator(graph.source(FakePrompts()))))
    graph.feedback(trainer.weights, generator, max_staleness=1)
    return graph


def hosts(count: int, **facts: int) -> Devices:
    return Devices.of([Host(name=name, **({"cpus": 4} | facts)) for name in "abcdefgh"[:count]])


def seated(made: Plan) -> list[Sitting]:
    """As the plan has it."""
    return [
        Sitting(
            worker, replica, made.host(worker, replica), made.placements[worker].gpus_of(replica)
        )
        for worker, replica, _ in made.processes()
    ]


def moved(made: Plan, devices: Devices, alive: set[str], now: Sequence[Sitting]) -> list[Sitting]:
    """Everybody in a place on hosts that live, as far as there is room; the others stay where they
    were.
    """
    now = list(now)
    for at, each in enumerate(now):
        if each.host not in alive:
            found = rehost(
                made, devices, alive, [o for o in now if o != each], each.worker, each.replica
            )
            assert found == rehost(
                made, devices, alive, [o for o in now if o != each], each.worker, each.replica
            )
            if not isinstance(found, str):
                now[at] = Sitting(each.worker, each.replica, *found)
    return now


# Examples


def test_on_the_cpu_the_workers_of_a_lost_host_go_where_there_are_fewest_per_core() -> None:
    devices = Devices.of([Host(name="a", cpus=4), Host(name="b", cpus=4), Host(name="c", cpus=16)])
    made = plan(build(), devices, place={"trainer": "a", "generator": "b"})
    found = {each.worker: each.host for each in moved(made, devices, {"b", "c"}, seated(made))}
    assert found["trainer"] == "c"


def test_on_accelerators_the_first_free_row_is_taken_and_a_joined_host_has_the_last_numbers() -> (
    None
):
    devices = hosts(3, gpus=4)
    made = plan(build(2), devices, gpus={"trainer": 2, "generator": 6})
    assert made.placements["generator"].hosts == ("a", "b", "b")
    now = {
        (each.worker, each.replica): each for each in moved(made, devices, {"b", "c"}, seated(made))
    }
    assert (
        now["trainer", 0] == Sitting("trainer", 0, "c", (8, 9)) or now["generator", 0].host == "c"
    )
    assert {each.gpus for each in now.values() if each.host == "c" and each.gpus} == {
        (8, 9),
        (10, 11),
    }
    grown = Devices.of([*devices.hosts, Host(name="late", cpus=4, gpus=8)])
    assert rehost(made, grown, {"late"}, [], "generator", 1) == ("late", (12, 13))


def test_a_light_worker_follows_its_neighbours() -> None:
    devices = hosts(3)
    made = plan(build(), devices, replicas={"generator": 2})
    assert (made.host("generator", 0), made.host("reward", 0), made.host("trainer", 0)) == (
        "a",
        "a",
        "c",
    )
    found = {
        (each.worker, each.replica): each.host
        for each in moved(made, devices, {"b", "c"}, seated(made))
    }
    assert found["reward", 0] == found["prompts", 0] == "b" and found["generator", 0] == "b"


def test_nobody_gets_between_those_who_take_turns_while_some_of_them_are_away() -> None:
    graph, trainer, generator = (
        Graph("test"),
        FakeTrainer(model=POLICY),
        FakeGenerator(model=POLICY),
    )
    trainer(Logprobs(POLICY.frozen(), name="reference")(generator(graph.source(FakePrompts()))))
    graph.feedback(trainer.weights, generator, max_staleness=1)
    devices = hosts(2, gpus=5)
    made = plan(graph, devices, gpus={"generator": 4, "trainer": "generator", "reference": 1})
    sits = [Sitting("generator", 2, "b", (7,))]
    assert rehost(made, devices, {"b"}, sits, "reference", 0) == ("b", (9,))


def test_who_takes_turns_goes_together() -> None:
    devices = hosts(2, gpus=5)
    made = plan(
        build(), devices, gpus={"generator": 4, "trainer": "generator"}, place={"trainer": "a"}
    )
    first = rehost(made, devices, {"b"}, [], "generator", 2)
    assert first == ("b", (7,)), "the third of four in a row"
    sits = [Sitting("generator", 2, "b", (7,))]
    assert rehost(made, devices, {"b"}, sits, "trainer", 0) == ("b", (5, 6, 7, 8))
    assert rehost(made, devices, {"b"}, sits, "generator", 4) == (
        "b",
        (5,),
    ), "a newcomer shares them, too"
    alone = plan(build(), devices, gpus={"generator": 2, "trainer": "generator"})
    assert (
        most_replicas(alone, devices, {"a", "b"}, [Sitting("trainer", 0, "a", (0, 1))], "generator")
        == 5
    )


def test_whoever_listens_on_a_port_goes_where_nobody_else_has_it() -> None:
    graph, trainer = Graph("test"), FakeTrainer(model=POLICY)
    generator = Listening(name="generator", model=POLICY)
    trainer(generator(graph.source(FakePrompts())))
    graph.feedback(trainer.weights, generator, max_staleness=1)
    devices = hosts(3)
    made = plan(
        graph, devices, replicas={"generator": 2}, place={"generator": ("a", "b"), "trainer": "c"}
    )
    other = Sitting("generator", 1, "b")
    assert rehost(
        made, devices, {"b", "c"}, [other, Sitting("trainer", 0, "c")], "generator", 0
    ) == ("c", ())
    assert rehost(made, devices, {"b"}, [other], "trainer", 0) == (
        "b",
        (),
    ), "who listens on none goes anywhere"
    refused = (
        "'generator-0' listens on port 8100, which another worker has on each host that is left;"
        " add a host"
    )
    assert str(rehost(made, devices, {"b"}, [other], "generator", 0)).startswith(refused)


def test_without_room_it_says_what_is_needed_and_what_there_is() -> None:
    devices = hosts(2, gpus=4)
    made = plan(build(2), devices, gpus={"trainer": 3, "generator": 2})
    sits = [each for each in seated(made) if each.worker == "trainer"]
    (host,) = {each.host for each in sits}
    assert host == "a"
    assert (
        rehost(made, devices, {"a"}, sits, "generator", 0)
        == "'generator-0' needs 2 GPUs in a row on one host, but 'a' has 1 of 4 GPUs free; add a"
        " host, or make room"
    )
    assert (
        rehost(made, devices, set(), sits, "generator", 0)
        == "'generator-0' has no host left; add one"
    )
    assert most_replicas(made, devices, {"a"}, sits, "generator") == 0
    assert most_replicas(made, devices, {"a", "b"}, sits, "generator") == 2
    sizes = {"policy": ModelSize(parameters=1000)}
    tight = Devices.of(
        [Host(name="a", cpus=4, memory_bytes=90_000), Host(name="b", cpus=4, memory_bytes=9_000)]
    )
    made = plan(build(), tight, sizes=sizes)
    said = rehost(made, tight, {"b"}, [], "trainer", 0)
    assert (
        isinstance(said, str)
        and "'trainer-0' needs 1 core and 15.6 KiB of memory" in said
        and "8.8 KiB free" in said
    )


# Laws


@st.composite
def plans(draw: st.DrawFn) -> tuple[Plan, Devices]:
    """Of one to three hosts, on accelerators or the CPU, with and without turns."""
    ranks = draw(st.sampled_from([1, 2]))
    facts = [
        {"cpus": draw(st.integers(2, 6)), "gpus": draw(st.integers(2, 6))}
        for _ in range(draw(st.integers(2, 4)))
    ]
    devices = Devices.of(
        [Host(name=name, **each) for name, each in zip("abcd", facts, strict=False)]
    )
    most = max(host.gpus for host in devices.hosts) // ranks
    way = draw(st.sampled_from(["cpu", "gpu", "turns", "cpu turns"]))
    how: dict[str, Any] = {
        "cpu": {"replicas": {"generator": draw(st.integers(1, 5))}},
        "gpu": {"gpus": {"generator": ranks * draw(st.integers(1, most)), "trainer": 1}},
        "turns": {
            "gpus": {"generator": ranks * draw(st.integers(1, most)), "trainer": "generator"}
        },
        "cpu turns": {
            "gpus": {"trainer": "generator"},
            "replicas": {"generator": draw(st.integers(1, 3))},
        },
    }
    return plan(build(ranks), devices, **how[way]), devices


@given(plans(), st.data())
def test_whoever_is_moved_has_room_and_its_ranks_are_together(
    given_: tuple[Plan, Devices], data: st.DataObject
) -> None:
    made, devices = given_
    names = [host.name for host in devices.hosts]
    now = seated(made)
    for _ in range(3):
        alive = set(data.draw(st.sets(st.sampled_from(names), min_size=1)))
        now = moved(made, devices, alive, data.draw(st.permutations(now)))
        placed = [each for each in now if each.host in alive]
        owner: dict[int, str] = {}
        for each in placed:
            placement = made.placements[each.worker]
            assert len(each.gpus) == (placement.ranks if placement.gpus else 0)
            assert {devices.host_of(gpu).name for gpu in each.gpus} <= {each.host}
            assert (
                list(each.gpus) == list(range(each.gpus[0], each.gpus[0] + len(each.gpus)))
                if each.gpus
                else True
            )
            group = made.turns_of(each.worker)
            for gpu in each.gpus:
                whose = group[0] if group else f"{each.worker}-{each.replica}"
                assert owner.setdefault(gpu, whose) == whose, f"accelerator {gpu} has two owners"
        for group in made.turns:
            assert len({each.host for each in placed if each.worker in group}) <= 1
            replicas = [each.gpus for each in placed if each.worker == "generator" and each.gpus]
            assert len(set(replicas)) == len(replicas)
        waiting = [each for each in now if each.host not in alive]
        assert all(
            made.placements[each.worker].gpus or made.placements[each.worker].ranks > 1
            for each in waiting
        )


@given(plans())
def test_with_all_hosts_alive_a_plan_s_workers_have_room_one_by_one(
    given_: tuple[Plan, Devices],
) -> None:
    made, devices = given_
    now = seated(made)
    alive = {host.name for host in devices.hosts}
    for each in now:
        found = rehost(
            made,
            devices,
            alive,
            [other for other in now if other != each],
            each.worker,
            each.replica,
        )
        assert not isinstance(found, str)


def test_of_hundreds_the_one_accelerator_that_is_free_is_found() -> None:
    devices = Devices.of([Host(name=f"h{number}", cpus=16, gpus=8) for number in range(64)])
    made = plan(build(), devices, gpus={"generator": 512})
    sits = [each for each in seated(made) if (each.worker, each.replica) != ("generator", 300)]
    assert rehost(made, devices, {host.name for host in devices.hosts}, sits, "generator", 300) == (
        "h37",
        (300,),
    )
