"""Edges hold what may be in flight, and batches are cut between groups only."""

import itertools
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from dataflow import Graph, Model, inline, run
from dataflow.planning.wiring import edges
from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer
from dataflow.tokens.ragged import whole_groups


@pytest.mark.parametrize(
    ("prompts_per_step", "group_size", "max_staleness"), [(8, 4, 0), (512, 16, 4), (64, 64, 8)]
)
def test_an_edge_into_a_trainer_holds_all_that_the_bound_lets_be_in_flight(
    prompts_per_step: int, group_size: int, max_staleness: int
) -> None:
    graph, model = Graph("test"), Model("policy")
    generator = FakeGenerator(model=model, group_size=group_size)
    trainer = FakeTrainer(model=model, prompts_per_step=prompts_per_step)
    trainer(generator(graph.source(FakePrompts(size=None))))
    graph.feedback(trainer.weights, generator, max_staleness=max_staleness)
    last = next(edge for edge in edges(graph) if edge.consumer == "trainer")
    assert last.capacity_rows >= (max_staleness + 1) * prompts_per_step * group_size


@pytest.mark.parametrize(
    ("prompts_per_step", "max_staleness"), [(1, 0), (4, 2), (8, 0), (64, 4), (512, 1)]
)
def test_a_replica_gets_no_more_prompts_than_may_be_in_flight_and_eight_share_a_step(
    prompts_per_step: int, max_staleness: int
) -> None:
    graph, model = Graph("test"), Model("policy")
    generator, trainer = (
        FakeGenerator(model=model),
        FakeTrainer(model=model, prompts_per_step=prompts_per_step),
    )
    trainer(generator(graph.source(FakePrompts(size=None))))
    generator(graph.source(FakePrompts(name="held_out")))
    graph.feedback(trainer.weights, generator, max_staleness=max_staleness)
    first, _, held_out = edges(graph)
    in_flight = (max_staleness + 1) * prompts_per_step
    assert first.most_rows is not None
    assert (
        in_flight + first.batch_rows
        <= first.most_rows
        <= in_flight + prompts_per_step + first.batch_rows
    )
    assert first.capacity_rows == first.batch_rows * first.most_rows, (
        "each may keep the credit of its neighbours"
    )
    assert first.batch_rows == 1 or first.batch_rows * 8 <= prompts_per_step
    assert first.slack_rows == prompts_per_step // 2, (
        "two replicas share in each step, also where one gives all back"
    )
    assert 8 * held_out.batch_rows <= held_out.capacity_rows
    assert held_out.most_rows is None, "what is trained goes in order, and nothing else"


@pytest.mark.parametrize("step", [8, 600])
def test_every_edge_holds_what_the_longest_step_needs_where_most_is_dropped(step: int) -> None:
    """A step's worth that waits to be trained, one that was dropped and is not recorded, and then
    some.
    """
    graph, model = Graph("test"), Model("policy")
    generator = FakeGenerator(model=model, group_size=8)
    rows = generator(graph.source(FakePrompts(size=None)))
    FakeTrainer(name="slow", model=Model("critic"), prompts_per_step=step)(rows)
    trainer = FakeTrainer(model=model, prompts_per_step=4)
    trainer(rows)
    graph.feedback(trainer.weights, generator, max_staleness=0)
    prompts, *others = edges(graph)
    assert prompts.most_rows is not None and prompts.most_rows > 2 * step
    assert min(edge.capacity_rows for edge in others) >= 16 * 8 * prompts.most_rows, (
        "each may keep sixteen's credit"
    )


def test_a_step_may_be_of_any_length_where_nobody_waits_for_its_weights(tmp_path: Path) -> None:
    graph = Graph("test")
    trainer = FakeTrainer(model=Model("pupil"), prompts_per_step=600)
    trainer(FakeGenerator(model=Model("teacher"))(graph.source(FakePrompts(size=None))))
    assert run(graph, on=inline(), steps=1, runs=tmp_path, quiet=True).steps == 1


@pytest.mark.parametrize("sizes", [[1], [4, 4, 4], [3, 9, 1, 1, 20, 2], [50], [1] * 30])
def test_a_batch_is_cut_between_groups_and_nothing_is_lost(sizes: list[int]) -> None:
    ids = np.repeat(np.arange(len(sizes)), sizes)
    batch = pa.RecordBatch.from_arrays([pa.array(ids)], names=["group_id"])
    parts = whole_groups(batch, 8, 1 << 20)
    assert pa.Table.from_batches(parts).column(0).to_pylist() == ids.tolist()
    groups = [set(part.column(0).to_pylist()) for part in parts]
    assert sum(len(each) for each in groups) == len(sizes)
    assert all(
        part.num_rows <= 8 or len(each) == 1 for part, each in zip(parts, groups, strict=True)
    )


@pytest.mark.parametrize("lengths", [[10], [300, 300, 300], [10, 20, 900, 10, 20, 30], [100] * 30])
def test_a_batch_is_cut_by_bytes_too_and_only_a_single_group_has_more(lengths: list[int]) -> None:
    ids = pa.array(np.repeat(np.arange(len(lengths)), 2))
    tokens = pa.array(
        [[group] * length for group, length in enumerate(lengths) for _ in range(2)],
        pa.list_(pa.int32()),
    )
    batch = pa.RecordBatch.from_arrays([ids, tokens], names=["group_id", "tokens"])
    parts = whole_groups(batch, 1 << 20, 3000)
    assert pa.Table.from_batches(parts).equals(pa.Table.from_batches([batch]))
    groups = [set(part.column(0).to_pylist()) for part in parts]
    assert sum(len(each) for each in groups) == len(lengths), "no group is cut"
    assert all(
        part.nbytes <= 3000 or len(each) == 1 for part, each in zip(parts, groups, strict=True)
    )
    assert all(one.nbytes + two.nbytes > 3000 for one, two in itertools.pairwise(parts)), (
        "and none needlessly"
    )
