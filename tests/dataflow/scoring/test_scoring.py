"""Laws of a scorer's runtime: every row comes back once, with a score or an error."""

import asyncio
import os
import select
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rigs.columns import check_columns, whole

from dataflow.errors import RecordError, WorldFailed
from dataflow.records import COMPLETION, ERROR, GROUP_ID, ROLLOUT_ID, TOKENS, Array
from dataflow.runtime import Batch, Context
from dataflow.scorer import Scorer, scorer
from dataflow.scoring.failure import RolloutFailure
from dataflow.scoring.pool import Answer, Encode
from dataflow.scoring.runtime import Scoring
from dataflow.scoring.signature import Noted
from dataflow.scoring.values import pack


def f_float(x: str) -> float:
    return 1.0


def reward(completion: str, answer: str, bonus: float = 0.0) -> float:
    return float(completion == answer) + bonus


def rows(completions: list[str], group: int = 2, **columns: pa.Array) -> pa.RecordBatch:
    count = len(completions)
    found = {
        GROUP_ID: pa.array(np.arange(count) // group),
        ROLLOUT_ID: pa.array(np.arange(count)),
        COMPLETION: pa.array(completions),
        "answer": pa.array(["right"] * count, pa.string()),
        TOKENS: pa.array([list(range(i % 4)) for i in range(count)], pa.list_(pa.int32())),
        ERROR: pa.nulls(count, pa.string()),
        **columns,
    }
    return pa.RecordBatch.from_arrays(list(found.values()), names=list(found))


class Log:
    def warning(self, event: str, **facts: Any) -> None:
        """Swallowed."""


def build(made: Scorer[..., Any]) -> Scoring:
    runtime = made.build(Context(node=made.name, log=Log()))
    assert isinstance(runtime, Scoring)
    return runtime


def drain(runtime: Scoring) -> list[Batch]:
    made: list[Batch] = []
    deadline = time.monotonic() + 30
    while runtime.pending():
        assert time.monotonic() < deadline, f"{runtime.pending()} rows never came back"
        made += runtime.work() or []
        if waits := runtime.waits():
            select.select(waits, [], [], 0.02)
    return made


def score(made: Scorer[..., Any], records: pa.RecordBatch) -> pa.RecordBatch:
    """The rows as one batch, in their first order, checked against what the scorer promised."""
    runtime = build(made)
    try:
        runtime.push(Batch("prompts", records))
        table = pa.Table.from_batches([batch.records for batch in drain(runtime)]).sort_by(
            ROLLOUT_ID
        )
    finally:
        runtime.close()
    (batch,) = table.combine_chunks().to_batches() if len(table) else [records.slice(0, 0)]
    if len(table):
        batch.validate(full=True)
        arrived = dict(zip(records.schema.names, records.schema.types, strict=True))
        check_columns(batch, made.provides(arrived))
        assert batch.column(ROLLOUT_ID).to_pylist() == records.column(ROLLOUT_ID).to_pylist()
    return batch


@pytest.fixture(params=[True, False], ids=["isolated", "in the worker"])
def isolate(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def judge(completion: str, answer: str) -> Any:
    match completion:
        case "raise":
            raise ValueError("bad\nin two lines")
        case "raise far away":
            return int("x" * 3)
        case "sys.exit":
            sys.exit(1)
        case "none":
            return None
        case "nan":
            return float("nan")
        case "text":
            return "text"
        case "numpy":
            return np.float32(0.5)
        case "array":
            return np.zeros(3)
        case "surrogate":
            raise ValueError("\ud800")
    return completion == answer


JUDGED = {
    "right": 1.0,
    "wrong": 0.0,
    "numpy": 0.5,
    "none": None,
    "raise": "verdict: raised: ValueError: bad in two lines (test_scoring.py:",
    "raise far away": "verdict: raised: ValueError: invalid literal",
    "sys.exit": "verdict: raised: SystemExit: 1 (test_scoring.py:",
    "nan": (
        "verdict: unusable: returned nan; return a finite number, or None where it does not apply"
    ),
    "text": "verdict: unusable: returned 'text' (str), which is no number",
    "array": "verdict: unusable: returned array([0., 0., 0.]) (ndarray), which is no number",
    "surrogate": "verdict: raised: ValueError: \\ud800 (test_scoring.py:",
}


def test_a_row_gets_a_score_or_an_error_and_never_both_and_none_is_neither(isolate: bool) -> None:
    scored = score(scorer(name="verdict", isolate=isolate)(judge), rows(list(JUDGED)))
    for value, error, wanted in zip(
        scored.column("verdict").to_pylist(),
        scored.column(ERROR).to_pylist(),
        JUDGED.values(),
        strict=True,
    ):
        if isinstance(wanted, str):
            assert value is None
            assert error.startswith(wanted)
        else:
            assert (value, error) == (wanted, None)


def test_rows_that_failed_before_are_passed_on_unscored(isolate: bool) -> None:
    def count(completion: str) -> float:
        assert completion != "b", "a failed row was scored"
        return 1.0

    errors = pa.array([None, "generator: no room", None], pa.string())
    scored = score(scorer(isolate=isolate)(count), rows(["a", "b", "c"], **{ERROR: errors}))
    assert scored.column("count").to_pylist() == [1.0, None, 1.0]
    assert scored.column(ERROR).to_pylist() == [None, "generator: no room", None]


def test_a_group_function_sees_the_good_rows_alone(isolate: bool) -> None:
    def share(reward: Array, completion: list[str]) -> Array:
        return np.asarray(reward / reward.sum() + 10 * len(completion))

    records = rows(
        ["a", "b", "c", "d", "e", "f"],
        3,
        reward=pa.array([1.0, None, 3.0, None, None, None]),
        **{ERROR: pa.array([None, "x", None, "y", "y", "y"], pa.string())},
    )
    scored = score(scorer(per="group", isolate=isolate)(share), records)
    assert scored.column("share").to_pylist() == [20.25, None, 20.75, None, None, None]
    assert scored.column(ERROR).to_pylist() == [None, "x", None, "y", "y", "y"]


def test_a_group_that_fails_fails_whole_and_alone(isolate: bool) -> None:
    def credit(reward: Array) -> Any:
        if reward[0] == 0:
            raise ValueError("zero")
        if reward[0] == 1:
            return [None, 2.0]
        if reward[0] == 2:
            return [float("inf"), 2.0]
        if reward[0] == 3:
            return [1.0]
        return reward.reshape(1, 2) if reward[0] == 4 else reward

    records = rows(["x"] * 12, 2, reward=pa.array(np.repeat(np.arange(6.0), 2)))
    scored = score(scorer(per="group", isolate=isolate)(credit), records)
    assert scored.column("credit").to_pylist() == [
        None,
        None,
        None,
        2.0,
        None,
        2.0,
        *[None] * 4,
        5.0,
        5.0,
    ]
    errors = scored.column(ERROR).to_pylist()
    assert [row for row, error in enumerate(errors) if error is None] == [2, 3, 5, 10, 11]
    assert errors[6] == "credit: unusable: returned 1 values for 2 rows; return one for each"


def test_one_number_may_stand_for_a_group() -> None:
    def mean(reward: Array) -> float:
        return float(reward.mean())

    records = rows(["x"] * 4, 2, reward=pa.array([1.0, 3.0, 5.0, 7.0]))
    scored = score(scorer(per="group", isolate=False)(mean), records)
    assert scored.column("mean").to_pylist() == [2.0, 2.0, 6.0, 6.0]


def test_numbers_per_token_travel_as_ragged_columns(isolate: bool) -> None:
    def halves(tokens: Array) -> Array:
        tokens += 1
        return tokens / 2

    records = rows(["a", "b", "c", "d"])
    scored = score(scorer(isolate=isolate)(halves), records)
    assert scored.column("halves").to_pylist() == [[], [0.5], [0.5, 1.0], [0.5, 1.0, 1.5]]
    assert records.column(TOKENS).to_pylist()[3] == [
        0,
        1,
        2,
    ], "the function's own array was changed, not the rows"

    def relative(tokens: list[Array]) -> list[Array]:
        return [each - max(map(len, tokens)) for each in tokens]

    scored = score(scorer(per="group", isolate=isolate)(relative), records)
    assert scored.column("relative").to_pylist() == [[], [-1.0], [-3.0, -2.0], [-3.0, -2.0, -1.0]]


@pytest.mark.parametrize(
    ("annotation", "found"),
    [(Array, "ndarray"), (list[int], "list"), (Any, "ndarray")],
    ids=["Array", "list", "Any"],
)
def test_a_list_column_arrives_as_its_annotation_says(annotation: Any, found: str) -> None:
    def kind(tokens: Any) -> str:
        return type(tokens).__name__

    kind.__annotations__["tokens"] = annotation
    scored = score(scorer(isolate=False)(kind), rows(["a", "b"]))
    assert scored.column("kind").to_pylist() == [found, found]


def test_a_function_is_not_asked_about_rows_without_a_value_unless_it_takes_none(
    isolate: bool,
) -> None:
    def is_missing(hint: str | None, tokens: Array) -> bool:
        return hint is None

    records = rows(["a", "b"], hint=pa.array([None, "h"], pa.string()))
    scored = score(scorer(isolate=isolate)(is_missing), records)
    assert scored.column(-1).to_pylist() == [True, False]

    def is_long(hint: str) -> bool:
        return len(hint) > 0

    scored = score(scorer(isolate=isolate)(is_long), records)
    assert scored.column(-1).to_pylist() == [None, True]
    assert scored.column(ERROR).null_count == 2

    def are_missing(weight: Array | None) -> Array:
        return np.asarray(np.isnan(weight))

    records = rows(["a", "b"], weight=pa.array([None, 3], pa.int64()))
    scored = score(scorer(per="group", isolate=isolate)(are_missing), records)
    assert scored.column(-1).to_pylist() == [1.0, 0.0]


def test_what_does_not_apply_changes_no_mean(isolate: bool) -> None:
    def centred(reward: Array) -> Array:
        return reward - reward.mean()

    reward = pa.array([1.0, None, 0.0, None, None, None], pa.float64())
    scored = score(scorer(per="group", isolate=isolate)(centred), rows(["x"] * 6, 3, reward=reward))
    assert scored.column("centred").to_pylist() == [0.5, None, -0.5, None, None, None]
    assert scored.column(ERROR).null_count == 6


# Whole batches, notes, retries


def test_a_batch_function_gets_all_rows_at_once_and_a_bad_group_fails_alone(isolate: bool) -> None:
    def worth(completion: list[str], answer: list[str]) -> list[float | None]:
        if "bad" in completion:
            raise ValueError("a bad one")
        return [None if each == "none" else float(len(completion)) for each in completion]

    made = scorer(per="batch", isolate=isolate)(worth)
    scored = score(made, rows(["a", "none", "b", "c", "d"]))
    assert scored.column("worth").to_pylist() == [5.0, None, 5.0, 5.0, 5.0]
    assert scored.column(ERROR).null_count == 5
    scored = score(made, rows(["a", "none", "bad", "c", "d"]))
    assert scored.column("worth").to_pylist() == [2.0, None, None, None, 1.0]
    errors = scored.column(ERROR).drop_null().to_pylist()
    assert len(errors) == 2 and errors[0].startswith(
        "worth: raised: ValueError: a bad one (test_scoring.py:"
    )


def test_a_group_that_hangs_or_ends_its_process_in_a_batch_fails_alone() -> None:
    def worth(completion: list[str]) -> list[float]:
        if "hang" in completion:
            time.sleep(60)
        if "die" in completion:
            os._exit(3)
        return [1.0 for _ in completion]

    scored = score(
        scorer(per="batch", timeout_s=0.5)(worth), rows(["a", "b", "hang", "c", "die", "d"])
    )
    assert scored.column("worth").to_pylist() == [1.0, 1.0, None, None, None, None]
    assert [error and error[:12] for error in scored.column(ERROR).to_pylist()] == [
        None,
        None,
        "worth: hung:",
        "worth: hung:",
        "worth: died:",
        "worth: died:",
    ]


def one_for_all(completion: list[str]) -> list[float]:
    return [1.0]


def mean_of_all(completion: list[str]) -> Array:
    return np.mean([len(each) for each in completion])  # type: ignore[return-value]


def rank(completion: list[str]) -> list[float]:
    lengths = [len(each) if each else 1 // 0 for each in completion]
    return [float(sorted(lengths).index(length)) for length in lengths]


@pytest.mark.parametrize(
    ("function", "completions", "said"),
    [
        (one_for_all, ["a", "b", "c", "d"], "unusable: returned 1 values for 4 rows"),
        (mean_of_all, ["a", "bb", "c", "dd"], "unusable: returned np.float64(1.5)"),
        (rank, ["a", "", "ccc", "d"], "raised: ZeroDivisionError"),
    ],
    ids=lambda case: getattr(case, "__name__", ""),
)
@pytest.mark.parametrize("group", [2, 4], ids=["two groups", "one group"])
def test_an_answer_for_several_rows_is_never_made_of_answers_for_some(
    function: Any, completions: list[str], said: str, group: int, isolate: bool
) -> None:
    """A function may compare rows: asked for one alone, it says something else of it."""
    scored = score(scorer(per="batch", isolate=isolate)(function), rows(completions, group))
    whole_groups = [1.0, 0.0] if function is rank and group == 2 else [None, None]
    assert scored.column(function.__name__).to_pylist() == [*[None] * 2, *whole_groups]
    errors = scored.column(ERROR).drop_null().to_pylist()
    assert len(errors) == 4 - 2 * (whole_groups[0] is not None)
    assert all(error.startswith(f"{function.__name__}: {said}") for error in errors)


def test_the_rows_other_columns_come_by_keyword_and_those_of_the_engine_do_not(
    isolate: bool,
) -> None:
    def seen(completion: str, **columns: Any) -> str:
        return " ".join(sorted(columns))

    records = rows(["a"], hint=pa.array(["h"]), extra=pa.array([{"a": 1}]))
    scored = score(scorer(isolate=isolate, rest=True)(seen), records)
    assert scored.column("seen").to_pylist() == ["answer extra hint"]


def test_a_note_is_a_column_beside_the_number(isolate: bool) -> None:
    def told(completion: str) -> Noted:
        return Noted(None if completion == "none" else 1.0, completion.upper())

    scored = score(scorer(isolate=isolate)(told), rows(["a", "none"]))
    assert scored.column("told").to_pylist() == [1.0, None]
    assert scored.column("told_note").to_pylist() == ["A", "NONE"]


@pytest.mark.parametrize("is_async", [False, True], ids=["function", "coroutine"])
def test_a_call_is_made_again_where_the_world_failed_and_only_there(
    tmp_path: Path, is_async: bool
) -> None:
    def ask(completion: str) -> float:
        calls = tmp_path / completion
        calls.write_text(calls.read_text() + "x" if calls.exists() else "x")
        if completion == "twice" and len(calls.read_text()) < 3:
            raise WorldFailed("busy", after_s=0.0)
        if completion == "own":
            raise ValueError("mine")
        if completion == "always":
            raise KeyError("theirs")
        return 1.0

    async def ask_async(completion: str) -> float:
        return ask(completion)

    function = ask_async if is_async else ask
    made = scorer(name="ask", retries=2, world=(KeyError,))(function)
    scored = score(made, rows(["once", "twice", "own", "always"]))
    assert scored.column("ask").to_pylist() == [1.0, 1.0, None, None]
    errors = scored.column(ERROR).to_pylist()
    assert [RolloutFailure.read(error).cause for error in errors if error] == ["raised", "world"]
    found = {path.name: len(path.read_text()) for path in tmp_path.iterdir()}
    assert found == {"once": 1, "twice": 3, "own": 1, "always": 3}


def test_an_async_function_scores_rows_at_the_same_time() -> None:
    async def ask(completion: str) -> float:
        if completion == "hang":
            await asyncio.sleep(60)
        await asyncio.sleep(0.001)
        return float(len(completion))

    scored = score(scorer(concurrency=8, timeout_s=1.0)(ask), rows(["a", "hang", "ccc"] * 3))
    assert scored.column("ask").to_pylist() == [1.0, None, 3.0] * 3
    assert set(scored.column(ERROR).to_pylist()) == {None, "ask: hung: no answer within 1 s"}


def test_knobs_reach_the_function(isolate: bool) -> None:
    made = scorer(isolate=isolate)(reward).configured(bonus=3.0)
    assert score(made, rows(["right", "x"])).column("reward").to_pylist() == [4.0, 3.0]


def test_a_batch_without_rows_passes_through(isolate: bool) -> None:
    runtime = build(scorer(isolate=isolate)(f_float_of_completion))
    runtime.push(Batch("prompts", rows([])))
    (batch,) = runtime.work() or []
    assert batch.records.schema.names[-1] == "f_float_of_completion"
    runtime.close()


def f_float_of_completion(completion: str) -> float:
    return float(len(completion))


def test_a_missing_column_is_named() -> None:
    runtime = build(scorer(isolate=False)(f_float))
    with pytest.raises(RecordError, match="'f_float' reads column 'x', its rows have"):
        runtime.push(Batch("prompts", rows(["a"])))


# Order and bounds, with a fake in place of the pool


@dataclass
class FakeCaller:
    """Answers when the test says so."""

    ready: list[Answer] = field(default_factory=list)
    jobs: int = 0
    restarts: int = 0

    open_calls = 0

    def waits(self) -> Sequence[int]:
        return ()

    def submit(self, calls: int, encode: Encode) -> int:
        self.jobs += 1
        return self.jobs - 1

    def poll(self) -> list[Answer]:
        ready, self.ready = self.ready, []
        return ready

    def answer(self, job: int, values: Mapping[int, float]) -> None:
        self.ready.append(
            Answer(
                job, list(values), {}, pack(scorer(f_float_of_completion), list(values.values()))
            )
        )

    def close(self) -> None:
        """Nothing to give back."""


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def fake() -> tuple[Scoring, FakeCaller, Clock]:
    caller, clock = FakeCaller(), Clock()
    context = Context(node="reward", clock=clock, log=Log())
    return Scoring(scorer(f_float_of_completion), context, caller), caller, clock


def groups(batches: list[Batch] | None) -> list[int]:
    return [
        group for batch in batches or [] for group in batch.records.column(GROUP_ID).to_pylist()
    ]


def test_whole_groups_leave_without_waiting_for_a_slow_one() -> None:
    runtime, caller, clock = fake()
    events: list[str] = []
    records = rows(["x"] * 6)
    runtime.push(
        Batch("prompts", records, "generator", whole(records, lambda: events.append("ack")))
    )
    caller.answer(0, {0: 1.0, 4: 1.0, 5: 1.0})
    clock.now = 1.0
    assert groups(runtime.work()) == [2, 2]
    assert (runtime.pending(), events) == (4, [])
    caller.answer(0, {1: 1.0})
    clock.now = 2.0
    assert groups(runtime.work()) == [0, 0]
    assert runtime.work() is None
    caller.answer(0, {2: 1.0, 3: 1.0})
    (last,) = runtime.work() or []
    assert (groups([last]), last.source, last.origin) == ([1, 1], "prompts", "generator")
    assert (runtime.pending(), events) == (0, ["ack"])


@pytest.mark.parametrize("parts", [({2: 2.0, 0: 0.0, 1: 1.0},), ({1: 1.0}, {2: 2.0, 0: 0.0})])
def test_each_row_has_its_own_score_in_whatever_order_and_parts_they_come(
    parts: tuple[Mapping[int, float], ...],
) -> None:
    runtime, caller, _ = fake()
    runtime.push(Batch("prompts", rows(["x"] * 3, group=3)))
    for values in parts:
        caller.answer(0, values)
    (made,) = runtime.work() or []
    assert made.records.column("f_float_of_completion").to_pylist() == [0.0, 1.0, 2.0]


def test_a_later_batch_may_overtake_an_earlier_one() -> None:
    runtime, caller, _ = fake()
    runtime.push(Batch("a", rows(["x"] * 2)))
    runtime.push(Batch("b", rows(["x"] * 2)))
    caller.answer(1, {0: 1.0, 1: 1.0})
    assert [batch.source for batch in runtime.work() or []] == ["b"]
    caller.answer(0, {0: 1.0, 1: 1.0})
    assert [batch.source for batch in runtime.work() or []] == ["a"]


def test_rows_in_hand_are_bounded() -> None:
    runtime, caller, _ = fake()
    pushed = 0
    while runtime.room():
        runtime.push(Batch("prompts", rows(["x"] * 512)))
        pushed += 512
        assert pushed <= 4096, "it takes rows without end"
    assert runtime.pending() == pushed
    caller.answer(0, dict.fromkeys(range(512), 1.0))
    runtime.work()
    assert runtime.room() > 0


# Whatever functions do

BEHAVIOURS = [
    "fine",
    "fine",
    "none",
    "nan",
    "raise",
    "sys.exit",
    "exit",
    "kill",
    "text",
    "print",
    "memory",
    "hang",
]


def behave(completion: str) -> Any:
    match completion:
        case "hang":
            time.sleep(60)
        case "exit":
            os._exit(3)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "memory":
            return len(bytearray(16 << 30))
        case "print":
            print("printed")
    return judge(completion, "fine") if completion != "print" else True


async def behave_async(completion: str) -> Any:
    return behave(completion)


def few_hang(completions: list[str]) -> bool:
    return completions.count("hang") < 3


@settings(max_examples=12)
@given(
    completions=st.lists(st.sampled_from(BEHAVIOURS), min_size=1, max_size=9).filter(few_hang),
    limits=st.sampled_from([{}, {"processes": 2}, {"concurrency": 3}]),
    is_async=st.booleans(),
    failed=st.sets(st.integers(0, 8), max_size=2),
)
def test_every_row_comes_back_exactly_once_with_a_score_or_an_error(
    completions: list[str], limits: dict[str, Any], is_async: bool, failed: set[int]
) -> None:
    made = scorer(name="score", timeout_s=0.2, memory_mb=64, **limits)(
        behave_async if is_async else behave
    )
    errors = pa.array(
        ["before" if row in failed else None for row in range(len(completions))], pa.string()
    )
    scored = score(made, rows(completions, 3, **{ERROR: errors}))
    # a loop hangs as a whole
    is_blocked = is_async and "concurrency" in limits and "hang" in completions
    for row, word in enumerate(completions):
        value, error = scored.column("score")[row].as_py(), scored.column(ERROR)[row].as_py()
        if row in failed:
            assert (value, error) == (None, "before")
        elif word in ("fine", "print", "none") and not is_blocked:
            assert (value, error) == (None if word == "none" else 1.0, None)
        elif word == "none":
            assert value is None
        else:
            assert (value is None) != (error is None)
