"""Another reward in a run of fakes, which go on: asked for while it runs, and found again by who
goes on with it.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rigs.changed_runs import STEP, changed_run, resumed, rewards

from dataflow import RunError, scorer
from dataflow.folder.faults import FILE
from dataflow.folder.live_changes import read_changes, read_swaps
from dataflow.folder.run_folder import RunFolder
from dataflow.live.command import settable_now
from dataflow.scheduler.requests import ask_to_set, ask_to_swap
from dataflow.testing import FakeTrainer

pytestmark = [pytest.mark.usefixtures("forked", "one_core"), pytest.mark.timeout(120)]


NEW = 100.0


BETTER = "rewards_to_swap:better"


@scorer(isolate=False)
def reward(completion: str, scale: float = 1.0) -> float:
    """The scale."""
    return scale


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """With an operator in it, where this process and those it forks find it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "rewards_to_swap.py"
    path.write_text(
        "from dataflow import scorer\n\n@scorer(isolate=False)\ndef better(completion: str, bonus:"
        f" float = 0.0) -> float:\n    return {NEW} + bonus\n"
    )
    yield path
    sys.modules.pop("rewards_to_swap", None)


def test_a_swap_is_taken_in_by_a_live_run_and_by_who_resumes_it(
    light: None, module: Path, tmp_path: Path
) -> None:
    told: list[str] = []

    def ask(folder: RunFolder, go_on: Callable[[], None]) -> None:
        for node, reference in (("generator", BETTER), ("reward", "rewards_to_swap:worse")):
            with pytest.raises(RunError) as refused:
                ask_to_swap(folder, node, reference)
            told.append(str(refused.value))
        told.append(ask_to_swap(folder, "reward", BETTER))

    result = changed_run(ask, FakeTrainer(prompts_per_step=8), tmp_path, 40)
    assert (
        "'generator' generates" in told[0]
        and "has no 'worse'" in told[1]
        and told[1].endswith("as it was)")
    )
    assert told[2].startswith(f"'reward' is '{BETTER}' from now on"), told
    assert result.verdict.clean and not (result.folder / FILE).exists()
    assert [max(rewards(result, step)) >= NEW for step in (1, 2, STEP)] == [False] * 3 and rewards(
        result, 40
    ) == {NEW}
    (swap,) = read_swaps(RunFolder.open(result.folder))
    assert 0 < swap.step <= STEP and swap.source == module.read_text(), (
        "as far as the scheduler had heard"
    )
    assert any(
        note.startswith(f"swapped: reward = {BETTER} (sha256") for note in result.verdict.notes
    )
    module.unlink()
    again = resumed(result, FakeTrainer(prompts_per_step=8), 44)
    assert again.verdict.clean and rewards(again, 44) == {NEW}


@pytest.mark.slow
def test_knobs_of_the_operator_in_place_are_set_and_those_of_the_one_before_are_gone(
    light: None, module: Path, tmp_path: Path
) -> None:
    told: list[str] = []

    def ask(folder: RunFolder, go_on: Callable[[], None]) -> None:
        told.append(ask_to_set(folder, {"reward.scale": 3}))
        told.append(ask_to_swap(folder, "reward", BETTER))
        for wrong in ({"reward.scale": 4}, {"reward.bonus": "much"}):
            with pytest.raises(RunError) as refused:
                ask_to_set(folder, wrong)
            told.append(str(refused.value))
        told.append(ask_to_set(folder, {"reward.bonus": 50}))

    result = changed_run(ask, FakeTrainer(prompts_per_step=8), tmp_path, 40, reward)
    assert told[0] == "reward.scale = 3.0 from now on" and told[1].startswith(
        f"'reward' is '{BETTER}' from now on"
    )
    assert (
        "these may: reward.bonus = 0.0" in told[2]
        and "cannot take 'much'; give a number" in told[3]
    )
    assert told[4] == "reward.bonus = 50.0 from now on"
    assert result.verdict.clean and not (result.folder / FILE).exists()
    assert rewards(result, 1) == {1.0} and rewards(result, 40) == {NEW + 50}
    folder = RunFolder.open(result.folder)
    changes = {each.knob: each for each in read_changes(folder)}
    assert (changes["scale"].swap, changes["bonus"].swap, changes["bonus"].was) == (0, 1, 0.0)
    assert all(each.step > 0 for each in changes.values())
    assert [(knob["name"], knob["value"]) for knob in settable_now(folder)["reward"]] == [
        ("bonus", "50.0")
    ]
    again = resumed(result, FakeTrainer(prompts_per_step=8), 44, reward)
    assert again.verdict.clean and rewards(again, 44) == {NEW + 50}
