"""The last minute of each process: bounded on disk, there while the run goes on, and whole after a
crash.
"""

import json
from pathlib import Path

import pytest

from dataflow.folder.run_folder import RunFolder
from dataflow.folder.trace import LINE_SPANS, MINUTE, WORK, RecentSpans, files_of, last_spans
from dataflow.system.files import Extras

WALL = 1.7e9


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def wall(self) -> float:
        return WALL + self.now


def at_work(
    folder: RunFolder, recent: RecentSpans, clock: Clock, seconds: float, every: float = 0.1
) -> None:
    """Work half of the time."""
    for _ in range(round(seconds / every)):
        recent.add("a", WORK, clock.now, clock.now + every / 2)
        clock.now += every
        if recent.is_due:
            recent.write(folder)


def test_however_long_a_run_two_files_hold_its_last_minute(tmp_path: Path) -> None:
    folder, clock = RunFolder.create(tmp_path, "test"), Clock()
    recent = RecentSpans("a-0", clock, clock.wall)
    for _ in range(20):
        at_work(folder, recent, clock, 17.0)
        found = last_spans(folder, MINUTE)
        whole = min(MINUTE, clock.now - 102.5)
        assert found[-1].end_s - found[0].begin_s >= whole - 0.2
        assert len(list(files_of(folder))) <= 2 and folder.size_bytes < 200_000
    assert found[-1].end_s > WALL + clock.now - 3 and {each.node for each in found} == {"a"}


def test_a_process_that_begins_again_leaves_what_the_one_before_did_last(tmp_path: Path) -> None:
    folder, clock = RunFolder.create(tmp_path, "test"), Clock()
    at_work(folder, RecentSpans("a-0", clock, clock.wall), clock, 30.0)
    clock.now += 5.0
    at_work(folder, RecentSpans("a-0", clock, clock.wall), clock, 8.0)
    begins = [each.begin_s - WALL for each in last_spans(folder, MINUTE)]
    assert min(begins) == pytest.approx(100.0) and max(begins) > 137.0


def test_a_line_is_bounded_and_the_oldest_is_cut(tmp_path: Path) -> None:
    folder, clock = RunFolder.create(tmp_path, "test"), Clock()
    recent = RecentSpans("a-0", clock, clock.wall)
    at_work(folder, recent, clock, 40.0, every=0.001)
    (path,) = files_of(folder)
    assert all(
        len(json.loads(line)["spans"]) <= LINE_SPANS for line in path.read_text().splitlines()
    )
    found = last_spans(folder, 10.0)
    assert found[0].begin_s == pytest.approx(found[-1].end_s - 10.0, abs=0.2)
    assert all(each.begin_s >= found[-1].end_s - 10.0 - 1e-6 for each in found)


def test_torn_lines_and_a_full_disk_harm_nobody(tmp_path: Path) -> None:
    told: list[str] = []
    folder, clock = RunFolder(RunFolder.create(tmp_path, "test").path, Extras(told.append)), Clock()
    at_work(folder, RecentSpans("a-0", clock, clock.wall), clock, 5.0)
    (path,) = files_of(folder)
    before = last_spans(folder, MINUTE)
    with path.open("a") as file:
        file.write('{"process": "a-0", "wall": 1.0, "spans": [["a"')
    (folder.logs / "b-0.recent-0.jsonl").write_text(
        '[1]\n{"process": 1}\n\x00\n{"process": "b", "wall": "x"}\n'
    )
    assert last_spans(folder, MINUTE) == before
    for number in range(2):
        (folder.logs / f"c-0.recent-{number}.jsonl").mkdir()
    at_work(folder, RecentSpans("c-0", clock, clock.wall), clock, 8.0)
    assert len(told) == 1 and "c-0.recent" in told[0]
