"""Whole runs with a filter: what it drops is counted under its name, and others are made in its
place.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rigs.graphs import reward, tiny_graph, words
from rigs.operators import make_context

from dataflow import Array, Result, inline, keep, run, scorer, verify
from dataflow.errors import OperatorError
from dataflow.folder.ledger import Ledger
from dataflow.folder.run_folder import RunFolder

pytestmark = [pytest.mark.usefixtures("one_core"), pytest.mark.timeout(180)]


@keep(isolate=False)
def two_of_three(group_id: Array) -> bool:
    """A third of the groups is dropped."""
    return bool(group_id[0] % 3 != 0)


@scorer(isolate=False)
def halved(reward: float, group_id: int) -> float:
    """Fails on the rows that are dropped before it, should it be asked."""
    assert group_id % 3, "a dropped row was scored"
    return reward / 2


@pytest.fixture(params=[pytest.param("processes", marks=pytest.mark.slow), "inline"])
def runs(request: pytest.FixtureRequest, tmp_path: Path, machine: None) -> Callable[..., Result]:
    on = inline() if request.param == "inline" else None
    return lambda graph, **how: run(graph, on=on, runs=tmp_path, quiet=True, **how)


def trained(result: Result) -> list[int]:
    steps = range(1, result.steps + 1)
    tables = [RunFolder.open(result.folder).rollouts_of().read(step) for step in steps]
    return [group for table in tables for group in table.column("group_id").unique().to_pylist()]


def test_what_a_filter_drops_is_counted_and_made_up_for(
    policy: Path, runs: Callable[..., Result]
) -> None:
    graph = tiny_graph(policy, scorers=(reward, two_of_three, halved), max_staleness=1)
    result = runs(graph, steps=4)
    wanted = [group for group in range(24) if group % 3]
    assert trained(result) == wanted[:16]
    assert result.verdict.clean, result.verdict.line
    assert verify(result.folder).clean
    lines = [line for line in result.metrics if "loss" in line]
    assert [line["dropped"] for line in lines] == [{"two_of_three": 2}] * 4
    assert max(line["staleness_max"] for line in lines) <= 1
    with Ledger.open(RunFolder.open(result.folder).ledger, readonly=True) as ledger:
        counts = ledger.counts("trainer")
    assert (counts.trained, dict(counts.dropped), counts.missing) == (16, {"two_of_three": 8}, 0)


@keep(isolate=False)
def one_of_seven(group_id: Array) -> bool:
    """Most groups are dropped, and travel with some that are not."""
    return bool(group_id[0] % 7 == 0)


@pytest.mark.slow
def test_a_filter_that_drops_nearly_all_does_not_stop_the_run(
    policy: Path, runs: Callable[..., Result]
) -> None:
    graph = tiny_graph(
        policy,
        scorers=(reward, one_of_seven),
        max_staleness=0,
        prompts_per_step=16,
        max_tokens=4,
        generator_knobs={"slots": 128},
    )
    result = runs(graph, steps=2)
    assert trained(result) == [group for group in range(32 * 7) if group % 7 == 0]
    assert result.verdict.clean, result.verdict.line


def test_a_source_that_ends_is_used_up_whatever_is_dropped(
    policy: Path, runs: Callable[..., Result]
) -> None:
    graph = tiny_graph(policy, scorers=(reward, two_of_three), prompts=words(20), epochs=1)
    result = runs(graph)
    assert trained(result) == [group for group in range(20) if group % 3][:12]
    assert "20 groups issued = 12 trained + 8 dropped" in result.verdict.line
    assert "7 two_of_three" in result.verdict.line and "1 too few for a step" in result.verdict.line


def test_a_filter_that_drops_everything_ends_the_run_and_is_named(
    policy: Path, tmp_path: Path
) -> None:
    @keep(isolate=False)
    def never(reward: Array) -> bool:
        return False

    with pytest.raises(
        OperatorError,
        match=r"dropped \d+ groups in a row and trained none; found \{'never': \d+\}.*"
        r"loosen the filter 'never'",
    ):
        run(tiny_graph(policy, scorers=(reward, never)), on=inline(), runs=tmp_path, quiet=True)


def test_groups_of_a_filter_that_raises_are_dropped_as_failed(policy: Path, tmp_path: Path) -> None:
    @keep(isolate=False)
    def picky(group_id: Array) -> bool:
        return bool(1 / (group_id[0] % 3))

    result = run(
        tiny_graph(policy, scorers=(reward, picky)), steps=2, on=inline(), runs=tmp_path, quiet=True
    )
    assert trained(result) == [1, 2, 4, 5, 7, 8, 10, 11]
    assert [line["dropped"] for line in result.metrics if "loss" in line] == [{"failed": 2}] * 2
    assert result.verdict.clean


@pytest.mark.slow
def test_a_trainer_that_starts_again_finds_the_drops_of_its_filters(
    policy: Path, tmp_path: Path
) -> None:
    from dataflow.runtime import Batch
    from dataflow.staleness import Bound
    from operators.trainer import Trainer

    graph = tiny_graph(policy, scorers=(reward, two_of_three), max_staleness=1, checkpoint_every=2)
    first = run(graph, steps=4, on=inline(), runs=tmp_path, quiet=True)
    folder = RunFolder.open(first.folder)
    wanted = [line["loss"] for line in first.metrics if line.get("step") == 3]
    rows = folder.rollouts_of().read(3)
    with Ledger.open(folder.ledger) as ledger:
        (plan, _) = ledger.roll_back_to(2, "trainer")
        assert (plan.trained, dict(plan.dropped)) == (
            (13, 14, 16, 17),
            {12: "two_of_three", 15: "two_of_three"},
        )
        context = make_context(
            node="trainer",
            steps=3,
            columns={"prompts": dict(zip(rows.column_names, rows.schema.types, strict=True))},
            bounds={"prompts": Bound(max_staleness=9, prompts_per_step=4)},
            folder=folder,
            ledger=ledger,
        )
        trainer: Any = graph.operators["trainer"]
        assert isinstance(trainer, Trainer)
        runtime = trainer.build(context)
        assert runtime.status()["dropped"] == 4
        gone = rows.filter([row.as_py() == 13 for row in rows.column("group_id")]).to_pylist()
        for group in (12, 15):
            told = [row | {"group_id": group, "drop_reason": "two_of_three"} for row in gone]
            (batch,) = type(rows).from_pylist(told, rows.schema).to_batches()
            runtime.push(Batch("prompts", batch))
        for batch in rows.combine_chunks().to_batches():
            runtime.push(Batch("prompts", batch))
        while runtime.work() is not None:
            pass
        runtime.close()
        assert dict(ledger.counts("trainer").dropped) == {"two_of_three": 6}
    again = [line for line in folder.read_metrics() if line.get("step") == 3][-1]
    assert ([again["loss"]], again["dropped"]) == (wanted, {"two_of_three": 2})
