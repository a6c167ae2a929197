"""Runs by the clock: laws that hold for any scenario, and scenarios whose seconds are known."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataflow.errors import GraphError
from dataflow.foresight.lengths import Lengths
from dataflow.foresight.simulation.clock import Clock, Processors
from dataflow.foresight.simulation.generator import carried_on
from dataflow.foresight.simulation.scenario import (
    Failures,
    GeneratorCosts,
    Scenario,
    ScorerCosts,
    TrainerCosts,
    coarse,
)
from dataflow.foresight.simulation.simulate import Simulated, counted_from, simulate


def scenario(slots: int = 64, **changes: Any) -> Scenario:
    """Every completion has 100 tokens, unless it says otherwise."""
    known: dict[str, Any] = {
        "steps": 20,
        "prompts_per_step": 8,
        "group_size": 8,
        "max_staleness": 2,
        "prompt_tokens": 10.0,
        "lengths": Lengths.of([100.0]),
        "generator": GeneratorCosts(step_s=np.full(slots + 1, 1e-3)),
        "trainer": TrainerCosts(step_s=0.05),
    }
    return Scenario(**(known | changes))


def test_a_synchronous_step_is_generation_and_training_an_asynchronous_one_the_longer() -> None:
    assert simulate(scenario(max_staleness=0)).step_s == pytest.approx(0.1 + 0.05, rel=1e-6)
    found = simulate(scenario(max_staleness=4))
    assert found.step_s == pytest.approx(0.1, rel=0.05) and found.busy[
        "generator"
    ] == pytest.approx(1.0, abs=0.03)
    assert found.busy["trainer"] == pytest.approx(0.5, rel=0.1)
    slow = simulate(scenario(max_staleness=4, trainer=TrainerCosts(step_s=0.3)))
    assert slow.step_s == pytest.approx(0.3, rel=1e-6) and slow.busy["trainer"] == pytest.approx(
        1.0
    )


def test_a_trainer_that_computes_what_is_there_of_a_step_has_the_rest_left_at_its_end() -> None:
    """Groups come one after the other, and each takes half as long to train as to generate."""
    whole = TrainerCosts(step_s=0.0, token_s=0.05 / 802)
    known: dict[str, Any] = {"slots": 8, "max_staleness": 0}
    waits = simulate(scenario(trainer=whole, **known))
    parts = simulate(scenario(trainer=replace(whole, part_tokens=1000.0), **known))
    assert waits.step_s == pytest.approx(8 * 0.1 + 8 * 0.05, rel=0.02)
    assert parts.step_s == pytest.approx(8 * 0.1 + 0.05, rel=0.02)
    two = simulate(scenario(trainer=replace(whole, part_tokens=1700.0), **known))
    assert two.step_s == pytest.approx(8 * 0.1 + 2 * 0.05, rel=0.02), "two groups are a micro-batch"


def test_two_on_one_core_take_as_long_as_one_after_the_other_and_on_two_as_the_longer() -> None:
    both = {
        "generator": GeneratorCosts(step_s=np.full(65, 1e-3), shared=True),
        "trainer": TrainerCosts(step_s=0.1, shared=True),
        "max_staleness": 4,
    }
    one = simulate(scenario(**both, processors=Processors(cores=1)))
    two = simulate(scenario(**both, processors=Processors(cores=2)))
    assert one.step_s == pytest.approx(0.2, rel=0.05) and two.step_s == pytest.approx(0.1, rel=0.05)
    assert simulate(
        scenario(**(both | {"max_staleness": 0}), processors=Processors(cores=1))
    ).step_s == pytest.approx(0.2, rel=1e-6)


def test_one_that_waits_for_a_slow_scorer_is_as_fast_as_that() -> None:
    waits = simulate(
        scenario(scorers={"judge": ScorerCosts(row_s=0.1, at_once=16, waits=True)}, max_staleness=8)
    )
    assert waits.step_s == pytest.approx(64 * 0.1 / 16, rel=0.05) and waits.busy["judge"] > 0.95


@given(
    staleness=st.integers(0, 5),
    replicas=st.integers(1, 4),
    slots=st.integers(1, 70),
    mean=st.floats(2, 60),
    drops=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 1000),
    train=st.floats(0.001, 0.5),
    fails=st.sampled_from([0.0, 600.0]),
    shared=st.booleans(),
    together=st.integers(1, 4),
    turns=st.integers(1, 3),
)
def test_whatever_is_simulated_trains_every_step_within_the_bound(
    staleness: int,
    replicas: int,
    slots: int,
    mean: float,
    drops: float,
    seed: int,
    train: float,
    fails: float,
    *,
    shared: bool,
    together: int,
    turns: int,
) -> None:
    found = simulate(
        scenario(
            slots,
            max_staleness=staleness,
            replicas=replicas,
            lengths=Lengths.drawn(mean, 300, 1.0),
            seed=seed,
            steps=12,
            trainer=TrainerCosts(step_s=train, token_s=1e-6, weights_s=0.01, shared=shared),
            prompts_at_once=together,
            scorers={
                "reward": ScorerCosts(row_s=1e-4),
                "filter": ScorerCosts(row_s=0.0, drops=drops),
            },
            generator=GeneratorCosts(
                step_s=1e-3 + 1e-5 * np.arange(slots + 1),
                context_s=1e-7,
                prompt_s=1e-3,
                rollout_s=1e-5,
                adopt_s=1e-3,
                shared=shared,
            ),
            failures=Failures(
                generator_per_hour=fails, trainer_per_hour=fails / 4, restart_s=0.5, lost_s=0.5
            ),
            processors=Processors(cores=2) if shared else Processors(),
            turns=turns,
            world_s=0.01,
        )
    )
    _law(found, staleness, steps=12, rollouts=64)


def _law(found: Simulated, staleness: int, *, steps: int, rollouts: int) -> None:
    assert len(found.step_ends) == steps and (np.diff(found.step_ends) > 0).all()
    assert found.staleness.total() == (steps - found.first) * rollouts and 0 <= min(
        found.staleness
    ) <= max(found.staleness)
    assert max(found.staleness) <= staleness and not found.dropped["stale"]
    assert all(0 <= share <= 1 + 1e-9 for share in found.busy.values())


def test_the_same_seed_gives_the_same_run() -> None:
    one, two = (simulate(scenario(lengths=Lengths.drawn(60, 500), seed=5)) for _ in range(2))
    assert (one.step_ends == two.step_ends).all() and one.staleness == two.staleness


@given(
    staleness=st.integers(0, 5),
    replicas=st.integers(1, 3),
    slots=st.integers(1, 70),
    mean=st.floats(2, 60),
    group_size=st.sampled_from([1, 4, 8]),
    drops=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 1000),
    train=st.floats(0.001, 0.5),
    stride=st.integers(1, 5),
    shared=st.booleans(),
    together=st.integers(1, 4),
)
def test_one_event_for_all_that_end_until_somebody_notices_is_as_one_for_each(
    staleness: int,
    replicas: int,
    slots: int,
    mean: float,
    group_size: int,
    drops: float,
    seed: int,
    train: float,
    stride: int,
    *,
    shared: bool,
    together: int,
) -> None:
    """No two replicas are alike, so that nothing happens at the same time but by chance."""
    costs = [
        GeneratorCosts(
            step_s=(1 + 0.0137 * number) * (1e-3 + 1.03e-5 * np.arange(slots + 1)),
            context_s=1.1e-7,
            prompt_s=1.3e-3,
            rollout_s=1.7e-5,
            adopt_s=1.9e-3,
            shared=shared,
        )
        for number in range(replicas)
    ]
    made = scenario(
        max_staleness=staleness,
        replicas=replicas,
        unlike=tuple(costs),
        generator=costs[0],
        group_size=group_size,
        lengths=Lengths.drawn(mean, 300, 1.0),
        seed=seed,
        steps=12,
        stride=stride,
        prompts_at_once=together,
        trainer=TrainerCosts(step_s=train, token_s=1e-6, weights_s=0.01, shared=shared),
        hop_s=1.23e-4,
        scorers={"reward": ScorerCosts(row_s=1e-4), "filter": ScorerCosts(row_s=0.0, drops=drops)},
        processors=Processors(cores=2) if shared else Processors(),
    )
    few = simulate(made)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "dataflow.foresight.simulation.generator.carried_on",
            lambda *given, **how: carried_on(*given, **{**how, "stops": lambda ended: True}),
        )
        many = simulate(made)
    assert few.step_ends == pytest.approx(many.step_ends, rel=1e-9)
    assert (few.staleness, few.dropped) == (many.staleness, many.dropped)
    assert (
        few.busy == pytest.approx(many.busy, rel=1e-6, abs=1e-9) and few.in_flight == many.in_flight
    )


def test_what_a_decode_step_waits_for_is_not_lost_where_it_is_stopped() -> None:
    """Eight prompts of 10 ms before 100 steps of 1 ms: the trainer's version comes in the middle of
    them.
    """
    costs = GeneratorCosts(step_s=np.full(65, 1e-3), prompt_s=0.01)
    assert simulate(scenario(generator=costs)).step_s == pytest.approx(0.18, rel=0.01)


def test_whoever_is_given_up_at_once_makes_no_replica_work_twice() -> None:
    """Without seconds on the way, a group that is dropped lets the next one in while the replica
    hands groups out.
    """
    drops = {
        "scorers": {"filter": ScorerCosts(row_s=0.0, drops=0.3)},
        "lengths": Lengths.drawn(60, 300),
    }
    at_once, soon = (
        simulate(scenario(slots=24, steps=60, hop_s=hop_s, **drops)).step_s for hop_s in (0.0, 1e-9)
    )
    assert at_once == pytest.approx(soon, rel=0.02)


@pytest.mark.parametrize("stride", [2, 3, 4, 9])
def test_strides_of_many_decode_steps_change_little(stride: int) -> None:
    fine = scenario(lengths=Lengths.drawn(320, 2000), steps=40, replicas=2, max_staleness=3)
    assert coarse(fine).stride == 1 and coarse(fine, most=200).stride == 9
    assert simulate(replace(fine, stride=stride)).step_s == pytest.approx(
        simulate(fine).step_s, rel=0.03
    )


@given(steps=st.integers(2, 300), staleness=st.integers(0, 9))
def test_steps_are_counted_in_whole_rounds_of_the_bound(steps: int, staleness: int) -> None:
    first = counted_from(steps, staleness)
    assert 1 <= first < steps
    full = 2 * (staleness + 1) + steps // 10
    assert first >= min(steps - 1, full)
    assert (steps - first) % (staleness + 1) == 0 or steps <= full + staleness + 1


def test_a_brief_run_tells_of_steps_that_are_unlike_in_rounds_as_a_long_one_does() -> None:
    once = {"max_staleness": 3, "trainer": TrainerCosts(step_s=0.001)}
    long, brief = (simulate(scenario(256, steps=steps, **once)) for steps in (120, 20))
    assert long.steps_s.std() > 0.3 * long.step_s
    assert brief.step_s == pytest.approx(long.step_s, rel=0.01)


def test_a_bound_below_a_step_stands_still_and_is_told() -> None:
    with pytest.raises(GraphError, match=r"stands still after 0 of 20 steps.*in_flight \(4\)"):
        simulate(scenario(in_flight=4))


@pytest.mark.parametrize(("busy", "speed"), [(1, 1.5), (2, 1.25), (3, 1.0), (6, 0.5)])
def test_fewer_at_work_than_cores_are_faster_each(busy: int, speed: float) -> None:
    assert Processors(cores=3, alone=1.5).speed(busy) == pytest.approx(speed)
    assert Processors(cores=3).speed(busy) == min(1.0, speed)


def test_a_clock_gives_each_of_three_on_two_cores_two_thirds() -> None:
    clock = Clock(Processors(cores=2))
    ended: dict[str, float] = {}
    for name, seconds in (("a", 2.0), ("b", 2.0), ("c", 4.0)):
        clock.after(seconds, lambda name=name: ended.update({name: clock.now}), shared=True)  # type: ignore[misc]
    event = clock.after(9.0, lambda: ended.update(never=0.0))
    while clock.next():
        if clock.now == pytest.approx(3.0) and event.act is not None:
            clock.cancel(event)
            assert clock.reading(shared=0) == clock.now and clock.reading(
                shared=1
            ) == pytest.approx(2.0)
    assert ended == {"a": pytest.approx(3.0), "b": pytest.approx(3.0), "c": pytest.approx(5.0)}


def test_a_rollout_in_turns_waits_for_its_world_between_them_and_has_no_slot_meanwhile() -> None:
    """64 rollouts of 100 tokens: in five turns a step waits four times for the world; with half the
    slots the others are decoded meanwhile, and a step is longer by one turn alone.
    """
    alone = simulate(scenario(max_staleness=0, turns=5, world_s=0.5))
    assert alone.step_s == pytest.approx(0.1 + 4 * 0.5 + 0.05, rel=1e-6)
    assert alone.busy["generator"] == pytest.approx(0.1 / alone.step_s, rel=0.01)
    half = simulate(scenario(slots=32, max_staleness=0, turns=5, world_s=0.5))
    assert alone.step_s < half.step_s <= alone.step_s + 0.1 / 5 + 1e-6
    free = simulate(scenario(max_staleness=0, turns=5))
    assert free.step_s == pytest.approx(0.1 + 0.05, rel=0.05)


def test_asynchrony_hides_the_world() -> None:
    steps = [
        simulate(scenario(slots=256, max_staleness=bound, turns=2, world_s=0.2)).step_s
        for bound in (0, 4)
    ]
    assert steps[0] == pytest.approx(0.1 + 0.2 + 0.05, rel=0.01) and steps[1] < 0.6 * steps[0]
