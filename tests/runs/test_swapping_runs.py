"""Another reward in a run of fakes, which go on: asked for while it runs, and found again by who goes on with it."""

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rigs.graphs import fake_graph
from rigs.machine import wait_until
from rigs.operators import Around, wrapped

from dataflow import Result, RunError, inline, run
from dataflow.folder.faults import FILE
from dataflow.folder.run_folder import RunFolder
from dataflow.folder.swaps import read_swaps
from dataflow.limits import Limits
from dataflow.runtime import Batch
from dataflow.scheduler.requests import ask_to_swap
from dataflow.testing import FakePrompts, FakeTrainer

pytestmark = [pytest.mark.usefixtures("forked", "one_core"), pytest.mark.timeout(120)]

NEW = 100.0
STEP = 3
"""At which the trainer waits for whoever asks."""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """With an operator in it, where this process and those it forks find it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "rewards_to_swap.py"
    path.write_text(
        "from dataflow import scorer\n\n"
        f"@scorer(isolate=False)\ndef better(completion: str) -> float:\n    return {NEW}\n"
    )
    yield path
    sys.modules.pop("rewards_to_swap", None)


class _Waiting(Around):
    """Makes no step after the third until something has come about."""

    until: Callable[[], bool] = staticmethod(lambda: True)

    def work(self) -> list[Batch] | None:
        return None if self._waits() else super().work()

    def pending(self) -> int:
        return super().pending() + self._waits()

    def _waits(self) -> bool:
        return int(self.status()["step"]) == STEP and not self.until()


def rewards(result: Result, step: int) -> set[bool]:
    """Whether they are the new operator's, of each row."""
    return {
        reward >= NEW for reward in RunFolder.open(result.folder).rollouts_of().read(step).column("reward").to_pylist()
    }


def test_a_swap_is_taken_in_by_a_live_run_and_by_who_resumes_it(light: None, module: Path, tmp_path: Path) -> None:
    asked, told = tmp_path / "asked", list[Any]()

    def waiting(inner: Any) -> Any:
        made = _Waiting(inner)
        made.until = asked.exists  # type: ignore[method-assign]
        return made

    def ask() -> None:
        try:
            wait_until(lambda: any(tmp_path.glob("runs/latest/rollouts/step-*3.arrow")), 30.0, "step 3")
            folder = RunFolder.open(tmp_path / "runs" / "latest")
            for node, reference in (("generator", "rewards_to_swap:better"), ("reward", "rewards_to_swap:worse")):
                with pytest.raises(RunError) as refused:
                    ask_to_swap(folder, node, reference)
                told.append(str(refused.value))
            told.append(ask_to_swap(folder, "reward", "rewards_to_swap:better"))
        finally:
            asked.touch()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    trainer = wrapped(FakeTrainer(prompts_per_step=8), waiting)
    result = run(
        fake_graph(trainer=trainer, source=FakePrompts(size=400)), runs=tmp_path / "runs", quiet=True, steps=40,
        limits=Limits(stop_s=2.0),
    )  # fmt: skip
    thread.join(60)
    assert "'generator' generates" in told[0] and "has no 'worse'" in told[1] and told[1].endswith("as it was)")
    assert told[2].startswith("'reward' is 'rewards_to_swap:better' from now on"), told
    assert result.verdict.clean and not (result.folder / FILE).exists()
    assert [rewards(result, step) for step in (1, 2, STEP, 40)] == [{False}, {False}, {False}, {True}]
    (swap,) = read_swaps(RunFolder.open(result.folder))
    assert 0 < swap.step <= STEP and swap.source == module.read_text(), "as far as the scheduler had heard"
    assert any(note.startswith("swapped: reward = rewards_to_swap:better (sha256") for note in result.verdict.notes)
    module.unlink()
    graph = fake_graph(trainer=FakeTrainer(prompts_per_step=8), source=FakePrompts(size=400))
    again = run(graph, on=inline(), resume=result.folder, quiet=True, steps=44)
    assert again.verdict.clean and rewards(again, 44) == {True}
