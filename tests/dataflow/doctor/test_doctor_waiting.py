"""The doctor's walk: from plain facts to who waits for whom, and to one sentence that names the
root first.
"""

import dataclasses
from typing import Any

import pytest

from dataflow.display import EdgeSnapshot
from dataflow.doctor.facts import Awaited, Facts, FeedbackFacts, Node, WorkerFacts
from dataflow.doctor.verdict import ends, seconds, trouble, verdict, waits
from dataflow.system.processes import Process

PATHS = {
    "prompts": [("prompts", "generator"), ("generator", "reward"), ("reward", "trainer")],
    "held_out": [("held_out", "generator"), ("generator", "reward"), ("reward", "eval")],
}


KINDS = {"prompts": "source", "held_out": "source", "trainer": "sink", "eval": "sink"}


def worker(name: str, *nodes: str, proc: str = "S", **knobs: Any) -> WorkerFacts:
    return WorkerFacts(
        name=name, nodes=nodes, process=Process(pid=100 + len(name), state=proc), **knobs
    )


def run(*, edges: dict[tuple[str, str], tuple[int, int]] | None = None, **changes: Any) -> Facts:
    """A run of five operators and an evaluation, in which all wait and nothing has moved; `changes`
    by node or fact.
    """
    nodes = {}
    for name in ("prompts", "generator", "reward", "trainer", "held_out", "eval"):
        plain: dict[str, Any] = {
            "for_s": 40.0,
            "workers": (worker(f"{name}-0", name),),
            **changes.pop(name, {}),
        }
        nodes[name] = Node(name=name, kind=KINDS.get(name, "operator"), **plain)
    known = edges or {}
    found = [
        EdgeSnapshot(
            producer=a, consumer=b, source=source, depth=known.get((a, b), (0, 64))[0], capacity=64
        )
        for source, pairs in PATHS.items()
        for a, b in pairs
    ]
    plain = {"still_s": 40.0, "on_demand": ("held_out",), "leading": ("trainer",), **changes}
    return Facts(
        nodes=nodes,
        edges=tuple(found),
        feedbacks=(FeedbackFacts(trainer="trainer", reader="generator"),),
        **plain,
    )


def pairs(facts: Facts) -> set[tuple[str, str]]:
    return {(wait.node, wait.on) for wait in waits(facts)}


def awaited(state: str, **knobs: Any) -> dict[str, Awaited]:
    return {"trainer": Awaited(group_id=120, source="prompts", state=state, **knobs)}


STOPPED = {"state": "ready", "silent_s": 12.0, "proc": "T"}


def test_a_full_edge_makes_its_producer_wait_for_its_consumer() -> None:
    full = {("generator", "reward"): (64, 64)}
    facts = run(
        generator={"state": "blocked"}, reward={"state": "working", "for_s": 33.0}, edges=full
    )
    assert ("generator", "reward") in pairs(facts)
    why = next(wait.why for wait in waits(facts) if wait.node == "generator")
    assert why == "the edge to 'reward' is full (64 of 64 rows)"
    assert verdict(facts).startswith(
        "Everything waits for 'reward', which is at work, for 33 s now"
    )


def test_a_blocked_node_without_a_full_edge_waits_for_those_in_trouble_first() -> None:
    facts = run(
        generator={"state": "blocked"},
        reward={"workers": (worker("reward-0", "reward", **STOPPED),)},
    )
    assert ("generator", "reward") in pairs(facts)


def test_an_empty_source_is_what_everything_waits_for() -> None:
    facts = run(prompts={"for_s": 71.0})
    assert pairs(facts) == {
        ("generator", "prompts"),
        ("reward", "generator"),
        ("trainer", "reward"),
    }
    assert verdict(facts) == "Everything waits for 'prompts', which has issued nothing for 71 s."


def test_a_dead_scorer_is_named_with_its_process_first() -> None:
    gone = worker("reward-0", "reward", proc="", silent_s=3.0)
    facts = run(reward={"workers": (gone,)}, generator={"state": "blocked"}, still_s=3.0)
    assert verdict(facts) == "Everything waits for 'reward': reward-0 (pid 108) has ended."


