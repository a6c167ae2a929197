"""Another reward in a live run: generator and trainer go on, no group is lost or trained twice,
whoever is killed meanwhile; resume and replay know of it.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from rigs.machine import wait_until
from rigs.programs import Program, program, under_way

from dataflow import verify
from dataflow.errors import RunError
from dataflow.folder.faults import FILE
from dataflow.folder.live_changes import read_swaps
from dataflow.folder.run_folder import RunFolder
from dataflow.scheduler.requests import ask_for_facts, ask_to_stop

__all__ = ["program"]


pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("forked", "one_core"),
    pytest.mark.timeout(240),
]


ROOT = Path(__file__).parents[3]


RESUMABLE = ROOT / "tests" / "rigs" / "resumable.py"


NEW = 100.0


"""Above what the reward of the graph gives."""


MODULE = """
import os, time
from dataflow import scorer

with open({started!r}, "a") as file:
    print(os.getpid(), file=file)
time.sleep({seconds})

@scorer(isolate=False)
def better(completion: str) -> float:
    return {new}

@scorer
def isolated(completion: str) -> float:
    return {new} + len(completion)

@scorer(isolate=False)
def whole(completion: str) -> int:
    return 1
"""


Start = Callable[..., Program]


@pytest.fixture
def rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Puts the module `new_rewards` where programs find it; a file of the processes that have
    imported it.
    """
    place = tmp_path / "modules"
    place.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(place))
    started = place / "started"

    def write(seconds: float = 0.0) -> Path:
        (place / "new_rewards.py").write_text(
            MODULE.format(started=str(started), seconds=seconds, new=NEW)
        )
        return started

    return write


