"""Which trainer bounds what in a graph of an actor and a critic, and what a run makes of two
trainers.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest

from dataflow import Graph, Model, scorer
from dataflow.folder.ledger import Ledger
from dataflow.folder.run_folder import RunFolder
from dataflow.history.verify import verify
from dataflow.node import Transform
from dataflow.planning.hosts import Devices
from dataflow.planning.plan import Plan, plan
from dataflow.planning.wiring import bounds_at, edges, graph_around
from dataflow.records import Columns
from dataflow.scheduler.state_machine import RunStateMachine
from dataflow.staleness import Bound
from dataflow.structure import feeding, leading, lines_of, own_folder
from dataflow.testing import FakeEvaluate, FakeGenerator, FakePrompts, FakeTrainer
from dataflow.worker.messages import NodeCommand

ACTOR, CRITIC = Model("actor"), Model("critic")


class Values(Transform):
    """Reads the critic."""

    model = CRITIC

    def provides(self, columns: Columns) -> Columns:
        return {**columns, "values": pa.float64()}


@scorer
def reward(completion: str) -> float:
    return float(len(completion))


@pytest.fixture
def graph() -> Graph:
    g = Graph("ppo")
    generator, values = FakeGenerator(model=ACTOR, group_size=64), Values(name="values")
    actor = FakeTrainer(model=ACTOR, name="actor", prompts_per_step=32)
    critic = FakeTrainer(model=CRITIC, name="critic", prompts_per_step=48)
    rows = reward(values(generator(g.source(FakePrompts()))))
    actor(rows)
    critic(rows)
    g.feedback(critic.weights, values, max_staleness=0)
    g.feedback(actor.weights, generator, max_staleness=3)
    FakeEvaluate(every_steps=10)(reward(values(generator(g.source(FakePrompts(name="held_out"))))))
    return g


@pytest.fixture
def planned(graph: Graph) -> Plan:
    return plan(graph, Devices(cpus=2), steps=7)


def bounds(graph: Graph, planned: Plan, node: str) -> dict[str, Bound]:
    return bounds_at(graph, planned, graph.operators[node])


def test_the_trainer_that_feeds_the_generator_leads(graph: Graph) -> None:
    assert {
        source: feedback.weights.trainer.name for source, feedback in feeding(graph).items()
    } == {"prompts": "actor"}
    assert leading(graph) == ["actor"]


def test_only_trainers_among_several_have_folders_of_their_own(graph: Graph) -> None:
    assert [own_folder(graph, node) for node in ("actor", "critic", "eval")] == [
        "actor",
        "critic",
        None,
    ]
    alone, trainer = Graph("alone"), FakeTrainer(model=ACTOR)
    trainer(FakeGenerator()(alone.source(FakePrompts())))
    assert own_folder(alone, "trainer") is None


def test_evaluations_have_folders_of_their_own_where_there_are_several(graph: Graph) -> None:
    two = Graph("two")
    rows = FakeGenerator()(two.source(FakePrompts()))
    for name in ("often", "seldom"):
        FakeEvaluate(name=name)(rows)
    assert [own_folder(two, name) for name in ("often", "seldom")] == ["often", "seldom"]


def test_a_source_is_bounded_by_the_trainer_of_its_generator_whatever_the_order_of_feedbacks(
    planned: Plan,
) -> None:
    assert dict(planned.bounds) == {"prompts": Bound(max_staleness=3, prompts_per_step=32, steps=7)}


def test_each_operator_counts_versions_and_steps_of_the_trainer_whose_weights_it_holds(
    graph: Graph, planned: Plan
) -> None:
    assert bounds(graph, planned, "actor") == {
        "prompts": Bound(max_staleness=3, prompts_per_step=32, steps=7)
    }
    assert bounds(graph, planned, "critic") == {}
    assert graph_around(graph, planned, "values").feedback == Bound(
        max_staleness=0, prompts_per_step=48
    )
    assert bounds(graph, planned, "generator") == {
        "prompts": Bound(max_staleness=3, prompts_per_step=32)
    }


def test_the_source_issues_enough_for_the_trainer_that_takes_most(
    graph: Graph, planned: Plan
) -> None:
    assert bounds(graph, planned, "prompts")["prompts"] == Bound(
        max_staleness=3, prompts_per_step=48, steps=7
    )


def test_with_one_trainer_all_have_the_same_bound() -> None:
    g, generator, trainer = Graph("one"), FakeGenerator(model=ACTOR), FakeTrainer(model=ACTOR)
    trainer(reward(generator(g.source(FakePrompts()))))
    g.feedback(trainer.weights, generator, max_staleness=1)
    made = plan(g, Devices(cpus=2), steps=3)
    for node in g.operators:
        assert graph_around(g, made, node).bounds == {
            "prompts": Bound(max_staleness=1, prompts_per_step=8, steps=3)
        }


def test_an_edge_into_a_critic_holds_what_the_generator_may_have_in_flight_and_a_step_of_its_own(
    graph: Graph,
) -> None:
    last = next(edge for edge in edges(graph) if edge.consumer == "critic")
    assert last.capacity_rows >= ((3 + 1) * 32 + 48) * 64


def test_the_run_s_step_is_that_of_the_trainer_that_leads(graph: Graph, planned: Plan) -> None:
    state = RunStateMachine(graph, planned)
    state.start()
    state.hear("eval", {"round": 0})
    assert state.hear("critic", {"step": 12}) == []
    assert state.hear("actor", {"step": 10}) == [NodeCommand("held_out", {"evaluate": 10})]
    assert state.step == 10


def test_a_run_is_over_when_all_trainers_are_done(graph: Graph, planned: Plan) -> None:
    state = RunStateMachine(graph, planned)
    state.start()
    state.hear("eval", {"round": 0})
    state.hear("actor", {"step": 7, "done": 1})
    assert state.phase == "training"
    state.hear("critic", {"step": 7, "done": 1})
    assert state.phase == "last_evaluation"


def test_a_source_hears_the_most_that_one_of_its_trainers_has_dropped(
    graph: Graph, planned: Plan
) -> None:
    state = RunStateMachine(graph, planned)
    state.start()
    assert state.hear("actor", {"dropped": 3}) == [NodeCommand("prompts", {"dropped": 3})]
    assert state.hear("critic", {"dropped": 2}) == []
    assert state.hear("critic", {"dropped": 4}) == [NodeCommand("prompts", {"dropped": 4})]


def test_lines_of_a_trainer_leave_out_the_steps_of_others_and_keep_evaluations() -> None:
    lines = [
        {"node": "actor", "step": 1, "loss": 0.1},
        {"node": "critic", "step": 1, "loss": 9.0},
        {"step": 1, "eval_accuracy": 0.5},
    ]
    assert lines_of(lines, "actor") == [lines[0], lines[2]]
    assert lines_of(lines, None) == lines
    assert lines_of([{"step": 1, "loss": 0.1}], "actor") == [{"step": 1, "loss": 0.1}]


def test_what_one_trainer_has_trained_is_in_flight_for_the_other_alone(tmp_path: Path) -> None:
    with Ledger.create(
        tmp_path / "ledger.db", {"actor": ["prompts"], "critic": ["prompts"]}
    ) as ledger:
        ledger.issue("prompts", [(group, str(group)) for group in range(3)])
        ledger.commit_step("actor", 1, version=1, source="prompts", trained=[0, 1])
        ledger.commit_step("critic", 1, version=1, source="prompts", trained=[0])
        ids = [
            [group.group_id for group in ledger.in_flight("prompts", node)]
            for node in ("actor", "critic", None)
        ]
    assert ids == [[2], [1, 2], [1, 2]]


def _two_sinks(folder: RunFolder, oldest: int) -> None:
    """Step 1 of two trainers, of a rollout whose oldest token is of a version."""
    rows = pa.table(
        {"group_id": [0], "position": [0], "versions": pa.array([[oldest]], pa.list_(pa.int32()))}
    )
    folder.write_json("config.json", {"max_staleness": {"actor": 0, "critic": None}})
    with Ledger.create(folder.ledger, {"actor": ["prompts"], "critic": ["prompts"]}) as ledger:
        ledger.issue("prompts", [(0, "p")])
        for node in ("actor", "critic"):
            folder.rollouts_of(node).write(1, rows)
            ledger.commit_step(node, 1, version=1, source="prompts", trained=[0])
            folder.append_metrics({"step": 1, "node": node, "dropped": {}})


def test_the_age_of_rollouts_is_judged_by_the_trainer_whose_versions_they_have(
    tmp_path: Path,
) -> None:
    folder = RunFolder.create(tmp_path, "two")
    _two_sinks(folder, oldest=0)
    found = verify(folder.path)
    assert found.clean, found
    assert (
        found.summary
        == "actor: 1 group issued = 1 trained + 0 dropped + 0 in flight; 1 step; max staleness 0"
        " of 0 | critic: 1 group issued = 1 trained + 0 dropped + 0 in flight; 1 step"
    )


def test_a_token_of_a_version_that_did_not_exist_is_a_fault_of_the_trainer_that_made_it_alone(
    tmp_path: Path,
) -> None:
    folder = RunFolder.create(tmp_path, "two")
    _two_sinks(folder, oldest=5)
    assert verify(folder.path).faults == [
        "step 1 of 'actor' trained rollouts of version 5, which did not exist before it"
    ]


def test_rollouts_that_a_trainer_lacks_are_found_beside_those_of_another(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "two")
    _two_sinks(folder, oldest=0)
    folder.rollouts_of("critic").step_file(1).unlink()
    assert not verify(folder.path).clean


def test_trainers_may_flush_the_ledger_at_the_same_time(tmp_path: Path) -> None:
    """From other connections, and from the threads that write their checkpoints."""
    path = tmp_path / "ledger.db"
    Ledger.create(path, {"actor": ["prompts"]}).close()
    with Ledger.open(path) as ledger, ThreadPoolExecutor(4) as threads:
        for group in range(50):
            flushed = [threads.submit(ledger.flush) for _ in range(4)]
            ledger.issue("prompts", [(group, str(group))])
            for each in flushed:
                each.result(60)
        assert ledger.next_group_id("prompts") == 50
