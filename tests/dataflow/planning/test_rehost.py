"""Where a worker goes whose host is lost: ranks together, no accelerator twice, the same for the
same table.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dataflow import Devices, Graph, Model, Plan, plan, scorer
from dataflow.node import Split, Traits
from dataflow.planning.hosts import Host
from dataflow.planning.model_size import ModelSize
from dataflow.planning.seats import Fixed, Replica, Seat
from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer
from operators import Logprobs

POLICY = Model("policy")


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
        return dataclasses.replace(
            super().traits, split=Split(tensor_parallel=self.tensor_parallel)
        )


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


def seated(made: Plan) -> dict[Replica, Seat]:
    """As the plan has it."""
    return {
        (worker, replica): Seat(
            made.host(worker, replica), made.placements[worker].gpus_of(replica)
        )
        for worker, replica, _ in made.processes()
    }


def settled(
    made: Plan,
    devices: Devices,
    alive: Collection[str],
    stay: Mapping[Replica, Seat],
    *wanted: Replica,
) -> dict[Replica, Seat]:
    """Seats for some workers, given where the others are."""
    return made.settle(devices, wanted, Fixed(seats=stay, hosts=alive))[0]


def refused(
    made: Plan, devices: Devices, alive: Collection[str], stay: Mapping[Replica, Seat], worker: str
) -> str:
    """Why a worker's first replica finds no room, without what to do."""
    seats, refusals = made.settle(devices, [(worker, 0)], Fixed(seats=stay, hosts=alive))
    assert not seats
    return refusals[worker].partition("; ")[0]


def moved(
    made: Plan, devices: Devices, alive: Collection[str], now: Mapping[Replica, Seat]
) -> dict[Replica, Seat]:
    """Everybody in a place on hosts that live, as far as there is room; the others stay where they
    were.
    """
    lost = [replica for replica, seat in now.items() if seat.host not in alive]
    found = settled(made, devices, alive, now, *lost)
    assert found == settled(made, devices, alive, now, *lost)
    return {**now, **found}


def newcomers(worker: str, numbers: Iterable[int]) -> list[Replica]:
    return [(worker, number) for number in numbers]


# Examples


def test_on_the_cpu_the_workers_of_a_lost_host_go_where_there_are_fewest_per_core() -> None:
    devices = Devices.of([Host(name="a", cpus=4), Host(name="b", cpus=4), Host(name="c", cpus=16)])
    made = plan(build(), devices, place={"trainer": "a", "generator": "b"})
    assert moved(made, devices, {"b", "c"}, seated(made))["trainer", 0].host == "c"


def test_on_accelerators_the_first_free_row_is_taken_and_a_joined_host_has_the_last_numbers() -> (
    None
):
    devices = hosts(3, gpus=4)
    made = plan(build(2), devices, gpus={"trainer": 2, "generator": 6})
    assert made.placements["generator"].hosts == ("a", "b", "b")
    now = moved(made, devices, {"b", "c"}, seated(made))
    assert {seat.gpus for seat in now.values() if seat.host == "c" and seat.gpus} == {
        (8, 9),
        (10, 11),
    }
    grown = Devices.of([*devices.hosts, Host(name="late", cpus=4, gpus=8)])
    assert settled(made, grown, {"late"}, {}, ("generator", 1)) == {
        ("generator", 1): Seat("late", (12, 13))
    }


def test_a_light_worker_follows_its_neighbours_which_are_placed_before_it() -> None:
    devices = hosts(3)
    made = plan(build(), devices, replicas={"generator": 2})
    assert (made.host("generator", 0), made.host("reward", 0), made.host("trainer", 0)) == (
        "a",
        "a",
        "c",
    )
    now = moved(made, devices, {"b", "c"}, seated(made))
    assert {now[worker, 0].host for worker in ("reward", "prompts", "generator")} == {"b"}


def test_the_largest_of_a_lost_host_is_placed_first() -> None:
    devices = hosts(3, gpus=4)
    made = plan(build(), devices, gpus={"generator": 1, "trainer": 4}, place={"trainer": "a"})
    now = {("generator", 0): Seat("c", (8,)), ("trainer", 0): Seat("a", (0, 1, 2, 3))}
    assert moved(made, devices, {"b"}, now)["trainer", 0] == Seat("b", (4, 5, 6, 7))


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
    stay = {("generator", 2): Seat("b", (7,))}
    assert settled(made, devices, {"b"}, stay, ("reference", 0)) == {
        ("reference", 0): Seat("b", (9,))
    }


def test_who_takes_turns_goes_together() -> None:
    devices = hosts(2, gpus=5)
    made = plan(
        build(), devices, gpus={"generator": 4, "trainer": "generator"}, place={"trainer": "a"}
    )
    third, trainer, newcomer = ("generator", 2), ("trainer", 0), ("generator", 4)
    stay = settled(made, devices, {"b"}, {}, third)
    assert stay == {third: Seat("b", (7,))}, "the third of four in a row"
    assert settled(made, devices, {"b"}, stay, trainer) == {trainer: Seat("b", (5, 6, 7, 8))}
    assert settled(made, devices, {"b"}, stay, newcomer) == {newcomer: Seat("b", (5,))}, (
        "a newcomer shares them, too"
    )
    assert settled(made, devices, {"b"}, {}, third, newcomer) == {
        third: Seat("b", (7,)),
        newcomer: Seat("b", (5,)),
    }
    alone = plan(build(), devices, gpus={"generator": 2, "trainer": "generator"})
    stay = {trainer: Seat("a", (0, 1))}
    found = settled(alone, devices, {"a", "b"}, stay, *newcomers("generator", range(10)))
    assert [seat.gpus for seat in found.values()] == [(0,), (1,), (2,), (3,), (4,)]


