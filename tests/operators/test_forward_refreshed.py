"""A forward operator that is refreshed with every n-th version: which one a group waits for, and
what its rows say.
"""

import numpy as np
import pytest
from rigs.forwards import (
    Forwarding,
    Versions,
    forwarding,
    language_model,
    plain_logprobs,
    rollouts,
    saved,
)

from dataflow import Model
from dataflow.staleness import Bound
from operators import Logprobs
from operators.forward_pass.build import Known, is_due, is_first, needed

LANE = Bound(max_staleness=0, prompts_per_step=4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(str(saved(language_model(seed=1), tmp_path_factory.mktemp("reference")))).frozen()


def refreshed(model: Model, plane: Versions, every: int = 2) -> Forwarding:
    return forwarding(Logprobs(model), plane=plane, every=every)


def versions(rig: Forwarding) -> list[int | None]:
    return [row["ref_logprobs_version"] for batch in rig.out for row in batch.to_pylist()]


def test_the_version_needed_is_the_last_one_that_is_sent() -> None:
    own = Bound(max_staleness=0, prompts_per_step=4, every=3)
    assert [needed(v, LANE, own) for v in (-1, 0, 1, 2, 3, 5, 6, 8)] == [0, 0, 0, 0, 3, 3, 6, 6]
    twice = Bound(max_staleness=0, prompts_per_step=2, every=3)
    assert [needed(v, LANE, twice) for v in (0, 1, 2, 3)] == [0, 0, 3, 6]
    ending = Bound(max_staleness=0, prompts_per_step=4, every=3, steps=5)
    assert [needed(v, LANE, ending) for v in (4, 6, 9)] == [3, 3, 3]


def test_a_trainer_that_skipped_steps_holds_nobody_up_between_two_versions() -> None:
    """It has made 4, so 3 is the newest that is sent: a group that version 6 belongs to is computed
    under it.
    """
    own = Bound(max_staleness=0, prompts_per_step=4, every=3)
    assert is_due(25, 6, Known(version=3, told=4, dropped=8), LANE, own)
    assert not is_due(25, 6, Known(version=0, told=4, dropped=8), LANE, own)


def test_the_own_model_is_version_0_until_the_trainer_says_that_there_is_another() -> None:
    own = Bound(max_staleness=0, prompts_per_step=4, every=3)
    assert [
        is_first(note, own) for note in ({}, {"version": 0}, {"version": 2}, {"version": 3})
    ] == [
        False,
        True,
        True,
        False,
    ]
    assert not is_first({"version": 0}, LANE)


def test_nothing_is_computed_before_the_trainer_has_spoken(model: Model) -> None:
    """A reference that was started again would else go back to its own model."""
    plane = Versions()
    rig = refreshed(model, plane)
    rig.push(rollouts(0))
    assert not rig.step() and "version" in rig.runtime.status()
    plane.note = {"version": 5}
    assert not rig.step()
    plane.offer(4)
    plane.note = {"version": 5}
    assert rig.step() and versions(rig) == [4, 4, 4]


def test_rows_say_which_version_they_were_read_with(model: Model) -> None:
    plane = Versions()
    rig = refreshed(model, plane)
    plane.note = {"version": 0}
    rig.run(
        rollouts(0, ("b2",), version=0), rollouts(2, ("b3", "c"), version=1, errors={1: "boom"})
    )
    rig.push(rollouts(4, ("b4",), version=2))
    assert not rig.step(), "that version is not there yet"
    plane.offer(2, dict(language_model(seed=4).named_parameters()))
    rig.run()
    assert versions(rig) == [0, 0, None, 2]
    for row, seed in zip([batch.to_pylist()[0] for batch in rig.out], (1, 4), strict=True):
        np.testing.assert_allclose(
            row["ref_logprobs"], plain_logprobs(language_model(seed=seed), row), atol=1e-5
        )
