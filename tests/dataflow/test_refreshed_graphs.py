"""g.feedback(trainer.weights, reference, every=n): what is refused, drawn, planned and written
down.
"""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from dataflow import Devices, Graph, GraphError, LoRA, Model, plan
from dataflow.history.describe import graph_facts
from dataflow.history.resume import _edge_changes
from dataflow.planning.model_size import ModelSize
from dataflow.planning.wiring import graph_around
from dataflow.staleness import Bound
from dataflow.structure import readers_of, refreshes_of
from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer
from dataflow.weight_ends import Refresh
from operators import Logprobs, Values

POLICY = Model("policy")


def build(
    *,
    every: object = 10,
    decay: float = 0.0,
    reference: Model | None = None,
    policy: Model = POLICY,
    max_staleness: int | None = None,
) -> Graph:
    graph, generator = Graph("test"), FakeGenerator(model=policy)
    trainer, own = FakeTrainer(model=policy), Logprobs(reference or policy.frozen())
    trainer(own(generator(graph.source(FakePrompts()))))
    graph.feedback(trainer.weights, generator, max_staleness=1)
    graph.feedback(
        trainer.weights.average(decay=decay), own, max_staleness=max_staleness, every=every
    )  # type: ignore[arg-type]
    graph.check()
    return graph


def a_generator() -> None:
    graph = build()
    graph.feedback(graph.operators["trainer"].weights, graph.operators["generator"], every=2)  # type: ignore[attr-defined]


def twice() -> None:
    graph = build()
    graph.feedback(graph.operators["trainer"].weights, graph.operators["ref_logprobs"], every=2)  # type: ignore[attr-defined]


def an_average_for_a_generator() -> None:
    graph, generator, trainer = (
        Graph("test"),
        FakeGenerator(model=POLICY),
        FakeTrainer(model=POLICY),
    )
    trainer(generator(graph.source(FakePrompts())))
    graph.feedback(trainer.weights.average(decay=0.9), generator, max_staleness=1)


def a_head() -> None:
    graph, generator, trainer = (
        Graph("test"),
        FakeGenerator(model=POLICY),
        FakeTrainer(model=POLICY),
    )
    values = Values(Model("policy", head="value").frozen())
    trainer(values(generator(graph.source(FakePrompts()))))
    graph.feedback(trainer.weights, values, every=3)


def a_model_that_is_not_frozen() -> None:
    build(reference=Model("other"))


def other_shapes() -> None:
    sizes = {
        name: ModelSize(parameters=9, layers=2, width=width)
        for name, width in (("policy", 8), ("other", 16))
    }
    plan(build(reference=Model("other").frozen()), Devices(cpus=4), sizes=sizes)


ADAPTED, OTHER = (
    Model("policy", lora=LoRA(rank=4)),
    Model("other", lora=LoRA(rank=4), is_frozen=True),
)


REFUSED: dict[Callable[[], object], str] = {
    lambda: build(
        every=0
    ): "every counts steps between two versions and cannot be 0; give a whole number of 1 or more",
    lambda: build(every=2.0): "every counts steps .* cannot be 2.0; give",
    lambda: build(every=True): "every counts steps .* cannot be True; give",
    lambda: build(
        every=2, max_staleness=0
    ): "one number, but got max_staleness=0 and every=2; give max_staleness",
    lambda: build(
        every=None
    ): "'ref_logprobs' is told how new its weights are by one number, but got neither; give",
    lambda: build(
        decay=1.0
    ): "'trainer' cannot average its weights with decay=1.0; give a number from 0 up to 1",
    lambda: build(decay=-0.1): "'trainer' cannot average its weights with decay=-0.1; give",
    a_generator: (
        "'generator' generates what 'trainer' trains, .* got every=2; give it max_staleness"
    ),
    twice: "'ref_logprobs' already has a feedback from 'trainer'; drop one",
    an_average_for_a_generator: (
        "'generator' would read the newest average of 'trainer'.*give .*every="
    ),
    a_head: "'trainer' trains 'policy', whose weights 'values' cannot take .* differ in head; give",
    lambda: build(
        reference=Model("policy", dtype="bfloat16").frozen()
    ): "differ in dtype; give it a Model that",
    lambda: build(policy=ADAPTED): "differ in lora; give .* so here the one that is trained",
    lambda: build(
        policy=ADAPTED, reference=OTHER
    ): "trains adapters of 'policy', .* no change to 'other'.*; give",
    a_model_that_is_not_frozen: r"'ref_logprobs' reads 'other', which is not frozen\(\)",
    other_shapes: (
        "reads a model of 2 layers of width 16, .* trained is one of 2 layers of width 8, .* same"
        " shapes"
    ),
}


