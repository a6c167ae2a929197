"""Rollouts that are finished and not trained outlive the process that made them."""

from pathlib import Path

import pyarrow as pa
import pytest

from dataflow.folder.finished import File, Finished
from dataflow.system.files import RunFolderError


def rows(*groups: int, text: str = "x") -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        [pa.array(groups, pa.int64()), pa.array([f"{text}{group}" for group in groups])],
        names=["group_id", "completion"],
    )


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*"))


def later(folder: Path, waited_for: list[int], attempt: int = 1, replica: int = 0) -> Finished:
    made = Finished(folder, "prompts", replica=replica, attempt=attempt)
    made.load(waited_for)
    return made


def test_what_one_process_finished_the_next_one_finds(tmp_path: Path) -> None:
    first = Finished(tmp_path, "prompts")
    first.append(rows(0, 0, 3, 3))
    first.append(rows(1, 1))
    second = later(tmp_path, [0, 1, 2])
    assert second.find(0) == rows(0, 0) and second.find(1) == rows(1, 1)
    assert second.find(2) is None
    assert second.find(3) is None, "it has an outcome"


def test_a_torn_end_takes_nothing_that_stood_before_it(tmp_path: Path) -> None:
    first = Finished(tmp_path, "prompts")
    sizes = []
    for group in range(4):
        first.append(rows(group, group, text="word " * 50))
        sizes.append(next(tmp_path.iterdir()).stat().st_size)
    path = next(tmp_path.iterdir())
    whole = path.read_bytes()
    for size in range(0, len(whole) + 1, 7):
        path.write_bytes(whole[:size])
        found = later(tmp_path, [0, 1, 2, 3])
        kept = [group for group in range(4) if found.find(group) is not None]
        assert kept == [group for group in range(4) if sizes[group] <= size]
        path.parent.mkdir(exist_ok=True)


def test_a_file_goes_when_all_its_groups_have_an_outcome(tmp_path: Path) -> None:
    first = Finished(tmp_path, "prompts", file_bytes=1)
    first.append(rows(0, 1))
    first.append(rows(2))
    assert len(files(tmp_path)) == 2
    first.forget(0)
    assert len(files(tmp_path)) == 2
    first.forget(1)
    assert len(files(tmp_path)) == 1
    second = later(tmp_path, [2])
    second.forget(2)
    assert files(tmp_path) == []


def test_files_in_which_nobody_waits_for_anything_go_at_the_next_start_but_not_another_replica_s(
    tmp_path: Path,
) -> None:
    for replica in (0, 1):
        Finished(tmp_path, "prompts", replica=replica).append(rows(replica))
    later(tmp_path, [])
    assert files(tmp_path) == ["1-0-0.prompts.arrows"]


def test_a_replica_finds_what_another_one_finished_and_sources_are_told_apart(
    tmp_path: Path,
) -> None:
    Finished(tmp_path, "prompts", replica=1).append(rows(5))
    Finished(tmp_path, "other", replica=0).append(rows(5, 5))
    assert later(tmp_path, [5], attempt=0).find(5) == rows(5)


def test_a_process_that_ends_leaves_no_empty_file(tmp_path: Path) -> None:
    first = Finished(tmp_path, "prompts")
    first.append(rows(0))
    first.forget(0)
    first.close()
    assert files(tmp_path) == []


def test_a_disk_that_refuses_is_named(tmp_path: Path) -> None:
    (tmp_path / "generator").write_text("a file where a folder should be")
    with pytest.raises(RunFolderError, match="generator"):
        Finished(tmp_path / "generator", "prompts").append(rows(0))


def test_what_others_finished_is_looked_through_when_the_first_group_is_asked_for(
    tmp_path: Path,
) -> None:
    """A trainer may go back while the others start."""
    asked: list[str] = []
    waited_for = [0]

    def ask() -> list[int]:
        asked.append("once")
        return waited_for

    second = Finished(tmp_path, "prompts", attempt=1, waited_for=ask)
    Finished(tmp_path, "prompts").append(rows(0, 1))
    waited_for.append(1)
    assert asked == [] and second.find(1) == rows(1) and second.find(0) == rows(0)
    assert asked == ["once"]


def test_no_group_is_found_of_which_a_bit_has_changed(tmp_path: Path) -> None:
    first = Finished(tmp_path, "prompts")
    for group in range(4):
        first.append(rows(group, group, text="a text that is long enough"))
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    whole = list(File(path).read())
    for at in range(0, len(content), 61):
        path.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
        file = File(path)
        left = list(file.read())
        assert left == whole[: len(left)], at
        assert len(left) >= 3 or file.damage, at
