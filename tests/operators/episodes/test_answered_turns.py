"""Laws of turns at the generator: admitted as their rollout's group, drawn by their own seed, told
in ids.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from rigs.columns import check_columns
from rigs.operators import make_context

from dataflow import Model
from dataflow.records import TURN_ANSWER, TURN_REQUEST, schema
from dataflow.runtime import Batch
from dataflow.staleness import Bound
from operators import Generator
from operators.generation.runtime import GeneratorRuntime

pytestmark = pytest.mark.usefixtures("one_core")


EPISODE = "guess"


BOUND = Bound(max_staleness=0, prompts_per_step=2, steps=10)


@pytest.fixture
def generator(policy: Path) -> GeneratorRuntime:
    """Of which an episode asks turns for rollouts of `prompts`, which are trained, and of
    `held_out`, which are not.
    """
    declared = Generator(
        Model(str(policy)).frozen(), group_size=4, max_tokens=6, slots=8, segment_tokens=50
    )
    context = make_context(node="generator", episodes=(EPISODE,), bounds={"prompts": BOUND})
    return declared.build(context)  # type: ignore[return-value]


def asked(
    runtime: GeneratorRuntime,
    numbers: Iterable[int],
    groups: Iterable[int],
    *,
    source: str = "prompts",
    tokens: Any = (3, 4, 5),
    seed: int = 7,
    most: int = 4,
    least: int = 0,
    temperature: float | None = None,
) -> list[int]:
    """Ask for turns; which of them the runtime releases, in time."""
    rows = [
        {
            "group_id": number,
            "of_source": source,
            "of_group": group,
            "min_version": least,
            "seed": seed,
            "most_tokens": most,
            "sampling_temperature": temperature,
            "tokens": list(tokens),
        }
        for number, group in zip(numbers, groups, strict=True)
    ]
    released: list[int] = []
    batch = pa.RecordBatch.from_pylist(rows, schema=schema(TURN_REQUEST))
    runtime.push(Batch(EPISODE, batch, release=released.append))
    return released


def answered(runtime: GeneratorRuntime) -> dict[int, dict[str, Any]]:
    """By number, what it answers until there is nothing to do."""
    found: dict[int, dict[str, Any]] = {}
    while (made := runtime.work()) is not None:
        for batch in made:
            assert batch.source == EPISODE
            check_columns(batch.records, TURN_ANSWER)
            found |= {row["group_id"]: row for row in batch.records.to_pylist()}
    return found


def test_a_turn_starts_when_the_group_of_its_rollout_may(generator: GeneratorRuntime) -> None:
    """Under version 0 with a bound of 0 the first step's two groups may, and turns of
    evaluations.
    """
    released = asked(generator, [90, 91, 92], [0, 1, 2])
    asked(generator, [93], [2000], source="held_out")
    asked(generator, [94], [2001], source="held_out", least=1)
    found = answered(generator)
    assert set(found) == {90, 91, 93} and sorted(released) == [90, 91]
    assert generator.pending() == 2
    generator.tell({"dropped": 1})
    assert set(answered(generator)) == {92}
    assert released == [90, 91, 92]


def test_tokens_are_told_before_the_slice_in_which_they_are_drawn_ends(
    generator: GeneratorRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[dict[str, int]] = []
    step = generator.engine.step

    def stepped(starts: Any) -> Any:
        ended = step(starts)
        told.append(generator.under_way())
        return ended

    monkeypatch.setattr(generator.engine, "step", stepped)
    asked(generator, [90], [0])
    generator.work()
    drawn = [each["tokens"] for each in told]
    assert drawn == sorted(set(drawn)) and drawn[0] > 0 and told[0]["active"] == 1


def test_turns_are_taken_however_many_wait_that_may_not_start(generator: GeneratorRuntime) -> None:
    asked(generator, range(1000), range(5000, 6000))
    assert answered(generator) == {}
    assert generator.room() > 0
    asked(generator, [5000], [1])
    assert set(answered(generator)) == {5000}


def test_a_turn_is_answered_by_what_was_drawn_of_it_alone(generator: GeneratorRuntime) -> None:
    asked(generator, [1, 2], [0, 1], tokens=(3, 4, 5, 6), most=3)
    for row in answered(generator).values():
        assert 1 <= len(row["tokens"]) <= 3 and len(row["logprobs"]) == len(row["versions"]) == len(
            row["tokens"]
        )
        assert set(row["versions"]) == {0} and all(logprob < 0 for logprob in row["logprobs"])
        assert row["finish_reason"] in ("stop", "length") and row["error"] is None
        text = generator.tokenizer.decode(row["tokens"], skip_special_tokens=True)
        assert row["completion"] == text


def test_the_same_turn_is_drawn_the_same_whatever_else_is(
    generator: GeneratorRuntime, policy: Path
) -> None:
    asked(generator, [1], [0])
    alone = answered(generator)[1]
    asked(generator, [2, 3, 4], [1, 1, 0], seed=8)
    asked(generator, [1], [0])
    together = answered(generator)
    assert together[1]["tokens"] == alone["tokens"]
    assert np.allclose(together[1]["logprobs"], alone["logprobs"], atol=1e-5)


def test_a_turn_is_sampled_as_those_before_it_were_whatever_the_generator_does_now(
    generator: GeneratorRuntime,
) -> None:
    asked(generator, [1], [0], seed=1, temperature=0.0)
    asked(generator, [2], [0], seed=2, temperature=0.0)
    asked(generator, [3], [0], seed=3)
    found = answered(generator)
    assert found[1]["tokens"] == found[2]["tokens"], "the likeliest"
    assert [found[number]["sampling_temperature"] for number in (1, 2, 3)] == [0.0, 0.0, 1.0]


def test_a_conversation_that_fills_the_context_is_answered_with_nothing(
    generator: GeneratorRuntime,
) -> None:
    asked(generator, [1, 2], [0, 0], tokens=[3] * 63)
    asked(generator, [3], [0], tokens=[3] * 64)
    found = answered(generator)
    assert {
        number: (len(row["tokens"]), row["finish_reason"]) for number, row in found.items()
    } == {
        1: (1, found[1]["finish_reason"]),
        2: (1, found[2]["finish_reason"]),
        3: (0, "length"),
    }
    assert found[3]["error"] is None and found[3]["completion"] == ""


def test_a_turn_with_a_token_beyond_the_embeddings_fails_alone(generator: GeneratorRuntime) -> None:
    asked(generator, [1], [0], tokens=[3, generator.engine.vocabulary])
    asked(generator, [2], [0], tokens=[3, 4])
    found = answered(generator)
    assert "but the model knows" in found[1]["error"] and found[2]["error"] is None


def test_turns_bring_the_sampling_mask_where_the_generator_records_it(policy: Path) -> None:
    declared = Generator(
        Model(str(policy)).frozen(),
        max_tokens=6,
        slots=8,
        top_k=3,
        sampling_mask=True,
        segment_tokens=50,
    )
    runtime = declared.build(make_context(node="generator", episodes=(EPISODE,)))
    assert isinstance(runtime, GeneratorRuntime)
    asked(runtime, [1], [0])
    row = answered(runtime)[1]
    assert len(row["sampling_mask"]) == len(row["tokens"])
    assert all(
        token in left and len(left) == 3
        for token, left in zip(row["tokens"], row["sampling_mask"], strict=True)
    )
