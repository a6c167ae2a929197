"""`g.insert` and `g.remove`: another graph, checked anew, that runs; what no longer fits is
named.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from rigs.graphs import fake_graph

from dataflow import Graph, GraphError, Model, Run, inline, join, keep, run, scorer
from dataflow.node import Transform
from dataflow.records import Columns
from dataflow.testing import FakeEvaluate, FakeGenerator, FakePrompts, FakeTrainer

MODEL = Model("m")


@scorer(isolate=False)
def reward(completion: str, answer: str) -> float:
    return float(completion == answer)


@scorer(isolate=False)
def length(completion: str) -> int:
    return len(completion)


@scorer(isolate=False)
def penalty(reward: float, length: int) -> float:
    return reward - length


@scorer
def of_text(reward: str) -> float:
    return 0.0


@dataclass(frozen=True, eq=False)
class Writes(Transform):
    """Another operator that writes a column `length`."""

    def provides(self, columns: Columns) -> Columns:
        return {**columns, "length": pa.int64()}


def build(*scorers: Any, columns: tuple[str, ...] = ()) -> Graph:
    g = Graph("edited")
    generator, trainer = (
        FakeGenerator(model=MODEL),
        FakeTrainer(model=MODEL, prompts_per_step=2, columns=columns),
    )
    stream = generator(g.source(FakePrompts()))
    for each in scorers:
        stream = each(stream)
    trainer(stream)
    g.feedback(trainer.weights, generator, max_staleness=3)
    return g


def ways(graph: Graph) -> set[tuple[str, str]]:
    return {(u, v) for u, v, data in graph.nx.edges(data=True) if data["plane"] == "data"}


def test_an_inserted_operator_stands_between_a_node_and_its_readers_the_first_graph_stays() -> None:
    graph = build(reward)
    edited = graph.insert(length, after="generator")
    assert ways(edited) == {
        ("prompts", "generator"),
        ("generator", "length"),
        ("length", "reward"),
        ("reward", "trainer"),
    }
    assert edited.nx.edges["trainer", "generator", "weights"]["max_staleness"] == 3
    assert "length" not in graph.operators
    assert ways(edited.remove("length")) == ways(graph)
    at_the_end = edited.insert(penalty, after="reward")
    assert ("penalty", "trainer") in ways(at_the_end)
    assert {"reward", "length", "penalty"} <= set(at_the_end.calls[-1].inputs[0].columns)


def test_an_edited_graph_runs_and_its_rows_have_the_columns(tmp_path: Path) -> None:
    graph = (
        fake_graph(scorers=(length,), prompts_per_step=4)
        .insert(reward, after="generator")
        .remove("length")
    )
    result = run(graph, steps=2, on=inline(), runs=tmp_path, quiet=True)
    assert result.verdict.clean
    rows = Run(result.folder).rollouts()
    assert rows.column("reward").to_pylist() == [1.0] * rows.num_rows == [1.0] * 32
    assert "length" not in rows.column_names
    assert result._repr_html_() == Run(result.folder)._repr_html_()


def test_rows_of_one_source_alone_pass_an_operator_that_was_inserted_for_it() -> None:
    g = Graph("two")
    generator, trainer = FakeGenerator(model=MODEL), FakeTrainer(model=MODEL, prompts_per_step=2)
    trainer(reward(generator(g.source(FakePrompts()))))
    FakeEvaluate()(reward(generator(g.source(FakePrompts(name="held_out")))))
    g.feedback(trainer.weights, generator, max_staleness=1)
    only = g.insert(length, after="reward", source="prompts")
    assert {("reward", "length"), ("length", "trainer"), ("reward", "eval")} <= ways(only)
    both = g.insert(length, after="reward")
    assert {("length", "trainer"), ("length", "eval")} <= ways(both)
    assert ("reward", "eval") not in ways(both)
    with pytest.raises(
        GraphError,
        match=r"rows of 'others' do not come from 'reward', which has those of \['prompts",
    ):
        g.insert(length, after="reward", source="others")


def test_a_branch_of_a_join_goes_and_a_join_of_one_stream_is_that_stream() -> None:
    g = Graph("joined")
    rollouts = FakeGenerator(model=MODEL)(g.source(FakePrompts()))
    trainer = FakeTrainer(model=MODEL, prompts_per_step=2)
    trainer(join(reward(rollouts), length(rollouts)))
    g.feedback(trainer.weights, g.operators["generator"], max_staleness=1)
    one = g.remove("length")
    assert {("generator", "join"), ("reward", "join")} <= ways(one)
    none = one.remove("reward")
    assert ways(none) == {("prompts", "generator"), ("generator", "trainer")}
    with pytest.raises(GraphError, match=r"'join' joins the streams of \['reward', 'length'\]"):
        g.remove("join")


def test_a_filter_is_inserted_and_removed() -> None:
    @keep
    def hard(reward: list[float]) -> bool:
        return sum(reward) < 4

    edited = build(reward).insert(hard, after="reward")
    assert edited.calls[-1].inputs[0].columns["drop_reason"] == pa.string()
    assert ways(edited.remove("hard")) == ways(build(reward))


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (
            lambda: build(reward, length, penalty).remove("reward"),
            (
                "'reward' cannot be removed: 'penalty' reads column 'reward', which 'reward'"
                " writes; remove 'penalty' before"
            ),
        ),
        (
            lambda: build(reward, columns=("reward",)).remove("reward"),
            "'trainer' reads column 'reward'",
        ),
        (
            lambda: build(reward).remove("rewards"),
            "no operator 'rewards' to remove; .*did you mean 'reward'",
        ),
        (
            lambda: build(reward).remove("prompts"),
            "'prompts' is a source, and nothing would come in its place",
        ),
        (
            lambda: build(reward).remove("trainer"),
            r"without it nobody reads the rows of \['reward'\]",
        ),
        (lambda: build(reward).remove("generator"), "'generator' makes rollouts of prompts"),
        (
            lambda: build(reward).insert(penalty, after="reward"),
            "'penalty' reads column 'length', but 'reward'",
        ),
        (
            lambda: build(reward).insert(of_text, after="reward"),
            "'of_text' reads column 'reward' as str",
        ),
        (
            lambda: build(reward).insert(length, after="trainer"),
            r"'trainer' is a sink, .*reads: \['reward'\]",
        ),
        (
            lambda: build(reward).insert(length, after="rewrd"),
            "no operator 'rewrd' to insert behind",
        ),
        (
            lambda: build(reward).insert(reward, after="generator"),
            "'reward' is in the graph already",
        ),
        (
            lambda: build(reward).insert(FakePrompts(name="more"), after="reward"),
            "a source; give it one that takes",
        ),
        (
            lambda: build(reward).insert(FakeTrainer(name="more"), after="reward"),
            "a sink; give it one that takes",
        ),
        (lambda: build(reward).insert("length", after="reward"), "but got str 'length'"),
        (
            lambda: build(reward, length).insert(Writes(name="other"), after="generator"),
            (
                "'other' cannot stand behind 'generator': it writes column 'length', which 'length'"
                " writes further on"
            ),
        ),
    ],
)
def test_what_no_longer_fits_is_refused_by_name(edit: Any, said: str) -> None:
    with pytest.raises(GraphError, match=said):
        edit()
