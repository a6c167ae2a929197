"""A run whose knobs are set, or whose reward is swapped, again and again while its workers are
killed: what it was at each step is on record, the ledger is whole, and a replay repeats every
loss.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rigs.machine import wait_until

from dataflow import verify
from dataflow.errors import DataflowError
from dataflow.folder.ledger import Ledger, LedgerError
from dataflow.folder.live_changes import read_changes, read_swaps
from dataflow.folder.run_folder import RunFolder
from dataflow.scheduler.requests import ask_for_facts, ask_to_set, ask_to_stop, ask_to_swap

pytestmark = [pytest.mark.usefixtures("forked", "one_core"), pytest.mark.timeout(1500)]


ROOT = Path(__file__).parents[3]


SEED = 7


KNOBS: dict[str, Callable[[random.Random], float | int]] = {
    "trainer.lr": lambda draw: draw.choice((1e-3, 3e-3, 1e-4)),
    "trainer.rho": lambda draw: draw.choice((2.0, 3.0, 6.0)),
    "trainer.max_grad_norm": lambda draw: draw.choice((0.5, 1.0, 2.0)),
    "generator.temperature": lambda draw: draw.choice((0.7, 1.0, 1.3)),
    "generator.top_p": lambda draw: draw.choice((0.8, 1.0)),
    "generator.max_tokens": lambda draw: draw.choice((6, 12, 24)),
    "generator.max_staleness": lambda draw: draw.choice((0, 1, 2, 4)),
}


class Storm:
    """A run of the real operators around a tiny policy, and whoever changes it and kills its
    workers.
    """

    def __init__(self, process: "subprocess.Popen[bytes]", runs: Path, output: Path) -> None:
        self.process, self.runs, self.output = process, runs, output
        self.draw = random.Random(SEED)
        self.killed: list[str] = []
        wait_until(lambda: self.steps() >= 2, 120.0, "step 2")

    @property
    def folder(self) -> RunFolder:
        return RunFolder.open((self.runs / "latest").resolve())

    def steps(self) -> int:
        assert self.process.poll() is None, self.output.read_text()
        if not (self.runs / "latest" / "ledger.db").exists():
            return 0
        with (
            contextlib.suppress(LedgerError),
            Ledger.open(self.folder.ledger, readonly=True) as ledger,
        ):
            return ledger.last_step("trainer")
        return 0

    def steps_more(self, count: int) -> None:
        wanted = self.steps() + count
        wait_until(lambda: self.steps() >= wanted, 120.0, f"step {wanted}")

    def kill_somebody(self) -> None:
        workers = ask_for_facts(self.folder)["workers"]
        name = self.draw.choice(sorted(workers))
        if pid := workers[name].get("pid"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            self.killed.append(name)

    def change(self, count: int, kills: int, ask: Callable[[int], None]) -> int:
        """So many changes at random moments, so many of them beside a kill; how many were taken
        in.
        """
        beside = set(self.draw.sample(range(count), kills))
        taken = 0
        for number in range(count):
            self.steps_more(self.draw.randint(1, 2))
            if number in beside:
                self.kill_somebody()
            try:
                ask(number)
                taken += 1
            except DataflowError as error:
                assert "ask again" in str(error) or "is starting" in str(error), error
        self.steps_more(8)
        ask_to_stop(self.folder)
        self.process.wait(120)
        return taken


@pytest.fixture
def storm(tmp_path: Path, policy: Path, machine: None) -> Iterator[Callable[[], Storm]]:
    started: list[subprocess.Popen[bytes]] = []

    def start() -> Storm:
        command = [
            sys.executable,
            str(ROOT / "tests" / "rigs" / "resumable.py"),
            "--policy",
            str(policy),
            "--runs",
            str(tmp_path / "runs"),
            "--quiet",
            "--eval-every",
            "1000000",
            "--max-staleness",
            "2",
            "--checkpoint-every",
            "20",
            "--sampling-mask",
        ]
        environment = os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
        output = tmp_path / "output"
        with output.open("ab") as file:
            started.append(
                subprocess.Popen(
                    command, stdout=file, stderr=file, cwd=ROOT, env=environment, process_group=0
                )
            )
        return Storm(started[-1], tmp_path / "runs", output)

    yield start
    for each in started:
        if each.poll() is None:
            os.killpg(each.pid, signal.SIGKILL)
            each.wait(10)


def is_repeated(folder: RunFolder) -> None:
    """Every loss, bit for bit."""
    done = subprocess.run(
        [sys.executable, "-m", "dataflow", "replay", str(folder.path), "--trust"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        timeout=400,
    )
    assert done.returncode == 0 and "losses are the recorded ones, bit for bit" in done.stdout, (
        done.stdout[-2000:]
    )


@pytest.mark.slow
@pytest.mark.parametrize(("count", "kills"), [(4, 1), (50, 12)], ids=["few", "fifty"])
def test_knobs_that_are_set_at_random_moments_are_on_record_by_step_and_a_replay_goes_by_them(
    storm: Callable[[], Storm], count: int, kills: int
) -> None:
    run = storm()

    def ask(number: int) -> None:
        knob = run.draw.choice(sorted(KNOBS))
        ask_to_set(run.folder, {knob: KNOBS[knob](run.draw)})

    taken = run.change(count, kills, ask)
    folder = run.folder
    verdict = verify(folder.path)
    assert verdict.clean, verdict.line
    changes = read_changes(folder)
    assert len(changes) == taken >= count - kills and all(each.step > 0 for each in changes)
    assert [each.number for each in changes] == list(range(1, taken + 1))
    rates = {line["step"]: line["lr"] for line in folder.read_metrics() if "lr" in line}
    for step, rate in rates.items():
        in_force = [each.value for each in changes if each.knob == "lr" and each.step <= step]
        assert rate == (in_force[-1] if in_force else rates[1]), f"step {step}"
    is_repeated(folder)


@pytest.mark.slow
@pytest.mark.parametrize(("count", "kills"), [(3, 1), (50, 12)], ids=["few", "fifty"])
def test_a_reward_swapped_at_random_moments_judges_whole_groups_and_a_replay_repeats_every_loss(
    storm: Callable[[], Storm], tmp_path: Path, count: int, kills: int
) -> None:
    module = tmp_path / "rewards_in_turn.py"
    run = storm()

    def ask(number: int) -> None:
        module.write_text(
            "from dataflow import scorer\n\n@scorer(isolate=False)\ndef judge(completion: str) ->"
            f" float:\n    return {100.0 * (number + 1)} + len(completion) % 7\n"
        )
        ask_to_swap(run.folder, "reward", "rewards_in_turn:judge")

    taken = run.change(count, kills, ask)
    folder = run.folder
    verdict = verify(folder.path)
    assert verdict.clean, verdict.line
    assert len(read_swaps(folder)) >= taken >= count - kills
    judged: set[int] = set()
    for path in sorted(folder.path.glob("rollouts/step-*.arrow")):
        table = folder.rollouts_of().read(int(path.stem.partition("-")[2]))
        judges: dict[int, set[int]] = {}
        for group, reward in zip(
            *(table.column(n).to_pylist() for n in ("group_id", "reward")), strict=True
        ):
            judges.setdefault(group, set()).add(int(reward // 100))
        assert all(len(each) == 1 for each in judges.values()), f"{path.name}: {judges}"
        judged |= {each for of_group in judges.values() for each in of_group}
    assert len(judged) > count // 4, "what several of them judged was trained"
    is_repeated(folder)
