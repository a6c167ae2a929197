"""Knobs of a run of fakes that are set while it goes on, and found again by who goes on with it."""

from collections.abc import Callable
from pathlib import Path

import pytest
from rigs.changed_runs import STEP, changed_run, resumed, rewards
from rigs.graphs import NO_BOUND

from dataflow import Model, RunError, scorer
from dataflow.folder.faults import FILE
from dataflow.folder.live_changes import KnobChange, read_changes
from dataflow.folder.request_log import read_requests
from dataflow.folder.run_folder import RunFolder
from dataflow.scheduler.requests import ask_for_checkpoint, ask_to_set
from dataflow.testing import FakeTrainer

pytestmark = [pytest.mark.usefixtures("forked", "one_core"), pytest.mark.timeout(120)]

MODEL = Model("fake-policy")
MORE = 2 * NO_BOUND


@scorer(isolate=False)
def reward(completion: str, scale: float = 1.0) -> float:
    """The scale."""
    return scale


def rates(folder: Path) -> dict[int, float]:
    return {
        line["step"]: line["lr"] for line in RunFolder.open(folder).read_metrics() if "lr" in line
    }


def test_knobs_that_are_set_count_from_a_step_on_that_the_ledger_names_and_for_who_resumes(
    light: None, tmp_path: Path
) -> None:
    told: list[str] = []

    def ask(folder: RunFolder, go_on: Callable[[], None]) -> None:
        for wrong in (
            {"trainer.lr": "much"},
            {"trainer.prompts_per_step": 2},
            {"generator.max_staleness": -1},
        ):
            with pytest.raises(RunError) as refused:
                ask_to_set(folder, wrong)
            told.append(str(refused.value))
        go_on()
        told.append(
            ask_to_set(
                folder, {"trainer.lr": 0.25, "generator.max_staleness": MORE}, by="anna@here"
            )
        )
        told.append(ask_to_set(folder, {"reward.scale": 3}))
        told.append(ask_for_checkpoint(folder))

    result = changed_run(ask, FakeTrainer(model=MODEL, prompts_per_step=8), tmp_path, 60, reward)
    assert "cannot take 'much'; give a number" in told[0] and "trainer.lr = 1.0" in told[1], told
    assert "cannot be -1" in told[2] and told[2].endswith("(the run goes on as it was)")
    assert told[3] == f"trainer.lr = 0.25, generator.max_staleness = {MORE} from now on"
    assert told[4] == "reward.scale = 3.0 from now on" and told[5].startswith(
        "'trainer' has the checkpoint of step"
    )
    assert result.verdict.clean and not (result.folder / FILE).exists()
    changes = {
        f"{each.node}.{each.knob}": each for each in read_changes(RunFolder.open(result.folder))
    }
    assert set(changes) == {"trainer.lr", "generator.max_staleness", "reward.scale"}
    lr: KnobChange = changes["trainer.lr"]
    assert (lr.was, lr.value, lr.by) == (1.0, 0.25, "anna@here") and lr.step > STEP
    assert all(
        rate == (0.25 if step >= lr.step else 1.0) for step, rate in rates(result.folder).items()
    )
    assert all(rewards(result, step) == {1.0} for step in range(1, changes["reward.scale"].step))
    assert rewards(result, 60) == {3.0}
    assert any(
        note.startswith("set: trainer.lr = 0.25 (was 1.0) from step")
        for note in result.verdict.notes
    )
    asked = [line["request"] for line in read_requests(result.folder) if not line["refused"]]
    assert f"trainer.lr = 0.25, generator.max_staleness = {MORE}" in asked
    again = resumed(result, FakeTrainer(model=MODEL, prompts_per_step=8), 64, reward)
    assert again.verdict.clean and rates(again.folder)[64] == 0.25 and rewards(again, 64) == {3.0}
