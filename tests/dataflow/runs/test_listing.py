"""`dataflow list`: what it says of runs in any state, and of what is no run; it touches none of
them.
"""

import fcntl
import json
import os
import shutil
from pathlib import Path

import pytest

from dataflow import cli
from dataflow.folder.run_folder import RunFolder
from dataflow.runs.listing import TAILS, ago, runs_in
from dataflow.runs.state import Signs, decide, lock_kinds, signs_of, state_of
from dataflow.system.files import RunFolderError


@pytest.mark.parametrize(
    ("signs", "word"),
    [
        (Signs(outcome="finished"), "finished"),
        (Signs(outcome="stopped"), "stopped"),
        (Signs(outcome="not finished"), "died"),
        (Signs(), "died"),
        (Signs(outcome="finished", leads=True), "running"),
        (Signs(outcome="not finished", leads=True, works=True), "running"),
        (Signs(outcome="not finished", works=True), "died"),
        (Signs(outcome="not finished", elsewhere=True), "unknown"),
        (Signs(outcome="finished", elsewhere=True), "finished"),
    ],
)
def test_a_state_follows_from_what_is_seen(signs: Signs, word: str) -> None:
    assert decide(signs).word == word
    assert bool(decide(signs).note) == (word == "unknown" or (word == "died" and signs.works))


def test_a_lock_of_the_scheduler_says_that_a_run_goes_on_and_looking_at_it_does_not_open_it(
    made: Path, tmp_path: Path
) -> None:
    folder = RunFolder.open(shutil.copytree(made, tmp_path / "run"))
    assert state_of(folder).word == "finished"
    handle = os.open(folder.path / "lock", os.O_RDWR)
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX, 1, 0)
        assert state_of(folder).word == "running"
        assert state_of(folder).word == "running", (
            "the first look has let go of this process's own lock"
        )
        fcntl.lockf(handle, fcntl.LOCK_UN, 1, 0)
        fcntl.flock(handle, fcntl.LOCK_EX)
        assert signs_of(folder).works
        assert not signs_of(folder).leads
    finally:
        os.close(handle)


def test_locks_of_other_files_and_those_that_wait_are_not_taken_for_the_runs(
    tmp_path: Path,
) -> None:
    (tmp_path / "lock").touch()
    number = (tmp_path / "lock").stat().st_ino
    lines = [
        f"1: POSIX  ADVISORY  WRITE 7 fe:00:{number + 1} 0 0",
        f"2: -> POSIX  ADVISORY  WRITE 7 fe:00:{number} 0 0",
        f"3: POSIX  ADVISORY  READ 7 fe:00:{number} 0 0",
        "junk",
        "",
    ]
    assert lock_kinds(tmp_path / "lock", lines) == set()
    assert lock_kinds(
        tmp_path / "lock", [*lines, f"4: FLOCK  ADVISORY  WRITE 7 00:1b:{number} 0 EOF"]
    ) == {"FLOCK"}
    assert lock_kinds(tmp_path / "gone") == set()


def test_a_run_over_hosts_goes_on_while_its_counter_is_raised(made: Path, tmp_path: Path) -> None:
    folder = RunFolder.open(shutil.copytree(made, tmp_path / "run"))
    (folder.path / "times.json").unlink()
    (folder.path / "holders").mkdir()
    counter = folder.path / "holders" / "000002"
    counter.write_text("7@elsewhere#ab 12")
    raised = counter.stat().st_mtime
    assert signs_of(folder, raised + 5).leads
    assert not signs_of(folder, raised + 60).leads
    counter.write_text("released")
    assert state_of(folder).word == "died"


