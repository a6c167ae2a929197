"""Knobs of a run of fakes that are set while it goes on, and found again by who goes on with it."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rigs.graphs import NO_BOUND, fake_graph
from rigs.machine import wait_until
from rigs.operators import Around, wrapped

from dataflow import Model, RunError, inline, run, scorer
from dataflow.folder.faults import FILE
from dataflow.folder.knob_changes import KnobChange, read_changes
from dataflow.folder.request_log import read_requests
from dataflow.folder.run_folder import RunFolder
from dataflow.limits import Limits
from dataflow.runtime import Batch
from dataflow.scheduler.requests import ask_for_checkpoint, ask_to_set
from dataflow.testing import FakePrompts, FakeTrainer

pytestmark = [pytest.mark.usefixtures("forked", "one_core"), pytest.mark.timeout(120)]

MODEL = Model("fake-policy")
MORE = 2 * NO_BOUND
STEP = 3
"""After which the trainer waits for whoever asks."""


@scorer(isolate=False)
def reward(completion: str, scale: float = 1.0) -> float:
    """The scale."""
    return scale


class _Waiting(Around):
    """Makes no step after the third until something has come about; hears what is said meanwhile."""

    until: Callable[[], bool] = staticmethod(lambda: True)

    def work(self) -> list[Batch] | None:
        if int(self.status()["step"]) == STEP and not self.until():
            return None
        return super().work()

    def pending(self) -> int:
        return super().pending() + (int(self.status()["step"]) == STEP and not self.until())


def rates(folder: Path) -> dict[int, float]:
    return {line["step"]: line["lr"] for line in RunFolder.open(folder).read_metrics() if "lr" in line}


def scales(folder: Path, step: int) -> set[float]:
    return set(RunFolder.open(folder).rollouts_of().read(step).column("reward").to_pylist())


def test_knobs_that_are_set_count_from_a_step_on_that_the_ledger_names_and_for_who_resumes(
    light: None, tmp_path: Path
) -> None:
    go_on, told = tmp_path / "go-on", list[Any]()

    def waiting(inner: Any) -> Any:
        made = _Waiting(inner)
        made.until = go_on.exists  # type: ignore[method-assign]
        return made

    def ask() -> None:
        try:
            wait_until(lambda: any(tmp_path.glob("runs/latest/rollouts/step-*3.arrow")), 30.0, "step 3")
            folder = RunFolder.open(tmp_path / "runs" / "latest")
            for wrong in ({"trainer.lr": "much"}, {"trainer.prompts_per_step": 2}, {"generator.max_staleness": -1}):
                with pytest.raises(RunError) as refused:
                    ask_to_set(folder, wrong)
                told.append(str(refused.value))
            go_on.touch()
            told.append(ask_to_set(folder, {"trainer.lr": 0.25, "generator.max_staleness": MORE}, by="anna@here"))
            told.append(ask_to_set(folder, {"reward.scale": 3}))
            told.append(ask_for_checkpoint(folder))
        finally:
            go_on.touch()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    trainer = wrapped(FakeTrainer(model=MODEL, prompts_per_step=8), waiting)
    graph = fake_graph(trainer=trainer, source=FakePrompts(size=None), scorers=(reward,))
    result = run(graph, runs=tmp_path / "runs", quiet=True, steps=60, limits=Limits(stop_s=2.0))
    thread.join(60)
    assert "cannot take 'much'; give a number" in told[0] and "trainer.lr = 1.0" in told[1], told
    assert "cannot be -1" in told[2] and told[2].endswith("(the run goes on as it was)")
    assert told[3] == f"trainer.lr = 0.25, generator.max_staleness = {MORE} from now on"
    assert told[4] == "reward.scale = 3.0 from now on" and told[5].startswith("'trainer' has the checkpoint of step")
    assert result.verdict.clean and not (result.folder / FILE).exists()
    changes = {f"{each.node}.{each.knob}": each for each in read_changes(RunFolder.open(result.folder))}
    assert set(changes) == {"trainer.lr", "generator.max_staleness", "reward.scale"}
    lr: KnobChange = changes["trainer.lr"]
    assert (lr.was, lr.value, lr.by) == (1.0, 0.25, "anna@here") and lr.step > STEP
    assert all(rate == (0.25 if step >= lr.step else 1.0) for step, rate in rates(result.folder).items())
    assert all(scales(result.folder, step) == {1.0} for step in range(1, changes["reward.scale"].step))
    assert scales(result.folder, 60) == {3.0}
    assert any(note.startswith("set: trainer.lr = 0.25 (was 1.0) from step") for note in result.verdict.notes)
    asked = [line["request"] for line in read_requests(result.folder) if not line["refused"]]
    assert f"trainer.lr = 0.25, generator.max_staleness = {MORE}" in asked
    again = fake_graph(
        trainer=FakeTrainer(model=MODEL, prompts_per_step=8), source=FakePrompts(size=None), scorers=(reward,)
    )
    resumed = run(again, on=inline(), resume=result.folder, quiet=True, steps=64)
    assert resumed.verdict.clean and rates(resumed.folder)[64] == 0.25 and scales(resumed.folder, 64) == {3.0}
