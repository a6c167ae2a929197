"""Which hosts the ranks of a trainer are spread over, and where they go when one of them is lost:
pure functions.
"""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rigs.spreading import POLICY, build

from dataflow import Devices, Graph, GraphError, Plan, plan
from dataflow.node import Split
from dataflow.planning.hosts import Host
from dataflow.planning.model_size import ModelSize
from dataflow.planning.seats import Fixed, Seat, divisions
from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer
from operators import Logprobs


def hosts(count: int, **facts: int) -> Devices:
    return Devices.of([Host(name=name, **({"cpus": 4} | facts)) for name in "abcdefgh"[:count]])


# The rule


def test_a_trainer_that_a_host_has_room_for_stays_on_it() -> None:
    made = plan(build(), hosts(4, gpus=8), gpus={"trainer": 8})
    assert made.placements["trainer"].rank_hosts == () and made.placements["trainer"].hosts == (
        "a",
    )


def test_one_that_fits_no_host_has_whole_hosts_in_a_row_each_with_neighbouring_ranks() -> None:
    trainer = plan(build(), hosts(8, gpus=8), gpus={"trainer": 48, "generator": 16}).placements[
        "trainer"
    ]
    assert trainer.rank_hosts == tuple(name for name in "abcdef" for _ in range(8))
    assert trainer.hosts == ("a",) and trainer.all_hosts == tuple("abcdef")
    assert [trainer.host(0, rank) for rank in (0, 7, 8, 47)] == ["a", "a", "b", "f"]
    assert [trainer.device(0, rank) for rank in (0, 7, 8, 47)] == [
        "cuda:0",
        "cuda:7",
        "cuda:0",
        "cuda:7",
    ]


def test_copies_of_the_model_are_not_cut_where_another_number_of_hosts_has_them_whole() -> None:
    assert divisions(12, 6, Split(dp_replicate=3)) == [3, 6, 2, 4]
    made = plan(build(dp_replicate=3), hosts(6, gpus=6), gpus={"trainer": 12})
    assert len(made.placements["trainer"].all_hosts) == 3, "four on each, though two hosts would do"


def test_a_layer_is_cut_across_hosts_only_where_nothing_else_fits() -> None:
    assert divisions(8, 8, Split(tensor_parallel=4)) == [2, 4, 8]
    whole = plan(build(tensor_parallel=2), hosts(4, gpus=3), gpus={"trainer": 4}).placements[
        "trainer"
    ]
    assert len(whole.all_hosts) == 2
    made = plan(build(tensor_parallel=4), hosts(2, gpus=2), gpus={"trainer": 4})
    assert "2 on each (its layers are cut across hosts, as nothing else fits)" in made.explain()


def test_on_the_cpu_ranks_need_a_core_each_and_memory_and_share_what_each_host_has() -> None:
    made = plan(
        build(),
        Devices.of([Host(name=name, cpus=cpus) for name, cpus in (("a", 2), ("b", 2), ("c", 8))]),
        ranks={"trainer": 4},
        place={"generator": "c"},
    )
    assert made.placements["trainer"].rank_hosts == (), "c has a core for each"
    spread = plan(
        build(), hosts(3, cpus=2), ranks={"trainer": 4}, place={"generator": "c"}
    ).placements["trainer"]
    assert spread.rank_hosts == ("a", "a", "b", "b") and spread.threads == 1
    size = ModelSize(parameters=1_000_000_000)
    need = (
        plan(build(), hosts(1), ranks={"trainer": 2}, sizes={"policy": size})
        .placements["trainer"]
        .need
    )
    assert need is not None
    small = hosts(3, memory_bytes=need.total + need.total // 2)
    tight = plan(
        build(), small, ranks={"trainer": 2}, sizes={"policy": size}, place={"generator": "c"}
    )
    assert tight.placements["trainer"].rank_hosts == ("a", "b")


def test_the_user_names_the_hosts_and_rank_0_is_on_the_first() -> None:
    made = plan(
        build(), hosts(3), ranks={"trainer": 2}, place={"trainer": ("c", "a"), "generator": "b"}
    )
    assert made.placements["trainer"].rank_hosts == ("c", "a") and made.host("trainer", 0) == "c"
    told = made.explain()
    assert "host a (4 cores): trainer rank 1 on 4 threads" in told
    assert (
        "the ranks of 'trainer' are spread over 2 hosts, 1 on each, and its weights go over the"
        " network" in told
    )
    assert (
        next(frame for frame in made.frames() if "trainer" in frame.nodes).where == "hosts c and a"
    )


def test_weights_of_ranks_on_several_hosts_go_over_the_network_wherever_the_reader_is() -> None:
    made = plan(
        build(), hosts(2), ranks={"trainer": 2}, place={"trainer": ("a", "b"), "generator": "a"}
    )
    assert made.executor("trainer", "generator", 0) == "gloo"
    assert {made.executor("trainer", "generator", 0, apart=apart) for apart in (True, False)} == {
        "gloo"
    }


@given(
    st.integers(1, 6), st.integers(1, 8), st.integers(1, 3), st.integers(1, 3), st.integers(1, 4)
)
def test_ranks_are_spread_evenly_in_whole_blocks_and_no_accelerator_has_two_owners(
    count: int, gpus: int, tensor: int, copies: int, shards: int
) -> None:
    ranks, devices = tensor * copies * shards, hosts(count, gpus=gpus)
    graph = build(tensor_parallel=tensor, dp_replicate=copies)
    if ranks + 1 > devices.gpus:
        return
    try:
        placement = plan(graph, devices, gpus={"trainer": ranks, "generator": 1}).placements[
            "trainer"
        ]
    except GraphError as error:
        assert ranks > gpus and "on one host, or an equal part of that on each of several" in str(
            error
        )
        return
    assert len(set(placement.gpus)) == ranks
    if not placement.rank_hosts:
        assert len(placement.hosts) == 1
        return
    each = [placement.rank_hosts.count(name) for name in placement.all_hosts]
    assert len(set(each)) == 1 and sum(each) == ranks
    assert list(placement.rank_hosts) == [
        name for name in placement.all_hosts for _ in range(each[0])
    ]
    for rank, gpu in enumerate(placement.gpus):
        assert devices.host_of(gpu).name == placement.rank_hosts[rank]
        assert placement.device(0, rank) == f"cuda:{devices.number_there(gpu)}"


# Refusals


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        (
            {"ranks": {"trainer": 3}, "place": {"trainer": ("a", "b")}},
            (
                "'trainer' is to be spread over 2 hosts, a, b, but has 3 ranks, and each host is to"
                " have as many"
            ),
        ),
        (
            {"gpus": {"trainer": 6}, "place": {"trainer": ("a", "b")}},
            "needs 3 GPUs in a row on each of them, but 'a' has 2 of 2 GPUs free",
        ),
        (
            {"gpus": {"trainer": 5}},
            (
                "needs 5 GPUs in a row on one host, or an equal part of that on each of several,"
                " but 'a' has 2 of 2 GPUs free"
            ),
        ),
        (
            {"place": {"generator": ("a", "b")}},
            "has 1 replica, and all ranks of a replica are on one host, but for those of a trainer",
        ),
    ],
)
def test_what_cannot_be_spread_is_refused_with_the_numbers(knobs: Any, said: str) -> None:
    with pytest.raises(GraphError) as error:
        plan(build(), hosts(3, gpus=2), **knobs)
    assert said in str(error.value)