def dataflow(*words: str, within_s: float = 90.0) -> tuple[int, str]:
    """The command as a user types it: its status, and what it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-m", "dataflow", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        timeout=within_s,
        env=environment,
    )
    return done.returncode, " ".join(done.stdout.split())


def latest(runs: Path) -> RunFolder:
    return RunFolder.open((runs / "latest").resolve())


def rows(folder: RunFolder, first: int = 1) -> pa.Table:
    """What was trained from a step on."""
    steps = [
        line["step"]
        for line in folder.read_metrics()
        if line["step"] >= first and "eval_accuracy" not in line
    ]
    return pa.concat_tables([folder.rollouts_of().read(step) for step in sorted(set(steps))])


def all_new(folder: RunFolder, step: int, column: str = "reward") -> bool:
    return min(folder.rollouts_of().read(step).column(column).to_pylist()) >= NEW


def trains_new(each: Program) -> None:
    """Wait until steps train nothing but what the new reward has scored."""
    wait_until(
        lambda: each.steps() > 0 and all_new(latest(each.runs), each.steps()),
        60.0,
        "a step of the new reward",
    )


def clean(folder: RunFolder) -> str:
    verdict = verify(folder.path)
    assert verdict.clean, verdict.line
    groups = rows(folder).column("group_id").to_pylist()
    runs_of = [group for at, group in enumerate(groups) if not at or groups[at - 1] != group]
    assert len(runs_of) == len(set(runs_of)), "a group was trained twice"
    return str(verdict)


def faults(folder: RunFolder) -> list[str]:
    path = folder.path / FILE
    return (
        [json.loads(line)["worker"] for line in path.read_text().splitlines()]
        if path.exists()
        else []
    )


def pids(folder: RunFolder) -> dict[str, int]:
    return {name: worker["pid"] for name, worker in ask_for_facts(folder)["workers"].items()}


def stopped(each: Program) -> None:
    ask_to_stop(latest(each.runs))
    each.process.wait(60)


def test_a_reward_is_swapped_in_the_midst_of_a_run_and_a_resume_goes_on_with_it(
    program: Start, rewards: Callable[..., Path]
) -> None:
    rewards()
    first = program("endless")
    under_way(first)
    folder = latest(first.runs)
    before = pids(folder)
    status, said = dataflow("swap", str(folder.path), "reward=new_rewards:better")
    assert status == 0 and said.startswith(
        "'reward' is 'new_rewards:better' from now on (sha256 "
    ), said
    after = pids(folder)
    assert {name for name in before if before[name] != after[name]} == {"reward-0"}
    trains_new(first)
    (swap,) = read_swaps(folder)
    assert swap.step > 0 and not max(rows(folder).slice(0, 32).column("reward").to_pylist()) >= NEW
    assert all(not all_new(folder, step) for step in range(1, swap.step))
    for wish, why in {
        "reward=new_rewards:whole": "'reward': 'int64'",
        "reward=nowhere_at_all:better": "names module 'nowhere_at_all', which is not found",
        "reward=better": "write it as reward=rewards:strict",
        "generator=new_rewards:better": "'generator' generates",
        "rewards=new_rewards:better": "did you mean 'reward'",
        "reward": "write it as reward=rewards:strict",
    }.items():
        status, said = dataflow("swap", str(folder.path), wish)
        assert status == 2 and why in said, said
    assert pids(folder) == after and len(read_swaps(folder)) == 1
    status, said = dataflow("swap", str(folder.path), "isolated=new_rewards:isolated")
    assert status == 0, said
    wait_until(
        lambda: all_new(folder, first.steps(), "isolated"), 60.0, "a step of the other scorer"
    )
    assert "reward = new_rewards:better (sha256 " in dataflow("doctor", str(folder.path))[1]
    stopped(first)
    assert faults(folder) == []
    assert "note: swapped: reward = new_rewards:better (sha256" in clean(folder)
    assert "swapped reward = new_rewards:better (sha256" in dataflow("show", str(folder.path))[1]
    made = first.steps()
    rewards().parent.joinpath("new_rewards.py").unlink()
    second = program("endless", resume=True, steps=made + 5)
    second.process.wait(90)
    assert f"ended after {made + 5} steps: clean" in second.output(), second.output()
    assert all(all_new(folder, step) for step in range(made + 1, made + 6)), (
        "a resume has what was kept of the module"
    )
    clean(folder)


def started_by(path: Path, count: int) -> list[int]:
    """The first processes that have imported the module: the trial, then the worker."""
    wait_until(
        lambda: path.exists() and len(path.read_text().split()) >= count,
        60.0,
        f"import number {count}",
    )
    return [int(pid) for pid in path.read_text().split()]


@pytest.fixture
def asking() -> Iterator[Callable[[RunFolder], "subprocess.Popen[str]"]]:
    """Asks for a swap, and does not wait."""
    asked: list[subprocess.Popen[str]] = []

    def ask(folder: RunFolder) -> "subprocess.Popen[str]":
        command = [
            sys.executable,
            "-m",
            "dataflow",
            "swap",
            str(folder.path),
            "reward=new_rewards:better",
        ]
        asked.append(
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
            )
        )
        return asked[-1]

    yield ask
    for each in asked:
        each.kill()
        each.wait(10)
        assert each.stdout is not None
        each.stdout.close()


def test_a_worker_that_is_killed_while_it_starts_with_the_new_reward_is_started_with_it_again(
    program: Start,
    rewards: Callable[..., Path],
    asking: Callable[[RunFolder], "subprocess.Popen[str]"],
) -> None:
    started = rewards(seconds=1.0)
    each = program("endless")
    under_way(each)
    folder = latest(each.runs)
    asked = asking(folder)
    os.kill(started_by(started, 2)[1], signal.SIGKILL)
    assert "from now on" in asked.communicate(timeout=60)[0] and asked.returncode == 0
    trains_new(each)
    stopped(each)
    assert faults(folder) == ["reward-0"] and len(read_swaps(folder)) == 1
    clean(folder)


@pytest.mark.parametrize("by", ["standby", "resume"])
def test_a_scheduler_killed_while_the_new_reward_starts_is_replaced_by_one_that_ends_the_swap(
    program: Start,
    rewards: Callable[..., Path],
    asking: Callable[[RunFolder], "subprocess.Popen[str]"],
    by: str,
) -> None:
    started = rewards(seconds=1.0)
    first = program("endless", standby=by == "standby")
    under_way(first)
    folder = latest(first.runs)
    asked = asking(folder)
    started_by(started, 2)
    first.kill()
    said = " ".join(asked.communicate(timeout=60)[0].split())
    assert asked.returncode == 2 and (
        "has died" in said or "was replaced while it was asked" in said
    ), said
    second = first if by == "standby" else program("endless", resume=True)
    trains_new(second)
    ask_to_stop(folder)
    wait_until(lambda: second.outcome() == "stopped", 60.0, "the end of the run")
    assert "scheduler" in faults(folder) and [swap.reference for swap in read_swaps(folder)] == [
        "new_rewards:better"
    ]
    clean(folder)


def test_a_scheduler_that_is_killed_while_the_reward_is_tried_leaves_the_run_with_the_one_before(
    program: Start,
    rewards: Callable[..., Path],
    asking: Callable[[RunFolder], "subprocess.Popen[str]"],
) -> None:
    started = rewards(seconds=1.0)
    first = program("endless")
    under_way(first)
    folder = latest(first.runs)
    asked = asking(folder)
    started_by(started, 1)
    first.kill()
    assert (
        "has died" in " ".join(asked.communicate(timeout=60)[0].split()) and asked.returncode == 2
    )
    second = program("endless", resume=True)
    before = second.steps()
    wait_until(lambda: second.steps() > before + 5, 60.0, "steps more")
    assert read_swaps(folder) == () and max(rows(folder).column("reward").to_pylist()) < NEW
    status, said = dataflow("swap", str(folder.path), "reward=new_rewards:better")
    assert status == 0, said
    trains_new(second)
    stopped(second)
    clean(folder)


def test_a_run_that_is_over_takes_no_other_reward(
    program: Start, rewards: Callable[..., Path]
) -> None:
    rewards()
    each = program("endless", steps=2)
    each.process.wait(60)
    status, said = dataflow("swap", str(latest(each.runs).path), "reward=new_rewards:better")
    assert status == 2 and "takes no commands: it is over" in said
    assert RunError.__name__ in said


@pytest.fixture
def learning(
    tmp_path: Path, policy: Path, machine: None
) -> Iterator[Callable[..., "subprocess.Popen[bytes]"]]:
    """Starts the real operators around a tiny policy, or a command."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*words: str) -> "subprocess.Popen[bytes]":
        command = [sys.executable, *words]
        if words[0] == str(RESUMABLE):
            command += [
                "--policy",
                str(policy),
                "--runs",
                str(tmp_path / "runs"),
                "--quiet",
                "--eval-every",
                "1000000",
            ]
        with (tmp_path / "output").open("a") as file:
            made = subprocess.Popen(command, stdout=file, stderr=file, cwd=ROOT, process_group=0)
        started.append(made)
        return made

    yield start
    for each in started:
        if each.poll() is None:
            os.killpg(each.pid, signal.SIGKILL)
            each.wait(10)


