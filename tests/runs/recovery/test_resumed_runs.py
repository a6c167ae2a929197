"""Runs that ended early go on in their folders: nothing is trained twice, nothing is lost, and the
losses repeat.
"""

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from rigs.graphs import losses, tiny_graph
from rigs.machine import wait_until
from rigs.operators import struck

from dataflow import Devices, Result, inline, run, verify
from dataflow.errors import OperatorError
from dataflow.folder.finished import File, SealedWriter
from dataflow.folder.ledger import Ledger
from dataflow.folder.run_folder import RunFolder

pytestmark = [pytest.mark.usefixtures("one_core"), pytest.mark.timeout(180)]


STEPS = 6


MARK = -77.0


PROGRAM = Path(__file__).parents[2] / "rigs" / "resumable.py"


ROOT = PROGRAM.parent.parent.parent


def steps_told(folder: Path) -> list[int]:
    return [line["step"] for line in RunFolder.open(folder).scan_metrics()[0] if "loss" in line]


@pytest.fixture(scope="module")
def undisturbed(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Result]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["dataflow.runner"], "this_machine", lambda: Devices(cpus=1))
        yield run(
            tiny_graph(policy, max_staleness=0, eval_every=4, checkpoint_every=2),
            steps=STEPS,
            on=inline(),
            runs=tmp_path_factory.mktemp("undisturbed"),
            quiet=True,
        )


# Inline


def test_a_run_that_goes_on_has_the_losses_of_one_that_never_stopped(
    undisturbed: Result, policy: Path, tmp_path: Path
) -> None:
    def graph() -> Any:
        return tiny_graph(policy, max_staleness=0, eval_every=4, checkpoint_every=2)

    part = run(graph(), steps=3, on=inline(), runs=tmp_path, quiet=True)
    whole = run(graph(), steps=STEPS, on=inline(), resume=part.folder, quiet=True)
    assert losses(whole.folder) == losses(undisturbed.folder)
    assert steps_told(whole.folder) == [1, 2, 3, 4, 5, 6]
    assert [step for step, _ in whole.evaluations] == [0, 3, 4, 6]
    assert whole.verdict.clean and whole.steps == STEPS, whole.verdict.line
    times = RunFolder.open(whole.folder).read_json("times.json")
    assert times["outcome"] == "finished" and times["seconds"] == pytest.approx(
        part.seconds + whole.seconds
    )
    config = RunFolder.open(whole.folder).read_json("config.json")
    assert config["steps"] == STEPS and [part["from"] for part in config["resumed"]] == [
        {"trainer": 3}
    ]


@pytest.mark.slow
def test_groups_in_flight_when_a_run_ended_are_trained_when_it_goes_on(
    policy: Path, tmp_path: Path
) -> None:
    """Asynchronous runs end with groups that nobody has trained."""
    part = run(tiny_graph(policy, max_staleness=2), steps=2, on=inline(), runs=tmp_path, quiet=True)
    folder = RunFolder.open(part.folder)
    with Ledger.open(folder.ledger, readonly=True) as ledger:
        waiting = [group.group_id for group in ledger.in_flight("prompts")]
    whole = run(
        tiny_graph(policy, max_staleness=2), steps=5, on=inline(), resume=part.folder, quiet=True
    )
    assert whole.verdict.clean and whole.steps == 5, whole.verdict.line
    with Ledger.open(folder.ledger, readonly=True) as ledger:
        made = ledger.steps("trainer")
        dropped = ledger.counts("trainer").dropped
    trained = [group for step in made for group in step.trained]
    assert len(set(trained)) == len(trained)
    assert set(waiting) <= {*trained, *(group for step in made for group in step.dropped)} and set(
        dropped
    ) <= {"stale"}


