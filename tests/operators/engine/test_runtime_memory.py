"""The generator under little memory, with recomputing and with masks: the same rollouts, and
nothing lost.
"""

import numpy as np
import pytest
from rigs.columns import check_columns
from rigs.operators import make_context
from test_runtime import FakePlane, letters, prompts, rows_of, run_dry

from dataflow.model import Model
from dataflow.records import PROMPT_COLUMNS, SAMPLING_MASK
from operators.generator import Generator
from operators.models.folders import ModelError


@pytest.fixture
def build(folder):
    def make(*, context=None, **knobs):
        knobs = {"group_size": 4, "max_tokens": 30, "slots": 16, "segment_tokens": 8, **knobs}
        return Generator(Model(str(folder)), **knobs).build(
            make_context(node="generator", **(context or {}))
        )

    return make


def token_bytes(runtime):
    return runtime.engine.token_bytes


def test_little_memory_makes_rollouts_wait_and_changes_none(build):
    roomy = build()
    roomy.push(prompts(letters(20)))
    expected = {row["rollout_id"]: row for row in rows_of(run_dry(roomy))}
    context = {"context_tokens": 48, "cache_bytes": 5 * 16 * token_bytes(roomy)}
    tight = build(**context)
    tight.push(prompts(letters(20)))
    parked, made = [], []
    while (batches := tight.work()) is not None:
        made += batches
        parked.append(tight.status()["parked"])
    found = {row["rollout_id"]: row for row in rows_of(made)}
    assert max(parked) > 0
    assert {key: row["tokens"] for key, row in found.items()} == {
        key: row["tokens"] for key, row in expected.items()
    }
    for key, row in found.items():
        np.testing.assert_allclose(row["logprobs"], expected[key]["logprobs"], atol=2e-5)


def test_memory_for_less_than_one_rollout_is_refused(build):
    with pytest.raises(
        ModelError, match=r"cannot hold one rollout: 128 tokens take .* budget is 1000 bytes"
    ):
        build(cache_bytes=1000)


@pytest.mark.parametrize("policy", ["keep", "recompute"])
def test_lengths_that_are_trained_are_those_that_were_started_whatever_the_updates(
    policy, build, make_model
):
    """Weights that change every other step, and rollouts that are parked by them, favour no
    length.
    """
    models = {version: make_model() for version in range(40)}
    plane = FakePlane(models, at_poll={2 * version: version for version in range(40)})
    calm, busy = (
        build(max_tokens=40),
        build(context={"reader": plane}, max_tokens=40, on_update=policy),
    )
    lengths = []
    for runtime in (calm, busy):
        runtime.push(prompts(letters(25)))
        lengths.append({row["rollout_id"]: len(row["tokens"]) for row in rows_of(run_dry(runtime))})
    assert plane.version > 10
    assert lengths[0] == lengths[1] and len(set(lengths[0].values())) > 5


def test_the_mask_column_is_null_in_the_prompt_and_holds_the_token_drawn(build):
    runtime = build(sampling_mask=True, top_k=3, max_tokens=9)
    runtime.push(prompts([*letters(6), ""]))
    batches = run_dry(runtime)
    columns = runtime._declaration.provides(PROMPT_COLUMNS)
    for batch in batches:
        check_columns(batch.records, columns)
    for row in rows_of(batches):
        for token, drawn, left in zip(row["tokens"], row["mask"], row[SAMPLING_MASK], strict=True):
            assert (token in left and len(left) == 3) if drawn else left is None


def test_without_truncation_the_mask_column_is_null(build):
    runtime = build(sampling_mask=True, max_tokens=3)
    runtime.push(prompts(["ab"]))
    assert all(left is None for row in rows_of(run_dry(runtime)) for left in row[SAMPLING_MASK])


@pytest.mark.parametrize("weights", ["bfloat16", "int8", "int8_dynamic", "fp8"])
def test_narrow_weights_follow_the_trainer(weights, build, make_model):
    def tokens(models, at_poll):
        plane = FakePlane(models, at_poll)
        runtime = build(context={"reader": plane}, weights=weights, max_tokens=8)
        while plane.version != 2:
            runtime.work()
        runtime.push(prompts(letters(6)))
        return {
            row["rollout_id"]: (row["tokens"], row["logprobs"]) for row in rows_of(run_dry(runtime))
        }

    models = {version: make_model(seed=version) for version in range(3)}
    assert (
        tokens(models, {0: 0, 2: 1, 4: 2})
        == tokens(models, {0: 2})
        != tokens({2: models[1]}, {0: 2})
    )