def test_the_list_says_of_each_folder_what_it_is_newest_first_and_never_raises(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "runs"
    shutil.copytree(made, root / "done")
    (root / "latest").symlink_to("done")
    killed = shutil.copytree(made, root / "killed")
    (killed / "times.json").write_text('{"outcome": "not finished", "seconds": 1')  # torn
    config = json.loads((killed / "config.json").read_text())
    (killed / "config.json").write_text(json.dumps({**config, "begun": config["begun"] + 1e6}))
    with (killed / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "node": "eval", "eval_accuracy": 0.25}\n{"step": 13, "node": "tra')
    old = root / "old"
    old.mkdir()
    (old / "metrics.jsonl").write_bytes(
        b'\xff\xfe{"step": 1}\n[3]\n{"step": 2, "reward_mean": NaN, "loss": true}\n'
    )
    (root / "unreadable").mkdir()
    (root / "unreadable" / "metrics.jsonl").mkdir()
    (root / "unreadable" / "config.json").mkdir()
    (root / "empty").mkdir()
    (root / "file").write_text("no folder")
    (root / "dangling").symlink_to("nowhere-at-all/else")
    (root / "loop").symlink_to("loop")
    denied = root / "denied"
    denied.mkdir()
    scandir = os.scandir
    monkeypatch.setattr(
        os,
        "scandir",
        lambda path: (
            (_ for _ in ()).throw(PermissionError(13, "Permission denied"))
            if Path(path) == denied
            else scandir(path)
        ),
    )
    before = {path: (path.lstat().st_mtime_ns, path.lstat().st_size) for path in root.rglob("*")}
    assert cli.list_runs(root) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    names = [line.split()[0] for line in lines[1:5]]
    assert names[0] == "killed"
    assert names[-1] == "old", "that nothing dates"
    assert lines[1].split()[1:4] == ["died", "12/12", "0.25"]
    assert next(line for line in lines if line.startswith("done")).split()[1:3] == [
        "finished",
        "12/12",
    ]
    assert next(line for line in lines if line.startswith("old")).split()[:3] == [
        "old",
        "died",
        "2",
    ]
    assert "note: unreadable: 'metrics.jsonl' cannot be read: Is a directory" in text
    assert "note: old: neither graph.json nor config.json is there" in text
    assert "times.json' is not JSON" in text
    assert "skipped: empty: no run" in text
    assert "skipped: denied: cannot be read: Permission denied" in text
    assert "skipped: dangling: cannot be read: No such file" in text
    assert not any(line.startswith(("latest", "file", "loop")) for line in lines)
    after = {path: (path.lstat().st_mtime_ns, path.lstat().st_size) for path in root.rglob("*")}
    assert after == before, "a look changes nothing"

    assert cli.list_runs(root, json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert {run["name"]: run["state"] for run in found["runs"]}["killed"] == "died"
    assert {each["name"] for each in found["others"]} == {"empty", "denied", "dangling"}


def test_a_run_is_listed_by_itself_and_a_folder_that_is_not_there_is_refused(
    made: Path, tmp_path: Path
) -> None:
    assert [run.name for run in runs_in(made).runs] == [made.name]
    with pytest.raises(
        RunFolderError, match="no folder of runs at .*nothing is there; give the folder that --runs"
    ):
        runs_in(tmp_path / "nowhere")


def test_a_long_file_is_read_from_its_end_until_an_evaluation_stands_there(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"leading": ["actor"]}')
    padding = "x" * 1000
    with (tmp_path / "metrics.jsonl").open("w") as file:
        file.write('{"step": 0, "eval_accuracy": 0.125}\n')
        for step in range(1, TAILS[0] // 500):
            file.write(f'{{"step": {step}, "node": "actor", "padding": "{padding}"}}\n')
            file.write(f'{{"step": {step * 9}, "node": "critic"}}\n')
    (run,) = runs_in(tmp_path).runs
    assert (run.steps, run.accuracy) == (TAILS[0] // 500 - 1, 0.125)


def test_an_age_is_told_in_one_unit() -> None:
    assert [ago(at, 1e6) for at in (None, 1e6 + 5, 1e6 - 90, 1e6 - 7200, 1e6 - 86400 * 3)] == [
        "-",
        "0 s",
        "90 s",
        "2 h",
        "3 d",
    ]
