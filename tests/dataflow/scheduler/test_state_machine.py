"""The run's decisions, heard and answered as plain values."""

import json
import random

import pytest

from dataflow import Graph, Model, scorer
from dataflow.planning.hosts import Devices
from dataflow.planning.plan import plan
from dataflow.scheduler.state_machine import NodeCommand, RunStateMachine
from dataflow.testing import FakeEvaluate, FakeGenerator, FakePrompts, FakeTrainer

POLICY = Model("policy")


@scorer
def reward(completion: str, answer: str) -> float:
    return float(completion == answer)


def run(every_steps: int | None = 10, trains: bool = True) -> RunStateMachine:
    graph, generator = Graph("test"), FakeGenerator(model=POLICY)
    if trains:
        trainer = FakeTrainer(model=POLICY)
        trainer(reward(generator(graph.source(FakePrompts()))))
        graph.feedback(trainer.weights, generator, max_staleness=1)
    if every_steps:
        FakeEvaluate(every_steps=every_steps)(
            reward(generator(graph.source(FakePrompts(name="held_out"))))
        )
    return RunStateMachine(graph, plan(graph, Devices(cpus=2)))


def said(words: list[NodeCommand]) -> list[tuple[str, dict]]:
    return [(word.node, dict(word.message)) for word in words]


def test_training_waits_for_the_first_evaluation() -> None:
    c = run()
    assert said(c.start()) == [("prompts", {"pause": True}), ("held_out", {"evaluate": 0})]
    assert said(c.hear("trainer", {"step": 0})) == []
    assert said(c.hear("eval", {"round": 0})) == [("prompts", {"pause": False})]
    assert c.phase == "training"


def test_what_workers_say_before_the_start_does_not_skip_the_first_evaluation() -> None:
    c = run()
    assert said(c.hear("trainer", {"step": 0})) == []
    assert said(c.start()) == [("prompts", {"pause": True}), ("held_out", {"evaluate": 0})]


def test_groups_that_were_dropped_before_the_start_are_told_to_the_source_at_the_start() -> None:
    c = run(every_steps=None)
    # a run that goes on; the source is not ready, and does not hear it
    c.hear("trainer", {"step": 3, "dropped": 2})
    assert ("prompts", {"dropped": 2}) in said(c.start())


def test_rounds_come_when_their_step_comes_and_one_at_a_time() -> None:
    c = run()
    c.start()
    c.hear("eval", {"round": 0})
    assert said(c.hear("trainer", {"step": 9})) == []
    assert said(c.hear("trainer", {"step": 12})) == [("held_out", {"evaluate": 10})]
    assert said(c.hear("trainer", {"step": 25})) == []
    assert said(c.hear("eval", {"round": 10})) == [("held_out", {"evaluate": 20})]
    assert said(c.hear("eval", {"round": 20})) == []


def test_the_run_is_over_after_the_evaluation_of_the_last_step() -> None:
    c = run()
    c.start()
    c.hear("eval", {"round": 0})
    assert said(c.hear("trainer", {"step": 25, "done": 1})) == [("held_out", {"evaluate": 25})]
    assert not c.over
    c.hear("eval", {"round": 25})
    assert c.over


def test_a_round_still_running_at_the_end_is_followed_by_the_last_one() -> None:
    c = run()
    c.start()
    c.hear("eval", {"round": 0})
    c.hear("trainer", {"step": 10})
    assert said(c.hear("trainer", {"step": 15, "done": 1})) == []
    assert said(c.hear("eval", {"round": 10})) == [("held_out", {"evaluate": 15})]
    c.hear("eval", {"round": 15})
    assert c.over


def test_the_last_step_is_not_evaluated_twice() -> None:
    c = run()
    c.start()
    c.hear("eval", {"round": 0})
    assert said(c.hear("trainer", {"step": 10})) == [("held_out", {"evaluate": 10})]
    assert said(c.hear("eval", {"round": 10})) == []
    assert said(c.hear("trainer", {"step": 10, "done": 1})) == []
    assert c.over


def test_without_evaluation_training_starts_at_once_and_ends_with_the_trainer() -> None:
    c = run(every_steps=None)
    assert said(c.start()) == [("prompts", {"pause": False})]
    c.hear("trainer", {"step": 3, "done": 1})
    assert c.over


def test_dropped_groups_are_told_to_the_source_once() -> None:
    c = run(every_steps=None)
    c.start()
    assert said(c.hear("trainer", {"step": 1, "dropped": 2})) == [("prompts", {"dropped": 2})]
    assert said(c.hear("trainer", {"step": 1, "dropped": 2})) == []


