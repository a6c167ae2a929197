"""Laws of the chaos bench: faults are explained by blows, what comes again is counted, losses are
compared by bits.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from bench.chaos import __main__ as chaos
from bench.chaos.figures import (
    DRAWN,
    at_stake,
    drawn,
    equal_losses,
    faults_of,
    kept,
    matched,
    pace,
    rate,
    repeated,
    rows_of_faults,
    trained_twice,
    useful,
)
from bench.chaos.kills import summed
from bench.chaos.nemesis import Blow, Nemesis, targets, workers
from bench.chaos.run import CRASH_STATUS, reward
from bench.chaos.scheduler import paces_around
from dataflow.folder.run_folder import write_arrow


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


def test_lines_that_a_crash_tore_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "faults.jsonl").write_text(json.dumps(fault("a-0", 1.0)) + '\n{"at": 2.0, "wor')
    (tmp_path / DRAWN).write_text(json.dumps(line(1.0, "begun", 4)) + '\n{"at": 2.0, "wh')
    assert faults_of(tmp_path) == [fault("a-0", 1.0)]
    assert drawn(tmp_path) == [line(1.0, "begun", 4)]
    assert faults_of(tmp_path / "nowhere") == drawn(tmp_path / "nowhere") == []


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


def test_a_row_has_what_became_of_a_blow_and_the_rollouts_begun_again_until_the_next() -> None:
    blows = [Blow(10.0, "a-0", "SIGKILL"), Blow(20.0, "r-0/process", "SIGSTOP", replaced_s=1.5)]
    book = [
        line(1.0, "begun", 1, 2, 3),
        line(11.0, "begun", 2, 4),
        line(11.5, "begun", 1, source="held_out"),
        line(21.0, "begun", 3, 2),
        line(31.0, "begun", 5),
    ]
    rows = rows_of_faults(
        blows, [fault("a-0", 10.25, 3.0), fault("c-0", 30.0, None)], book, group_size=8
    )
    assert [row["worker"] for row in rows] == ["a-0", "r-0/process", "c-0"]
    assert [row["kind"] for row in rows] == ["SIGKILL", "SIGSTOP", "by itself"]
    assert (rows[0]["notice_s"], rows[0]["recover_s"], rows[1]["replaced_s"]) == (0.25, 3.0, 1.5)
    assert [row["regenerated"] for row in rows] == [8, 16, 0]


def test_a_group_is_repeated_as_often_as_it_came_after_the_first_time() -> None:
    book = [
        line(1.0, "finished", 1),
        line(2.0, "finished", 1, 2),
        line(3.0, "finished", 1),
        line(4.0, "begun", 2),
    ]
    assert repeated(book, "finished", "prompts") == [(2.0, 1), (3.0, 1)]


def test_the_rate_of_steps_is_over_all_of_their_time() -> None:
    assert rate([1.0, 2.0, 9.0]) == 0.25 and rate([1.0]) == rate([]) == 0.0


def test_useful_time_is_what_the_undisturbed_run_takes_for_as_many_steps() -> None:
    assert pace([0.0, 1.0, 2.0, 10.0]) == 1.0
    assert useful([0.0, 1.0, 2.0, 10.0], [5.0, 7.0, 9.0]) == pytest.approx(0.6)
    assert (
        pace([1.0]) is None and useful([1.0], [1.0, 2.0]) is None and useful([0.0, 1.0], []) is None
    )


def test_what_was_at_stake_at_a_kill_is_kept_dropped_or_made_again() -> None:
    book = [
        line(1.0, "finished", 1, 2, 3, 4, 5),
        line(6.0, "finished", 4),
        line(7.0, "finished", 6),
    ]
    ended = {
        1: ("trained", 2.0),
        2: ("trained", 8.0),
        3: ("stale", 8.0),
        4: ("trained", 8.0),
        6: ("trained", 8.0),
    }
    assert at_stake(5.0, book, ended) == {2, 3, 4, 5}
    assert kept([5.0], book, ended) == {"at_stake": 4, "again": 1, "dropped": 1, "kept": 2}
    assert kept([5.0, 6.5], book, ended) == {"at_stake": 8, "again": 1, "dropped": 2, "kept": 5}


def test_a_group_that_stands_in_two_files_was_trained_twice(tmp_path: Path) -> None:
    for step, groups in ((1, [1, 1, 2, 2]), (2, [3, 3, 2, 2])):
        rows = {
            "group_id": pa.array(groups, pa.int64()),
            "position": pa.array([0, 1, 0, 1], pa.int32()),
        }
        write_arrow(tmp_path / "rollouts" / f"step-{step:06d}.arrow", pa.table(rows))
    assert trained_twice(tmp_path) == 1


def test_losses_are_compared_by_step_and_bit_for_bit() -> None:
    one = [{"step": 1, "loss": 0.1}, {"step": 2, "loss": 0.2}, {"step": 2, "eval_accuracy": 1.0}]
    other = [{"step": 1, "loss": 0.1}, {"step": 2, "loss": 0.2 + 1e-16}, {"step": 3, "loss": 0.3}]
    assert equal_losses(one, other) == (2, 1)
    assert equal_losses(one, [{"step": 2, "loss": 0.25}]) == (1, 0)


def test_the_share_that_was_kept_is_of_all_runs_together() -> None:
    run = {
        "kills": 5,
        "steps": 9,
        "trained_twice": 0,
        "again": 0,
        "dropped": 1,
        "clean": "yes",
        "left_behind": 0,
    }
    found = summed(
        [{**run, "at_stake": 90, "kept": 89}, {**run, "at_stake": 10, "kept": 9, "clean": "NO"}]
    )
    assert (found["share_kept"], found["clean"], found["runs"], found["kills"]) == (0.98, 1, 2, 10)
    assert summed([{**run, "at_stake": 0, "kept": 0}])["share_kept"] is None


def test_the_scorer_is_the_task_s_where_it_is_not_to_fail() -> None:
    assert reward("24", "24", 7) == 1.0 and reward("23", "24", 7) == 0.0
    assert reward("24", "24", 7, hang=1e-9, crash=1e-9) == 1.0


def test_the_scorer_ends_its_process_for_the_share_that_is_to_crash() -> None:
    pid = os.fork()
    if pid == 0:
        reward("1", "1", 3, crash=1.0)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == CRASH_STATUS


def test_targets_are_workers_by_their_logs_and_the_processes_below_them(tmp_path: Path) -> None:
    """This process plays the scheduler: a forkserver below it, a worker below that, and a process
    of a pool.
    """
    (tmp_path / "logs").mkdir()
    inner = (
        "import subprocess, sys; subprocess.Popen(['sleep', '60']); print('up', flush=True);"
        " sys.stdin.read()"
    )
    outer = (
        f"import subprocess, sys; log = open({str(tmp_path / 'logs' / 'a-0.log')!r}, 'w')\n"
        f"subprocess.Popen([sys.executable, '-c', {inner!r}], stdout=log, stdin=subprocess.PIPE)\n"
        "sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", outer], stdin=subprocess.PIPE) as nursery:
        try:
            while "up" not in _text(tmp_path / "logs" / "a-0.log"):
                assert nursery.poll() is None
            found = workers(os.getpid())
            there = targets(os.getpid())
            assert list(found) == ["a-0"] and {name: len(each) for name, each in there.items()} == {
                "a-0": 1,
                "a-0/process": 1,
            }
        finally:
            for process in [each for those in targets(os.getpid()).values() for each in those]:
                process.kill()
            nursery.kill()


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


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


def test_the_pace_around_a_moment_counts_the_steps_on_both_sides() -> None:
    times = [1.0, 4.0, 9.0, 9.5, 10.0, 12.0, 14.9, 15.0]
    assert paces_around(times, 10.0, 5.0) == (2, 3)
    assert paces_around([], 10.0, 5.0) == (0, 0)


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