def test_a_run_that_failed_goes_on_from_what_was_committed_and_its_seconds_count(
    undisturbed: Result, policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # nothing is written on the way
    monkeypatch.setattr(sys.modules["dataflow.scheduler.execute"], "TIMES_S", 1e9)

    def boom() -> None:
        raise ValueError("boom")

    def graph() -> Any:
        return tiny_graph(policy, max_staleness=0, eval_every=4, checkpoint_every=2)

    failing = graph()
    trainer = failing.operators["trainer"]
    object.__setattr__(trainer, "build", struck(trainer, boom, after=11).build)
    with pytest.raises(OperatorError, match="boom"):
        run(failing, steps=STEPS, on=inline(), runs=tmp_path, quiet=True)
    assert 1 < len(steps_told(tmp_path / "latest")) < STEPS
    before = RunFolder.open(tmp_path / "latest").read_json("times.json")
    assert (
        before["outcome"] == "not finished"
        and before["seconds"] > before["busy_seconds"]["trainer"] > 0
    )
    whole = run(graph(), on=inline(), resume=tmp_path / "latest", quiet=True)
    assert whole.verdict.clean and whole.steps == STEPS, whole.verdict.line
    assert losses(whole.folder) == losses(undisturbed.folder)
    after = RunFolder.open(whole.folder).read_json("times.json")
    assert after["seconds"] == pytest.approx(before["seconds"] + whole.seconds)


@pytest.mark.slow
def test_no_token_is_trained_that_weights_drew_which_the_run_went_back_behind(
    policy: Path, tmp_path: Path
) -> None:
    """Groups that were finished under them are in flight, and are drawn anew under the weights that
    there are.
    """

    def boom() -> None:
        raise ValueError("boom")

    def graph() -> Any:
        return tiny_graph(policy, max_staleness=2, recover_within_s=math.inf)

    failing = graph()
    trainer = failing.operators["trainer"]
    object.__setattr__(trainer, "build", struck(trainer, boom, after=15).build)
    with pytest.raises(OperatorError, match="boom"):
        run(failing, steps=12, on=inline(), runs=tmp_path, quiet=True)
    folder = RunFolder.open(tmp_path / "latest")
    with Ledger.open(folder.ledger, readonly=True) as ledger:
        back_to = ledger.last_step("trainer") - 2
    left = mark_younger(folder.finished("generator"), back_to)
    assert left and back_to > 0
    os.truncate(folder.rollouts_of().step_file(back_to + 1), 500)
    whole = run(graph(), on=inline(), resume=folder.path, quiet=True)
    assert whole.verdict.clean and whole.steps == 12, whole.verdict.line
    trained = {}
    for step in range(back_to + 1, 13):
        table = folder.rollouts_of().read(step)
        trained |= dict(
            zip(
                table.column("rollout_id").to_pylist(),
                table.column("logprobs").to_pylist(),
                strict=True,
            )
        )
    assert not any(MARK in logprobs for logprobs in trained.values())
    kept = left.keys() & trained.keys()
    assert kept and all(trained[rollout] == left[rollout] for rollout in kept)
    with Ledger.open(folder.ledger, readonly=True) as ledger:
        assert ledger.counts("trainer").dropped == {}


def mark_younger(finished: Path, version: int) -> dict[int, list[float]]:
    """Mark the finished groups with a token of a later version, so that they are known wherever
    they come; the logprobs of all other rollouts.
    """
    others = {}
    for path in finished.glob("*.arrows"):
        made = []
        for batch in File(path).read():
            rows = batch.to_pylist()
            younger = {row["group_id"] for row in rows if max(row["versions"]) > version}
            others |= {
                row["rollout_id"]: row["logprobs"] for row in rows if row["group_id"] not in younger
            }
            for row in rows:
                row["logprobs"] = (
                    [MARK] * len(row["logprobs"]) if row["group_id"] in younger else row["logprobs"]
                )
            made.append(pa.RecordBatch.from_pylist(rows, schema=batch.schema))
        with path.open("wb") as sink:
            writer = SealedWriter(sink, made[0].schema)
            for batch in made:
                writer.write_batch(batch)
    return others


# As a user types it


def resumable(policy: Path, runs: Path, *more: str) -> "subprocess.Popen[str]":
    command = [
        sys.executable,
        str(PROGRAM),
        "--policy",
        str(policy),
        "--runs",
        str(runs),
        "--quiet",
        *more,
    ]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def dataflow(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "dataflow", *arguments],
        cwd="/",
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def kill_after(
    step: int, started: "subprocess.Popen[str]", runs: Path, delay_s: float = 0.0
) -> Path:
    """Kill a program with SIGKILL once it has told of a step; its run folder."""
    latest = runs / "latest"

    def made() -> bool:
        assert started.poll() is None, started.communicate()
        return latest.exists() and len(steps_told(latest)) >= step

    wait_until(made, 180.0, f"step {step}")
    time.sleep(delay_s)
    started.kill()
    started.communicate()
    return latest.resolve()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("on", ["inline", "processes"])
def test_a_killed_program_is_resumed_by_one_command_and_its_losses_repeat(
    on: str, undisturbed: Result, policy: Path, machine: None, tmp_path: Path
) -> None:
    more = ["--inline"] if on == "inline" else []
    folder = kill_after(3, resumable(policy, tmp_path, "--steps", "5", *more), tmp_path)
    done = dataflow("resume", str(folder), "--steps", str(STEPS))
    assert done.returncode == 0, done.stderr
    verdict = verify(folder)
    assert verdict.clean, verdict.line
    assert losses(folder) == losses(undisturbed.folder)
    rounds = [
        line["step"] for line in RunFolder.open(folder).read_metrics() if "eval_accuracy" in line
    ]
    assert rounds[0] == 0 and rounds[-1] == STEPS and rounds == sorted(set(rounds))
    again = dataflow("resume", str(folder))
    assert again.returncode == 1 and "is finished: it has made its 6 steps" in again.stderr
    replayed = dataflow("replay", str(folder))
    assert (
        replayed.returncode == 0
        and "6 of 6 losses are the recorded ones, bit for bit" in replayed.stdout
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_asynchronous_program_that_is_killed_again_and_again_keeps_every_law(
    policy: Path, machine: None, tmp_path: Path
) -> None:
    started = resumable(policy, tmp_path, "--steps", "12", "--max-staleness", "2")
    folder = kill_after(2, started, tmp_path, delay_s=0.05)
    for step, delay_s in ((4, 0.13), (7, 0.02), (9, 0.2)):
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        again = subprocess.Popen(
            [sys.executable, "-m", "dataflow", "resume", str(folder)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        kill_after(step, again, tmp_path, delay_s)
        assert verify(folder).clean, verify(folder).line
    done = dataflow("resume", str(folder))
    assert done.returncode == 0, done.stderr
    verdict = verify(folder)
    assert verdict.clean, verdict.line
    with Ledger.open(RunFolder.open(folder).ledger, readonly=True) as ledger:
        counts = ledger.counts("trainer")
    assert counts.trained == 12 * 4 and set(counts.dropped) <= {"stale"}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_program_that_runs_is_not_resumed_beside_itself(
    policy: Path, machine: None, tmp_path: Path
) -> None:
    started = resumable(policy, tmp_path, "--steps", "500")
    try:
        wait_until(
            lambda: (tmp_path / "latest").exists() and steps_told(tmp_path / "latest"),
            180.0,
            "a step",
        )
        refused = dataflow("resume", str(tmp_path / "latest"))
        assert refused.returncode == 1 and f"process {started.pid} runs it" in refused.stderr
    finally:
        # of a scheduler that is killed the workers would go on for a minute
        started.send_signal(signal.SIGINT)
        started.communicate(timeout=60)