def test_a_trainer_that_cannot_follow_from_another_host_is_not_spread() -> None:
    with pytest.raises(GraphError, match="needs 4 cores on one host, but"):
        plan(
            build(FakeTrainer(name="trainer", model=POLICY)), hosts(2, cpus=2), ranks={"trainer": 4}
        )


# Refusals


# When a host is lost


def made_of_two() -> Plan:
    return plan(build(), hosts(3, gpus=2), gpus={"trainer": 4, "generator": 1})


TRAINER, GENERATOR = ("trainer", 0), ("generator", 0)


def test_ranks_go_where_there_is_room_now_and_together_where_one_host_has_it() -> None:
    made = made_of_two()
    assert made.placements["trainer"].rank_hosts == ("a", "a", "b", "b")
    fixed = Fixed(seats={GENERATOR: Seat("c", (4,))}, hosts={"b", "c", "late"})
    grown = Devices.of([*made.devices.hosts, Host(name="late", cpus=4, gpus=2)])
    assert made.settle(grown, [TRAINER], fixed)[0] == {
        TRAINER: Seat("b", (2, 3, 6, 7), ("b", "b", "late", "late"))
    }
    large = Devices.of([*made.devices.hosts, Host(name="late", cpus=4, gpus=8)])
    assert made.settle(large, [TRAINER], fixed)[0] == {TRAINER: Seat("late", (6, 7, 8, 9))}
    seats, refusals = made.settle(made.devices, [TRAINER], fixed)
    assert not seats and refusals["trainer"].startswith(
        "'trainer' needs 4 GPUs in a row on one host, or an equal part of that on each of several,"
        " but 'b' has 2 of 2 GPUs free"
    )


def test_others_keep_off_what_each_host_has_of_a_trainer_that_is_spread() -> None:
    made = made_of_two()
    all_four = Fixed(
        seats={TRAINER: Seat("a", (0, 1, 2, 3), ("a", "a", "b", "b"))}, hosts={"a", "b"}
    )
    assert made.settle(made.devices, [GENERATOR], all_four)[0] == {}
    less = Fixed(seats={TRAINER: Seat("a", (0, 1, 2), ("a", "a", "b"))}, hosts={"a", "b"})
    assert made.settle(made.devices, [GENERATOR], less)[0] == {GENERATOR: Seat("b", (3,))}


@pytest.mark.parametrize("is_fed", [False, True])
def test_a_frozen_reference_that_fits_no_host_is_spread_and_one_whose_weights_change_is_refused(
    is_fed: bool,
) -> None:
    graph, generator = Graph("test"), FakeGenerator(model=POLICY)
    reference = Logprobs(POLICY if is_fed else POLICY.frozen(), tensor_parallel=16)
    trainer = FakeTrainer(name="trainer", model=POLICY)
    trainer(reference(generator(graph.source(FakePrompts()))))
    graph.feedback(trainer.weights, generator, max_staleness=1)
    if is_fed:
        graph.feedback(trainer.weights, reference, every=4)
    gpus = {"trainer": 1, "generator": 1, "ref_logprobs": 16}
    if is_fed:
        with pytest.raises(GraphError, match="'ref_logprobs' needs 16 GPUs in a row on one host"):
            plan(graph, hosts(3, gpus=8), gpus=gpus)
        return
    made = plan(graph, hosts(3, gpus=8), gpus=gpus).placements["ref_logprobs"]
    assert made.rank_hosts == tuple(name for name in "ab" for _ in range(8))