def test_a_stopped_worker_is_named_with_its_state_and_for_how_long_it_has_been_silent() -> None:
    facts = run(
        generator={"workers": (worker("generator-0", "generator", **STOPPED),)},
        awaited=awaited("generating"),
    )
    assert (
        verdict(facts)
        == "Everything waits for 'generator': generator-0 (pid 111) is stopped (state T in /proc) "
        "and does not answer, for 12 s now."
    )


def test_a_worker_that_runs_and_does_not_answer_is_told_apart_from_a_stopped_one() -> None:
    assert (
        trouble(worker("a-0", "a", silent_s=7.0, proc="R"))
        == "does not answer (state R in /proc), for 7.0 s now"
    )


def test_one_replica_in_trouble_while_the_others_work_says_that_they_carry_on() -> None:
    both = (worker("generator-0", "generator"), worker("generator-1", "generator", **STOPPED))
    at_work: dict[str, Any] = {
        name: {"state": "working"} for name in ("prompts", "reward", "trainer")
    }
    facts = run(generator={"state": "working", "workers": both}, still_s=0.1, **at_work)
    assert verdict(facts).startswith("Something is the matter with 'generator': generator-1")
    assert verdict(facts).endswith("the others carry on.")


def test_a_trainer_waits_for_the_group_that_is_being_generated_and_for_its_worker() -> None:
    facts = run(generator={"state": "working", "for_s": 12.0}, awaited=awaited("generating"))
    wait = next(wait for wait in waits(facts) if wait.node == "trainer")
    assert (wait.on, wait.why) == (
        "generator",
        "it needs group 120 next, which the ledger calls generating",
    )
    held = run(
        generator={"state": "working"},
        awaited=awaited("generating", node="generator", worker="generator-1"),
    )
    said = next(wait.why for wait in waits(held) if wait.node == "trainer")
    assert said == "it needs group 120 next, which the ledger calls generating and generator-1 has"


def test_a_trainer_waits_for_the_scorer_that_has_what_was_generated() -> None:
    facts = run(reward={"pending": 24, "for_s": 50.0}, awaited=awaited("generated"))
    assert ("trainer", "reward") in pairs(facts)
    assert "'reward', which holds 24 rows and has not worked on them for 50 s" in verdict(facts)


def test_an_issued_group_is_waited_for_at_the_generator_and_at_what_that_waits_for() -> None:
    facts = run(awaited=awaited("issued"))
    assert ("trainer", "generator") in pairs(facts)
    assert "Everything waits for 'prompts'" in verdict(facts)


def test_the_first_evaluation_pauses_training_and_what_it_waits_for_is_the_root() -> None:
    facts = run(
        phase="first_evaluation",
        prompts={"state": "paused"},
        generator={"state": "working", "for_s": 90.0},
    )
    assert ("prompts", "eval") in pairs(facts) and ("eval", "reward") in pairs(facts)
    assert (
        next(w.why for w in waits(facts) if w.node == "prompts")
        == "it is paused until the first evaluation is done"
    )
    assert verdict(facts).startswith("Everything waits for 'generator', which is at work")


def test_a_run_in_its_first_evaluation_that_moves_is_well() -> None:
    facts = run(
        phase="first_evaluation",
        prompts={"state": "paused"},
        generator={"state": "working"},
        still_s=0.2,
    )
    assert verdict(facts) == "Nothing is wrong: the run is in its first evaluation."


def test_the_last_evaluation_waits_for_its_own_prompts_though_others_are_held_back() -> None:
    facts = run(
        phase="last_evaluation",
        trainer={"state": "done", "version": 300},
        prompts={"state": "done"},
        generator={"held_back": 5, "version": 300},
    )
    assert ("generator", "held_out") in pairs(facts)


def test_weights_that_were_not_adopted_are_named_with_both_versions() -> None:
    facts = run(
        generator={"held_back": 8, "version": 39}, trainer={"state": "working", "version": 41}
    )
    wait = next(wait for wait in waits(facts) if wait.node == "generator")
    assert (wait.on, wait.why) == (
        "trainer",
        "version 41 of 'trainer' is made, but it still has 39",
    )


def test_a_generator_that_is_ahead_waits_for_the_next_version_of_the_trainer() -> None:
    facts = run(
        generator={"held_back": 8, "version": 41},
        trainer={"state": "working", "version": 41, "for_s": 65.0},
        reward={"state": "waiting"},
    )
    assert ("generator", "trainer") in pairs(facts) and ("reward", "generator") in pairs(facts)
    assert verdict(facts).startswith(
        "Everything waits for 'trainer', which is at work, for 65 s now"
    )