def test_draining_stops_sources_and_trainers_and_skips_the_last_evaluation() -> None:
    c = run()
    c.start()
    assert said(c.drain())[:2] == [("prompts", {"drain": True}), ("trainer", {"drain": True})]
    c.hear("trainer", {"step": 3, "done": 1})
    assert c.over


def test_a_graph_without_trainer_is_over_when_its_sinks_have_ended() -> None:
    graph = Graph("test")
    from dataflow.runner import _Collect

    _Collect(name="sink")(FakeGenerator()(graph.source(FakePrompts())))
    c = RunStateMachine(graph, plan(graph, Devices(cpus=2)))
    c.start()
    assert not c.over
    c.ended("sink")
    assert c.over


def test_a_run_that_was_stopped_before_it_began_stays_over() -> None:
    c = run()
    c.drain()
    assert c.over
    assert c.start() == []
    assert c.over


# Nodes that were started again


def test_one_that_was_started_again_hears_what_it_would_have_heard() -> None:
    c = run()
    assert c.commands_for("prompts") == []
    c.start()
    assert said(c.commands_for("prompts")) == [("prompts", {"pause": True})]
    assert said(c.commands_for("held_out")) == [("held_out", {"evaluate": 0, "again": True})]
    c.hear("eval", {"round": 0})
    c.hear("trainer", {"step": 3, "dropped": 2})
    assert said(c.commands_for("prompts")) == [
        ("prompts", {"pause": False}),
        ("prompts", {"dropped": 2}),
    ]
    assert (
        c.commands_for("held_out") == []
        and c.commands_for("trainer") == []
        and c.commands_for("reward") == []
    )
    c.drain()
    assert said(c.commands_for("prompts"))[-1] == ("prompts", {"drain": True})
    assert said(c.commands_for("trainer")) == [("trainer", {"drain": True})]


def test_a_trainer_that_catches_up_asks_for_no_round_twice_and_does_not_undo_its_end() -> None:
    c = run()
    c.start()
    c.hear("eval", {"round": 0})
    assert said(c.hear("trainer", {"step": 12})) == [("held_out", {"evaluate": 10})]
    c.hear("eval", {"round": 10})
    assert [c.hear("trainer", {"step": step}) for step in (0, 5, 11, 12)] == [[]] * 4
    assert c.step == 12
    assert said(c.hear("trainer", {"step": 13, "done": 1})) == [("held_out", {"evaluate": 13})]
    assert c.hear("trainer", {"step": 10}) == []
    c.hear("eval", {"round": 13})
    assert c.over


def test_an_evaluation_that_was_started_again_does_not_undo_its_rounds() -> None:
    c = run()
    c.start()
    c.hear("eval", {"round": 0})
    c.hear("trainer", {"step": 10})
    c.hear("eval", {"round": 10})
    assert c.hear("eval", {"queue": 0}) == [] and c.hear("eval", {"round": 0}) == []
    assert said(c.hear("trainer", {"step": 10, "done": 1})) == [] and c.over


def test_progress_grows_with_steps_and_rounds_and_never_shrinks() -> None:
    c = run()
    c.start()
    seen = [c.progress]
    events = [
        ("eval", {"round": 0}),
        ("trainer", {"step": 4}),
        ("trainer", {"step": 0}),
        ("trainer", {"step": 10}),
    ]
    for node, status in [*events, ("eval", {"round": 10}), ("eval", {"round": 0})]:
        c.hear(node, status)
        seen.append(c.progress)
    assert seen == sorted(seen) and seen[1:6] == [1, 5, 5, 11, 21]


@pytest.mark.parametrize("seed", range(40))
def test_one_that_takes_up_what_another_left_says_from_then_on_what_that_would_have_said(
    seed: int,
) -> None:
    draw = random.Random(seed)
    first, events = run(), []
    words = first.start()
    for step in range(0, 40, draw.choice((1, 3, 7))):
        events.append(("trainer", {"step": step, "dropped": step // 5, "done": int(step >= 36)}))
        events += [("eval", {"round": draw.choice((0, step, step - step % 10))})] * draw.randrange(
            2
        )
    cut = draw.randrange(len(events) + 1)
    for node, status in events[:cut]:
        words += first.hear(node, status)
    second = run()
    second.take_up(json.loads(json.dumps(first.to_plain())))
    assert (second.phase, second.step, second.over) == (first.phase, first.step, first.over)
    again = [
        word
        for node in ("prompts", "held_out", "trainer")
        for word in second.commands_for(node, again=False)
    ]
    assert not any("again" in word.message for word in again)
    heard = [said([word]) for word in words]
    assert all(said([word]) in heard for word in again), "what it says again was said before"
    for node, status in events[cut:]:
        assert second.hear(node, status) == first.hear(node, status)
    if draw.random() < 0.5:
        assert second.drain() == first.drain()
    assert second.to_plain() == first.to_plain()
