"""Which node bounds a run, from shares of their time alone."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dataflow.doctor.facts import Facts, Node, WorkerFacts
from dataflow.doctor.verdict import bottleneck, verdict
from dataflow.history.bottleneck import bounded, groups


def facts(turns: tuple[tuple[str, ...], ...] = (), **nodes: dict[str, Any]) -> Facts:
    found = {}
    for name, said in nodes.items():
        workers = tuple(WorkerFacts(name=worker) for worker in said.pop("workers", [f"{name}-0"]))
        found[name] = Node(name=name, workers=workers, state="working", **said)
    return Facts(nodes=found, turns=turns)


def test_nodes_of_one_worker_bound_a_run_together_and_their_largest_part_is_named() -> None:
    light = {"workers": ["reward-0"]}
    found = facts(
        generator={"busy": 0.7}, reward={"busy": 0.4, **light}, credit={"busy": 0.5, **light}
    )
    assert bottleneck(found) == "credit"
    assert (
        verdict(found)
        == "Nothing is wrong: 'credit' is the slowest part, busy 50%, and those that work in turn"
        " with it make that 90%."
    )


def test_a_pool_is_no_load_of_the_worker_that_asks_it() -> None:
    light = {"workers": ["reward-0"]}
    pooled = facts(
        generator={"busy": 0.8},
        reward={"busy": 0.6, "beside": 0.55, **light},
        credit={"busy": 0.4, **light},
    )
    assert bottleneck(pooled) == "generator"
    full = facts(
        generator={"busy": 0.8},
        reward={"busy": 0.95, "beside": 0.9, **light},
        credit={"busy": 0.4, **light},
    )
    assert bottleneck(full) == "reward"


def test_nodes_that_take_turns_on_devices_bound_a_run_together() -> None:
    shares = {"generator": {"busy": 0.5}, "trainer": {"busy": 0.45}, "judge": {"busy": 0.7}}
    assert bottleneck(facts(**{name: dict(said) for name, said in shares.items()})) == "judge"
    assert bottleneck(facts((("generator", "trainer"),), **shares)) == "generator"


def test_of_loads_that_are_alike_it_is_the_last_on_the_way() -> None:
    assert bottleneck(facts(generator={"busy": 1.0}, trainer={"busy": 0.99})) == "trainer"
    assert bottleneck(facts(generator={"busy": 1.0}, trainer={"busy": 0.9})) == "generator"
    assert bottleneck(facts(generator={"busy": 0.0}, trainer={})) is None


PLACED = {
    "placed": {
        name: {"worker": "light" if name in ("judge", "credit") else name}
        for name in ("prompts", "generator", "judge", "credit", "trainer")
    }
}


def test_a_run_is_as_efficient_as_what_bounds_it_was_at_work() -> None:
    busy = {"trainer": 5.0, "generator": 6.0, "judge": 5.0, "credit": 4.0}
    found = bounded(10.0, busy, {}, PLACED)
    assert found is not None and (found.node, found.share) == ("judge", 0.9), "one worker has both"
    found = bounded(10.0, busy, {"judge": 4.5}, PLACED)
    assert found is not None and (found.node, found.share) == (
        "generator",
        0.6,
    ), "its processes are no part of that"
    found = bounded(10.0, busy, {"judge": 4.5}, {**PLACED, "turns": [["generator", "trainer"]]})
    assert found is not None and (found.node, found.share) == (
        "generator",
        1.0,
    ), "no more than all of the time"
    assert bounded(0.0, busy, {}, PLACED) is None and bounded(10.0, {}, {}, PLACED) is None
    assert bounded(10.0, {"trainer": 0.0}, {}, {}) is None


@given(st.lists(st.lists(st.sampled_from("abcdef"), max_size=4), max_size=6))
def test_every_name_is_in_one_group_with_all_that_it_belongs_to(together: list[list[str]]) -> None:
    found = groups("abcdef", together)
    assert sorted(name for group in found for name in group) == list("abcdef")
    assert all(any(set(some) <= set(group) for group in found) for some in together)
