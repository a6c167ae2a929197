"""What a run can do without is written whole or told of once, and read as missing where it is
broken.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dataflow.folder.faults import Faults, read_faults
from dataflow.folder.run_folder import RunFolder
from dataflow.folder.trace import WORK, Trace, merge
from dataflow.scheduler.execute import take
from dataflow.system.files import Extras, read_lines, read_map


@pytest.fixture
def told() -> list[str]:
    return []


def test_a_refusal_is_told_once_until_the_disk_takes_the_file_again(
    tmp_path: Path, told: list[str]
) -> None:
    extras, path = Extras(told.append), tmp_path / "times.json"
    path.mkdir()
    assert (
        not extras.write(path, "{}")
        and not extras.write(path, "{}")
        and not extras.append(path, "{}")
    )
    assert told == [
        f"writing '{path}' failed: Is a directory; move that folder away; the run goes on"
        " without it"
    ]
    path.rmdir()
    assert extras.write(path, "{}") and path.read_text() == "{}"
    path.unlink()
    path.mkdir()
    assert not extras.write(path, "{}") and len(told) == 2
    assert [each.name for each in tmp_path.iterdir()] == ["times.json"]


def test_one_file_that_is_refused_does_not_silence_another(tmp_path: Path, told: list[str]) -> None:
    extras = Extras(told.append)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        assert not extras.remove(tmp_path / name)
    assert len(told) == 2
    assert extras.remove(tmp_path / "absent") and extras.rename(tmp_path / "a", tmp_path / "c")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\x00", None])
def test_a_map_that_is_broken_is_an_empty_one_with_a_word(
    content: bytes | None, tmp_path: Path, told: list[str]
) -> None:
    path = tmp_path / "times.json"
    path.mkdir() if content is None else path.write_bytes(content)
    assert read_map(path, tell=told.append) == {}
    assert bool(told) == (content != b"")
    assert all(str(path) in text and "missing" in text for text in told)


def test_values_of_another_type_than_was_written_are_left_out(
    tmp_path: Path, told: list[str]
) -> None:
    path = tmp_path / "times.json"
    path.write_text('{"seconds": "soon", "outcome": "finished"}')
    assert read_map(path, {"seconds": (int, float), "outcome": str}, told.append) == {
        "outcome": "finished"
    }
    assert "['seconds']" in told[0]


def test_lines_that_are_torn_or_no_maps_are_counted_and_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "text": "a\xe2\x80\xa8b"}\n[1]\n\n{"st\n\xff\n{"step": 2}\n')
    lines, torn = read_lines(path)
    assert [line["step"] for line in lines] == [1, 2] and torn == 3


def test_a_trace_that_a_crash_tore_is_merged_without_its_torn_lines(
    tmp_path: Path, told: list[str]
) -> None:
    folder = RunFolder(RunFolder.create(tmp_path, "test").path, Extras(told.append))
    trace = Trace("a-0")
    trace.add("a", WORK, 1.0, 2.0)
    trace.write(folder)
    whole = (folder.logs / "a-0.trace").read_text()
    (folder.logs / "b-0.trace").write_text(
        f'{whole}["a-0", "a", 1.0]\n["a-0", "a", "x", null]\n["a-0", "a", 3.'
    )
    merge(folder)
    events = [
        event for event in json.loads(folder.trace.read_text())["traceEvents"] if event["ph"] == "X"
    ]
    assert len(events) == 2 and len(told) == 1 and told[0].startswith("3 lines of traces")
    assert not list(folder.logs.glob("*.trace"))


def test_what_stands_in_the_way_of_a_trace_is_told_and_that_is_all(
    tmp_path: Path, told: list[str]
) -> None:
    folder = RunFolder(RunFolder.create(tmp_path, "test").path, Extras(told.append))
    for path in (folder.logs / "a-0.trace", folder.trace):
        path.mkdir()
    Trace("a-0").write(folder)
    merge(folder)
    assert {text.split("'")[1] for text in told} == {
        str(folder.logs / "a-0.trace"),
        str(folder.trace),
    }


def test_a_folder_in_the_place_of_the_book_of_faults_is_told_once(
    tmp_path: Path, told: list[str]
) -> None:
    (tmp_path / "faults.jsonl").mkdir()
    faults = Faults(str(tmp_path), lambda: 0.0, told)
    for attempt in range(3):
        faults.noticed("trainer-0", "died", attempt, 0.0)
    faults.close()
    assert len(told) == 1 and "faults.jsonl" in told[0]
    assert read_faults(tmp_path, told.append) == [] and "cannot be read" in told[1]


@pytest.mark.parametrize(
    "content", [None, b"", b"{", b"[]", b"{}", b'{"address": 3}', b'{"address": ""}']
)
def test_without_a_whole_address_there_is_nobody_to_take_over(
    content: bytes | None, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path)
    if content is not None:
        (tmp_path / "control.json").write_bytes(content)
    assert take(folder) is None


def test_a_log_that_cannot_be_opened_ends_nobody(tmp_path: Path) -> None:
    """In a child, as it is for good."""
    (tmp_path / "a-0.log").mkdir()
    code = (
        "import sys, pathlib; from dataflow.system.log import log_to;"
        " log_to(pathlib.Path(sys.argv[1])); print('lost')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a-0.log")],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout == "" and "a-0.log' cannot be opened: Is a directory" in done.stderr