def test_whoever_listens_on_a_port_goes_where_nobody_else_has_it() -> None:
    graph, trainer = Graph("test"), FakeTrainer(model=POLICY)
    generator = Listening(name="generator", model=POLICY)
    trainer(generator(graph.source(FakePrompts())))
    graph.feedback(trainer.weights, generator, max_staleness=1)
    devices = hosts(3)
    made = plan(
        graph, devices, replicas={"generator": 2}, place={"generator": ("a", "b"), "trainer": "c"}
    )
    stay, first = {("generator", 1): Seat("b"), ("trainer", 0): Seat("c")}, ("generator", 0)
    assert settled(made, devices, {"b", "c"}, stay, first) == {first: Seat("c")}
    assert settled(made, devices, {"b"}, stay, ("trainer", 0)) == {("trainer", 0): Seat("b")}, (
        "who listens on none goes anywhere"
    )
    assert (
        refused(made, devices, {"b"}, stay, "generator")
        == "'generator' needs 1 core on one host, but 'b' has another worker on port 8100"
    )


def test_without_room_it_says_what_is_needed_and_what_there_is() -> None:
    devices = hosts(2, gpus=4)
    made = plan(build(2), devices, gpus={"trainer": 3, "generator": 2})
    stay = {replica: seat for replica, seat in seated(made).items() if replica[0] == "trainer"}
    assert {seat.host for seat in stay.values()} == {"a"}
    wanted = "'generator' needs 2 GPUs in a row on one host, but"
    assert refused(made, devices, {"a"}, stay, "generator") == f"{wanted} 'a' has 1 of 4 GPUs free"
    assert refused(made, devices, set(), stay, "generator") == f"{wanted} there is none"
    assert refused(made, devices, set(), stay, "reward") == (
        "'reward' needs 1 core on one host, but there is none"
    )
    many = newcomers("generator", range(8))
    assert len(settled(made, devices, {"a"}, stay, *many)) == 0
    assert len(settled(made, devices, {"a", "b"}, stay, *many)) == 2
    sizes = {"policy": ModelSize(parameters=1000)}
    tight = Devices.of(
        [Host(name="a", cpus=4, memory_bytes=90_000), Host(name="b", cpus=4, memory_bytes=9_000)]
    )
    made = plan(build(), tight, sizes=sizes)
    told = refused(made, tight, {"b"}, {}, "trainer")
    assert "'trainer' needs 1 core and 15.6 KiB of memory" in told and "8.8 KiB free" in told


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
        now = moved(made, devices, alive, dict(data.draw(st.permutations(list(now.items())))))
        placed = {replica: seat for replica, seat in now.items() if seat.host in alive}
        owner: dict[int, str] = {}
        for (worker, replica), seat in placed.items():
            placement, gpus = made.placements[worker], seat.gpus
            assert len(gpus) == (placement.ranks if placement.gpus else 0)
            assert {devices.host_of(gpu).name for gpu in gpus} <= {seat.host}
            assert not gpus or list(gpus) == list(range(gpus[0], gpus[0] + len(gpus)))
            group = made.turns_of(worker)
            for gpu in gpus:
                whose = group[0] if group else f"{worker}-{replica}"
                assert owner.setdefault(gpu, whose) == whose, f"accelerator {gpu} has two owners"
        for group in made.turns:
            of_group = {replica: seat for replica, seat in placed.items() if replica[0] in group}
            assert len({seat.host for seat in of_group.values()}) <= 1
            replicas = [
                seat.gpus
                for (node, _), seat in of_group.items()
                if node == "generator" and seat.gpus
            ]
            assert len(set(replicas)) == len(replicas)
        waiting = [worker for (worker, _), seat in now.items() if seat.host not in alive]
        assert all(
            made.placements[worker].gpus or made.placements[worker].ranks > 1 for worker in waiting
        )


@given(plans())
def test_with_all_hosts_alive_a_plan_s_workers_have_room_one_by_one(
    given_: tuple[Plan, Devices],
) -> None:
    made, devices = given_
    now = seated(made)
    alive = {host.name for host in devices.hosts}
    for replica in now:
        stay = {other: seat for other, seat in now.items() if other != replica}
        assert settled(made, devices, alive, stay, replica).keys() == {replica}


@given(plans())
def test_with_all_hosts_alive_and_nobody_in_place_all_are_where_the_plan_has_them(
    given_: tuple[Plan, Devices],
) -> None:
    made, devices = given_
    alive, now = {host.name for host in devices.hosts}, seated(made)
    assert settled(made, devices, alive, {}, *now) == now


def test_of_hundreds_the_one_accelerator_that_is_free_is_found() -> None:
    devices = Devices.of([Host(name=f"h{number}", cpus=16, gpus=8) for number in range(64)])
    made = plan(build(), devices, gpus={"generator": 512})
    lost, alive = ("generator", 300), {host.name for host in devices.hosts}
    stay = {replica: seat for replica, seat in seated(made).items() if replica != lost}
    assert settled(made, devices, alive, stay, lost) == {lost: Seat("h37", (300,))}
