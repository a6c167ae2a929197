"""Run folders with one random damage each: every command ends in a sentence, and nothing damaged is
gone on with.
"""

import contextlib
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rigs.graphs import losses, tiny_graph
from rigs.machine import wait_until
from rigs.operators import Around, wrapped

from dataflow import Devices, Result, Run, inline, run, verify
from dataflow.cli import check, doctor, show
from dataflow.errors import DataflowError, OperatorError
from dataflow.folder.run_folder import RunFolder
from dataflow.history.launch import Wishes
from dataflow.history.replay import report_replay
from dataflow.history.rollout_view import find_rollout
from dataflow.live.command import PageAnswers
from dataflow.runs.commands import compare_runs, export_run, list_runs, report_run
from dataflow.runtime import Batch

pytestmark = [pytest.mark.usefixtures("one_core"), pytest.mark.timeout(3000)]

STEPS, QUICK, MANY = 5, 3, 300
WRITTEN_S = 30.0
PAGE_BYTES = 4096
ADDRESSES = (
    "",
    "api/runs",
    "api/graph",
    "api/now",
    "api/names",
    "api/series?key=trainer/loss",
    "api/marks",
    "trace",
    "api/rollouts?sort=reward",
    "api/rollout?step=1&row=0",
    "api/group?step=1&row=0",
    "trace?part=minute",
)


def graph(policy: Path) -> Any:
    return tiny_graph(policy, max_staleness=0, eval_every=4, checkpoint_every=2, max_tokens=12)


@dataclass(frozen=True)
class Killed:
    """A run as a kill has left it."""

    folder: Path
    policy: Path
    whole: Result
    """The same that nobody killed."""


@pytest.fixture(scope="module")
def killed(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Killed]:
    """After step 3, a checkpoint and a round of evaluation, with finished groups, while no
    checkpoint is written.
    """
    runs = tmp_path_factory.mktemp("killed")

    class Dying(Around):
        def work(self) -> list[Batch] | None:
            made = super().work()
            if (runs / "latest/rollouts/step-000003.arrow").exists():
                checkpoints = runs / "latest/checkpoints"  # of step 2, which a thread writes
                wait_until(
                    lambda: [path.name for path in checkpoints.iterdir()] == ["step-000002"],
                    WRITTEN_S,
                )
                shutil.copytree((runs / "latest").resolve(), runs / "left")
                raise ValueError("dies")
            return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["dataflow.runner"], "this_machine", lambda: Devices(cpus=1))
        dying = graph(policy)
        trainer = dying.operators["trainer"]
        object.__setattr__(trainer, "build", wrapped(trainer, Dying).build)
        with pytest.raises(OperatorError, match="dies"):
            run(dying, steps=STEPS, on=inline(), runs=runs, quiet=True)
        whole = run(
            graph(policy),
            steps=STEPS,
            on=inline(),
            runs=tmp_path_factory.mktemp("whole"),
            quiet=True,
        )
        yield Killed(runs / "left", policy, whole)


def flipped(path: Path, dice: random.Random) -> str:
    content = bytearray(path.read_bytes())
    at = dice.randrange(len(content))
    content[at] ^= 1 << dice.randrange(8)
    path.write_bytes(content)
    return f"a flipped bit in byte {at}"


def truncated(path: Path, dice: random.Random) -> str:
    left = dice.randrange(path.stat().st_size)
    path.write_bytes(path.read_bytes()[:left])
    return f"cut after {left} bytes"


def zeroed(path: Path, dice: random.Random) -> str:
    content = path.read_bytes()
    at = dice.randrange(len(content)) // PAGE_BYTES * PAGE_BYTES
    end = min(at + PAGE_BYTES, len(content))
    path.write_bytes(content[:at] + bytes(end - at) + content[end:])
    return f"zeros from byte {at} on"


def removed(path: Path, dice: random.Random) -> str:
    path.unlink()
    return "removed"