def test_real_operators_train_what_the_new_reward_scores_and_a_replay_repeats_every_loss(
    tmp_path: Path, rewards: Callable[..., Path], learning: Callable[..., "subprocess.Popen[bytes]"]
) -> None:
    rewards()
    (tmp_path / "modules" / "new_rewards.py").write_text(
        "from dataflow import scorer\n\n@scorer(isolate=False)\ndef better(completion: str) ->"
        f" float:\n    return {NEW} + sum(letter in 'xyz' for letter in completion)\n"
    )
    run = learning(str(RESUMABLE))
    runs = tmp_path / "runs"

    def steps() -> int:
        assert run.poll() is None, (tmp_path / "output").read_text()
        return len(latest(runs).read_metrics()) if (runs / "latest").exists() else 0

    wait_until(lambda: steps() >= 4, 120.0, "step 4")
    folder = latest(runs)
    status, said = dataflow("swap", str(folder.path), "reward=new_rewards:better")
    assert status == 0, said
    (swap,) = read_swaps(folder)
    wait_until(lambda: steps() >= swap.step + 4, 120.0, "steps more")
    assert dataflow("stop", str(folder.path))[0] == 0
    run.wait(60)
    last = max(line["step"] for line in folder.read_metrics())
    assert all_new(folder, last) and not all_new(folder, swap.step)
    clean(folder)
    assert ">reward = new_rewards:better</text>" in (folder.path / "curve.svg").read_text()
    status, said = dataflow("replay", str(folder.path))
    assert status == 0 and f"{last} of {last} losses are the recorded ones, bit for bit" in said, (
        said
    )
    status, said = dataflow("resume", str(folder.path), "--steps", str(last + 3), within_s=120.0)
    assert status == 0, said
    assert all(all_new(folder, step) for step in range(last + 1, last + 4))
    clean(folder)