def test_nodes_that_wait_for_each_other_are_called_a_circle() -> None:
    facts = run(
        generator={"held_back": 8, "version": 41},
        trainer={"version": 41},
        awaited=awaited("issued"),
    )
    assert {("generator", "trainer"), ("trainer", "generator")} <= pairs(facts)
    said = verdict(facts)
    assert said.startswith(
        "'generator' and 'trainer' wait for each other: 'generator' waits for 'trainer' (8 prompts"
    )


def test_a_long_slice_names_the_worker_that_is_in_it() -> None:
    busy = worker("trainer-0", "trainer", at="trainer", at_s=240.0, proc="R")
    facts = run(
        trainer={"state": "working", "workers": (busy,)}, generator={"held_back": 3, "version": 1}
    )
    assert (
        "'trainer', which has been in one slice of its work for 4 min 0 s (trainer-0 (pid 109))"
        in verdict(facts)
    )


def test_nodes_that_share_a_worker_wait_for_the_one_whose_slice_takes_long() -> None:
    shared = worker("reward-0", "reward", "eval", at="eval", at_s=30.0)
    facts = run(reward={"workers": (shared,)}, eval={"state": "working", "workers": (shared,)})
    assert ("reward", "eval") in pairs(facts)
    assert ("reward", "eval") not in pairs(run())


def test_a_restart_is_told_with_its_number_and_its_cause() -> None:
    down = worker("reward-0", "reward", state="down", restarts=2, cause="ended by signal 9")
    assert (
        trouble(dataclasses.replace(down, process=None))
        == "has ended, and waits to be started again (restart 2); it ended by signal 9"
    )
    again = worker("reward-0", "reward", state="starting", restarts=2, at="reward", at_s=5.0)
    assert trouble(again) == "is starting again (restart 2): it builds 'reward' for 5.0 s now"


def test_a_start_waits_for_the_worker_that_is_slow_and_not_for_those_that_wait_for_it() -> None:
    slow = worker("trainer-0", "trainer", state="starting", at="trainer", at_s=44.0)
    facts = run(
        phase="starting",
        trainer={"workers": (slow,)},
        prompts={"workers": (worker("prompts-0", "prompts", state="starting"),)},
    )
    assert (
        verdict(facts)
        == "The run is starting; it waits for trainer-0 (pid 109), which is starting: it builds"
        " 'trainer' for 44 s now."
    )


def test_a_run_that_moves_is_well_and_its_slowest_part_is_named() -> None:
    facts = run(
        trainer={"state": "working", "busy": 0.95},
        generator={"busy": 0.6},
        reward={"busy": 0.1},
        still_s=0.3,
    )
    assert verdict(facts) == "Nothing is wrong: 'trainer' is the slowest part, busy 95%."


def test_parts_that_are_equally_busy_are_both_named() -> None:
    facts = run(
        trainer={"state": "working", "busy": 0.99},
        generator={"state": "working", "busy": 1.0},
        still_s=0.3,
    )
    assert (
        verdict(facts)
        == "Nothing is wrong: 'generator' and 'trainer' are the slowest parts, busy 100%."
    )


def test_one_that_has_just_ended_its_part_is_neither_waiting_nor_waited_for() -> None:
    facts = run(
        prompts={"state": "done"},
        generator={"state": "done"},
        reward={"state": "done"},
        trainer={"state": "done"},
    )
    assert waits(facts) == []


@pytest.mark.parametrize("state", ["left", "stopping"])
def test_a_worker_that_left_in_order_is_no_trouble(state: str) -> None:
    assert trouble(worker("generator-1", "generator", state=state, proc="", silent_s=99.0)) == ""


def test_every_waiting_node_reaches_an_end() -> None:
    facts = run(
        generator={"held_back": 8, "version": 41},
        trainer={"version": 41},
        awaited=awaited("issued"),
    )
    found = waits(facts)
    assert {name for names in ends(facts, found).values() for name in names} == {
        wait.node for wait in found
    }


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0.04, "0.0 s"),
        (9.96, "10 s"),
        (119.4, "119 s"),
        (119.6, "2 min 0 s"),
        (7300.0, "2 h 1 min"),
    ],
)
def test_times_are_short(value: float, said: str) -> None:
    assert seconds(value) == said