def damage(folder: Path, number: int) -> str:
    """One, of some file that has something in it; what it is."""
    dice = random.Random(number)
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    path = dice.choice(files)
    how = dice.choice([flipped, flipped, flipped, truncated, zeroed, removed])
    return f"{number}: {path.relative_to(folder)}: {how(path, dice)}"


@pytest.fixture
def damaged(killed: Killed, tmp_path: Path) -> Iterator[Callable[[int], tuple[Path, str]]]:
    def made(number: int) -> tuple[Path, str]:
        folder = tmp_path / str(number) / "left"
        shutil.copytree(killed.folder, folder)
        return folder, damage(folder, number)

    yield made


def told(call: Callable[[], object]) -> None:
    """What it says, in a sentence at worst."""
    with contextlib.suppress(DataflowError):
        call()


def look_at(folder: Path, killed: Killed) -> None:
    """By every command that looks at a run."""
    aside = folder.parent
    told(lambda: check(folder, deep=True))
    told(lambda: show(folder))
    told(lambda: list_runs(aside))
    told(lambda: compare_runs(folder, killed.whole.folder))
    told(lambda: export_run(folder, to="hf", out=aside / "data"))
    told(lambda: export_run(folder, to="parquet", pairs=True, out=aside / "pairs"))
    told(lambda: report_run(folder, out=aside / "report.html"))
    told(lambda: doctor(folder))
    told(lambda: find_rollout(RunFolder.open(folder), 3, source="prompts"))
    told(lambda: report_replay(graph(killed.policy), Wishes(run=str(folder))))
    seen = Run(folder)
    for name in ("rollouts", "untrained", "steps", "evaluations", "edges", "faults"):
        told(getattr(seen, name))
    page = PageAnswers([RunFolder.open(folder)], lambda *given: {})
    for address in ADDRESSES:
        with contextlib.suppress(LookupError, ValueError):
            told(lambda address=address: page(address))


def goes_on_right(folder: Path, killed: Killed, was_clean: bool = True) -> str:
    """Why it did not go on; empty: it did, to the same end as if nothing had happened to it."""
    try:
        done = run(graph(killed.policy), steps=STEPS, on=inline(), resume=folder, quiet=True)
    except DataflowError as error:
        return str(error)
    assert sorted(losses(done.folder)) == sorted(losses(killed.whole.folder))
    assert done.evaluations == killed.whole.evaluations
    assert done.verdict.clean or not was_clean, done.verdict
    return ""


def judge(
    numbers: range, killed: Killed, damaged: Callable[[int], tuple[Path, str]], every: int = 1
) -> None:
    wrong, clean = [], 0
    for number in numbers:
        folder, what = damaged(number)
        try:
            verdict = verify(folder, deep=True)
            assert verdict.clean == verify(folder).clean
            clean += verdict.clean
            look_at(folder, killed)
            refused = goes_on_right(folder, killed, verdict.clean) if number % every == 0 else ""
            assert not (verdict.clean and refused), f"clean, and refused: {refused}"
        except Exception as error:
            wrong.append(f"{what}: {type(error).__name__}: {str(error)[:600]}")
        shutil.rmtree(folder.parent)
    assert not wrong, f"{len(wrong)} of {len(numbers)}, {clean} clean:\n" + "\n".join(wrong)


@pytest.mark.slow
def test_a_folder_as_a_kill_left_it_is_clean_and_goes_on(killed: Killed, tmp_path: Path) -> None:
    folder = tmp_path / "left"
    shutil.copytree(killed.folder, folder)
    assert (folder / "ledger.db-wal").exists() and list((folder / "finished").rglob("*.arrows"))
    assert verify(folder, deep=True).clean
    assert goes_on_right(folder, killed) == ""


def test_one_damage_of_a_folder_ends_no_command_without_a_sentence(
    killed: Killed, damaged: Callable[[int], tuple[Path, str]]
) -> None:
    judge(range(QUICK), killed, damaged, every=3)


@pytest.mark.slow
def test_no_damage_of_a_folder_is_gone_on_with(
    killed: Killed, damaged: Callable[[int], tuple[Path, str]]
) -> None:
    judge(range(MANY), killed, damaged)
