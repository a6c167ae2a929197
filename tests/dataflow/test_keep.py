"""Laws of @keep: what a function becomes, what is refused, and what becomes of the groups that it
drops.
"""

import select
import time
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from rigs.columns import check_columns
from rigs.operators import make_context

from dataflow import GraphError, join, keep
from dataflow.graph import Graph
from dataflow.node import Stream
from dataflow.records import DROP_REASON, ERROR, GROUP_ID, ROLLOUT_ID, Array
from dataflow.runtime import Batch, Context
from dataflow.scorer import Keep, Scorer, scorer
from dataflow.testing import FakeEvaluate, FakeGenerator, FakePrompts, FakeTrainer


@keep(isolate=False)
def has_signal(reward: Array) -> bool:
    """Whether the group's rewards differ."""
    return reward.std() > 0


@keep(isolate=False)
def not_easy(reward: Array, most: float = 0.9) -> bool:
    """Whether the group's mean is below `most`."""
    return bool(reward.mean() < most)


class Log:
    def warning(self, event: str, **facts: Any) -> None:
        """Swallowed."""


def rows(rewards: list[float | None], group: int = 2, **columns: pa.Array) -> pa.RecordBatch:
    count = len(rewards)
    found = {
        GROUP_ID: pa.array(np.arange(count) // group),
        ROLLOUT_ID: pa.array(np.arange(count)),
        "reward": pa.array(rewards, pa.float64()),
        ERROR: pa.nulls(count, pa.string()),
        **columns,
    }
    return pa.RecordBatch.from_arrays(list(found.values()), names=list(found))


def passed_through(made: Scorer[..., Any], records: pa.RecordBatch) -> pa.RecordBatch:
    """What the operator made of the rows, in their order, as it promised."""
    runtime = made.build(Context(node=made.name, log=Log()))
    found: list[pa.RecordBatch] = []
    deadline = time.monotonic() + 30
    try:
        runtime.push(Batch("prompts", records))
        while runtime.pending():
            assert time.monotonic() < deadline
            found += [batch.records for batch in runtime.work() or []]
            if waits := runtime.waits():
                select.select(waits, [], [], 0.02)
    finally:
        runtime.close()
    (batch,) = pa.Table.from_batches(found).sort_by(ROLLOUT_ID).combine_chunks().to_batches()
    check_columns(
        batch, made.provides(dict(zip(records.schema.names, records.schema.types, strict=True)))
    )
    return batch


def reasons(batch: pa.RecordBatch) -> list[str | None]:
    return batch.column(DROP_REASON).to_pylist()


# What a function becomes


def test_a_filter_is_an_operator_that_reads_columns_and_adds_the_reason() -> None:
    assert isinstance(not_easy, Keep) and not_easy.name == "not_easy"
    assert not_easy.reads() == {"reward": Array} and list(
        not_easy.configured(most=0.5).given_knobs
    ) == ["most"]
    assert set(not_easy.provides({"x": pa.int64()})) == {"x", ERROR, DROP_REASON}
    assert (not_easy.light, not_easy.state, not_easy.knobs()) == (
        True,
        "scored",
        {"isolate": False},
    )


def test_a_filter_called_with_plain_values_is_the_function() -> None:
    assert has_signal(np.array([0.0, 1.0])) and not has_signal(np.ones(2))


@pytest.mark.parametrize("isolate", [True, False])
def test_groups_that_it_says_false_of_carry_its_name_and_all_rows_go_on(isolate: bool) -> None:
    made = keep(isolate=isolate)(has_signal.function)
    found = passed_through(made, rows([0.0, 1.0, 1.0, 1.0, 0.5, 0.0]))
    assert reasons(found) == [None, None, "has_signal", "has_signal", None, None]
    assert found.drop_columns([DROP_REASON]).equals(rows([0.0, 1.0, 1.0, 1.0, 0.5, 0.0]))


def test_the_first_filter_that_drops_names_the_reason_and_those_behind_it_are_not_asked() -> None:
    asked: list[list[float]] = []

    @keep(isolate=False)
    def late(reward: Array) -> bool:
        asked.append(reward.tolist())
        return False

    found = passed_through(late, passed_through(has_signal, rows([1.0, 1.0, 0.0, 1.0])))
    assert reasons(found) == ["has_signal", "has_signal", "late", "late"]
    assert asked == [[0.0, 1.0]]


@pytest.mark.parametrize("per", ["row", "group"])
def test_a_scorer_behind_it_leaves_dropped_rows_alone(per: Any) -> None:
    calls: list[Any] = []

    def tenfold(reward: Any) -> Any:
        calls.append(reward)
        return 10 * reward

    found = passed_through(
        scorer(per=per, isolate=False)(tenfold),
        passed_through(has_signal, rows([1.0, 1.0, 0.0, 1.0])),
    )
    assert found.column("tenfold").to_pylist() == [None, None, 0.0, 10.0]
    assert found.column(ERROR).null_count == 4
    assert sum(np.size(call) for call in calls) == 2


def test_it_sees_the_good_rows_alone_and_is_not_asked_where_there_are_none() -> None:
    errors = pa.array([None, "reward: bad", "reward: bad", "reward: bad"], pa.string())
    found = passed_through(has_signal, rows([1.0, None, None, None], **{ERROR: errors}))
    assert reasons(found) == ["has_signal", None, None, None]
    assert found.column(ERROR).equals(errors)


@pytest.mark.parametrize(
    ("says", "error"),
    [
        (lambda: 1 / 0, "decide: raised: ZeroDivisionError: division by zero"),
        (lambda: 0.5, "decide: unusable: returned 0.5 (float), which is no bool"),
        (
            lambda: np.array([True, False]),
            "decide: unusable: returned array([ True, False]) (ndarray), which is no bool",
        ),
        (lambda: None, "decide: unusable: returned None (NoneType), which is no bool"),
    ],
)
def test_anything_but_a_bool_is_the_error_of_the_rows_and_no_reason(says: Any, error: str) -> None:
    @keep(isolate=False)
    def decide(reward: Array):  # type: ignore[no-untyped-def]
        return says()

    found = passed_through(decide, rows([1.0, 0.0]))
    assert all(text.startswith(error) for text in found.column(ERROR).to_pylist())
    assert reasons(found) == [None, None]


# What is refused


def test_a_filter_per_row_is_refused() -> None:
    with pytest.raises(
        GraphError, match=r"a filter drops whole groups, but @keep got per='row'; leave `per` out"
    ):
        keep(per="row")(has_signal.function)  # type: ignore[call-overload]


@pytest.mark.parametrize("annotation", [float, list[bool], Array, str])
def test_a_filter_that_says_more_or_less_than_a_bool_is_refused(annotation: Any) -> None:
    def decide(reward):  # type: ignore[no-untyped-def]
        return True

    decide.__annotations__["return"] = annotation
    with pytest.raises(
        GraphError, match=r"filter 'decide' \(test_keep.py:\d+\) returns .*annotate it -> bool"
    ):
        keep(decide)


def test_an_unknown_limit_is_refused() -> None:
    with pytest.raises(GraphError, match="Keep has no knob 'timeout'.*did you mean 'timeout_s'"):
        keep(timeout=3)(has_signal.function)  # type: ignore[call-overload]


def graph() -> tuple[Graph, Stream[Any], FakeTrainer]:
    g = Graph("filters")
    reward = scorer(name="reward")(lambda_free)
    return g, reward(FakeGenerator()(g.source(FakePrompts()))), FakeTrainer(columns=("reward",))


def lambda_free(completion: str) -> float:
    return float(len(completion))


def test_a_column_that_the_filter_reads_must_be_there() -> None:
    g = Graph("filters")
    with pytest.raises(
        GraphError, match="'has_signal' reads column 'reward', but 'generator' provides"
    ):
        has_signal(FakeGenerator()(g.source(FakePrompts())))


def test_several_filters_in_a_row_share_the_column_and_branches_meet_again() -> None:
    g, stream, trainer = graph()
    trainer(join(not_easy(has_signal(stream)), keep(name="short")(has_signal.function)(stream)))
    g.check()


def test_a_drop_on_any_branch_is_one_behind_the_join() -> None:
    from dataflow.scoring.joining import JoinRuntime

    sources = {"prompts": ("a", "b")}
    runtime = JoinRuntime(make_context(node="join", origins=sources))
    both = rows([1.0, 1.0, 0.0, 1.0])
    runtime.push(Batch("prompts", passed_through(not_easy.configured(most=9.0), both), "a"))
    runtime.push(Batch("prompts", passed_through(has_signal, both), "b"))
    merged = [batch.records for batch in runtime.work() or []]
    assert [reasons(batch) for batch in merged] == [["has_signal", "has_signal"], [None, None]]


def test_an_evaluation_behind_a_filter_is_refused() -> None:
    g, stream, trainer = graph()
    trainer(has_signal(stream))
    held_out = FakeGenerator(name="other")(g.source(FakePrompts(name="held_out")))
    score = scorer(name="length")(lambda_free)
    FakeEvaluate()(keep(name="long")(has_length)(score(held_out)))
    with pytest.raises(
        GraphError, match="'eval' evaluates rows of 'held_out' behind a filter.*apply the @keep"
    ):
        g.check()


def has_length(length: Array) -> bool:
    return bool(length.max() > 0)


def test_a_filter_may_look_at_groups_of_a_single_rollout() -> None:
    g = Graph("filters")
    stream = FakeGenerator(group_size=1)(g.source(FakePrompts()))
    FakeTrainer()(keep(name="long")(has_length)(scorer(name="length")(lambda_free)(stream)))
    g.check()
