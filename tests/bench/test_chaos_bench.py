"""Laws of the chaos bench: faults are explained by blows, what comes again is counted, losses are
compared by bits.
"""

import json
import os
import signal
from pathlib import Path

import pytest

from bench.chaos import __main__ as chaos
from bench.chaos.figures import (
    matched,
)
from bench.chaos.nemesis import Blow, Nemesis
from bench.chaos.run import CRASH_STATUS, reward


def fault(worker: str, at: float, recovered_s: float | None = 1.0) -> dict[str, object]:
    return {
        "at": at,
        "worker": worker,
        "cause": "died (SIGKILL)",
        "attempt": 0,
        "recovered_s": recovered_s,
    }


def line(at: float, what: str, *groups: int, source: str = "prompts") -> dict[str, object]:
    return {"at": at, "what": what, "source": source, "groups": list(groups)}


def test_a_fault_is_explained_by_the_first_blow_to_its_worker_that_explains_no_other() -> None:
    blows = [
        Blow(10.0, "a-0", "SIGSTOP"),
        Blow(12.0, "a-0", "SIGKILL"),
        Blow(11.0, "a-0/process", "SIGKILL"),
        Blow(40.0, "a-0", "SIGKILL"),
        Blow(13.0, "b-0", "SIGKILL"),
    ]
    faults = [fault("a-0", 40.5), fault("a-0", 12.5), fault("b-0", 5.0)]
    assert [(blow and blow.at, found["at"]) for blow, found in matched(blows, faults)] == [
        (None, 5.0),
        (10.0, 12.5),
        (40.0, 40.5),
    ]


def test_the_scorer_ends_its_process_for_the_share_that_is_to_crash() -> None:
    pid = os.fork()
    if pid == 0:
        reward("1", "1", 3, crash=1.0)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == CRASH_STATUS


def test_the_blows_of_a_seed_are_the_same_and_none_falls_where_nobody_is() -> None:
    def signs(seed: int) -> list[signal.Signals]:
        nemesis = Nemesis(os.getpid(), seed, 1.0)
        return [nemesis.lot()[0] for _ in range(20)]

    assert signs(1) == signs(1) != signs(2)
    assert set(signs(1)) == {signal.SIGKILL, signal.SIGSTOP}
    lonely = Nemesis(os.getpid(), 0, 0.01)
    lonely.start()
    lonely.stop()
    assert lonely.blows == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_under_faults_is_clean_and_its_faults_are_told(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    common = [
        "--quick",
        "--minutes",
        "0.3",
        "--policies",
        str(tmp_path / "policies"),
        "--runs",
        str(tmp_path / "runs"),
    ]
    assert chaos.main([*common, "--json", str(path)]) == 0
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    runs = {each["system"]: each for each in lines if each["case"] == "runs"}
    assert {each["clean"] for each in runs.values()} == {"yes"} and runs["undisturbed"][
        "faults"
    ] == 0
    assert len([each for each in lines if each["case"] == "faults"]) >= 3
    assert all(each["finished_again"] == 0 and each["left_behind"] == 0 for each in runs.values())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_trainers_that_are_killed_train_nothing_twice(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    common = [
        "--policies",
        str(tmp_path / "policies"),
        "--runs",
        str(tmp_path / "runs"),
        "--json",
        str(path),
    ]
    assert chaos.main(["--trainer-kills", "2", *common]) == 0
    run, total = (json.loads(text) for text in path.read_text().splitlines())
    assert run["trained_twice"] == 0 and run["same"] == run["compared"] > 0 and total["kills"] == 2


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_schedulers_that_are_killed_are_replaced_and_one_that_is_not_leaves_nothing(
    tmp_path: Path,
) -> None:
    report = tmp_path / "report.jsonl"
    arguments = [
        "--scheduler-kills",
        "2",
        "--quick",
        "--policies",
        str(tmp_path),
        "--json",
        str(report),
    ]
    assert chaos.main(arguments) == 0
    lines = [json.loads(text) for text in report.read_text().splitlines()]
    standby, alone = (line for line in lines if line["case"] == "schedulers")
    assert (
        standby["kills"],
        standby["replaced"],
        standby["others_restarted"],
        standby["left_behind"],
    ) == (2, 2, 0, 0)
    assert alone["clean"] == "yes" and alone["steps_alone"] > 0 and alone["left_behind"] == 0