@pytest.mark.parametrize("wrong", REFUSED, ids=lambda each: REFUSED[each][:40])
def test_what_cannot_be_refreshed_is_refused(wrong: Callable[[], object]) -> None:
    with pytest.raises(GraphError) as caught:
        wrong()
    assert re.search(REFUSED[wrong], str(caught.value), re.DOTALL), str(caught.value)


def test_adapters_refresh_a_reader_of_the_model_that_is_trained() -> None:
    build(policy=ADAPTED, reference=ADAPTED)


def test_an_unfrozen_model_that_is_frozen_nowhere_may_still_not_change_by_itself() -> None:
    graph, generator, trainer = (
        Graph("test"),
        FakeGenerator(model=POLICY),
        FakeTrainer(model=POLICY),
    )
    own = Logprobs(POLICY.frozen())
    trainer(own(generator(graph.source(FakePrompts()))))
    with pytest.raises(
        GraphError, match="reads frozen 'policy', which never changes; .* or refresh it with every="
    ):
        graph.feedback(trainer.weights, own, max_staleness=1)


@pytest.mark.parametrize(("decay", "told"), [(0.0, "every 10"), (0.99, "average 0.99, every 10")])
@pytest.mark.parametrize("kind", ["svg", "html", "mmd", "dot"])
def test_the_picture_says_how_often_and_what(
    decay: float, told: str, kind: str, tmp_path: Path
) -> None:
    graph = build(decay=decay)
    assert told in graph.draw(tmp_path / f"graph.{kind}", plan(graph, Devices(cpus=4))).read_text()


def test_the_plan_names_the_executor_of_the_edge_and_what_the_trainer_keeps() -> None:
    sizes = {"policy": ModelSize(parameters=1 << 20)}
    made = plan(build(decay=0.9, every=4), Devices(cpus=4), sizes=sizes)
    (line,) = [
        line
        for line in made.explain().splitlines()
        if line.startswith("weights trainer -> ref_logprobs")
    ]
    assert line.endswith(
        "shared_memory (1 trainer rank -> 1 reader, up to 4.0 MiB each, average 0.9, every 4)"
    )
    need = made.placements["trainer"].need
    assert need is not None and need.parts["refreshed"] == (4 + 4) << 20
    plain = plan(build(every=1), Devices(cpus=4), sizes=sizes).placements["trainer"].need
    assert plain is not None and "refreshed" not in plain.parts


def test_a_refreshed_reader_is_told_how_often_and_bounds_nothing_else() -> None:
    graph = build(every=3)
    made = plan(graph, Devices(cpus=4))
    assert graph_around(graph, made, "ref_logprobs").feedback == Bound(
        max_staleness=0, prompts_per_step=8, every=3
    )
    assert made.bounds == {"prompts": Bound(max_staleness=1, prompts_per_step=8)}
    assert graph_around(graph, made, "trainer").forwards == ("ref_logprobs",)


def test_readers_are_told_apart_by_the_versions_that_they_get() -> None:
    graph = build(every=3, decay=0.5)
    assert [reader.name for reader in readers_of(graph, "trainer")] == ["generator"]
    (refresh,) = refreshes_of(graph, "trainer")
    assert refresh == Refresh(every=3, decay=0.5)
    assert [reader.name for reader in readers_of(graph, "trainer", refresh)] == ["ref_logprobs"]


def test_a_swapped_graph_keeps_its_averages() -> None:
    graph = build(every=3, decay=0.5)
    other = graph.swap("trainer", FakeTrainer(model=POLICY, prompts_per_step=2))
    assert [(f.refresh, f.weights.decay, f.max_staleness) for f in other.feedbacks] == [
        (f.refresh, f.weights.decay, f.max_staleness) for f in graph.feedbacks
    ]


def test_a_run_is_not_resumed_with_another_refresh() -> None:
    was, is_now = (
        next(
            edge
            for edge in graph_facts(build(every=every))["edges"]
            if edge["to"] == "ref_logprobs" and "refresh" in edge
        )
        for every in (10, 20)
    )
    assert was["refresh"] == {"every": 10, "decay": 0.0} and was["max_staleness"] is None
    (said,) = _edge_changes(("trainer", "ref_logprobs", "weights", ""), was, is_now)
    assert said.startswith("refresh of trainer -> ref_logprobs (weights) was {'every': 10")
    assert not _edge_changes(("trainer", "ref_logprobs", "weights", ""), was, was)
