"""What a scheduler leaves for its successor: the newest, whole, written when something changed."""

from pathlib import Path

import pytest

from dataflow.errors import RunError
from dataflow.folder.snapshot import FILE, Snapshot, read
from dataflow.system.files import RunFolderError


def test_the_newest_is_read_whole_and_only_what_changed_is_written(tmp_path: Path) -> None:
    found: dict[str, object] = {"step": 1}
    snapshot = Snapshot(tmp_path, {"table": lambda: found, "begun": lambda: [1.5, None]})
    snapshot.write()
    first = (tmp_path / FILE.format(0)).stat().st_ino
    snapshot.write()
    assert (tmp_path / FILE.format(0)).stat().st_ino == first
    found["step"] = 2
    snapshot.write()
    assert (tmp_path / FILE.format(0)).stat().st_ino != first
    assert read(tmp_path) == {"table": {"step": 2}, "begun": [1.5, None]}
    assert [path.name for path in tmp_path.iterdir()] == [FILE.format(0)]


def test_a_folder_that_is_gone_is_told_once_for_each_change(tmp_path: Path) -> None:
    found = {"step": 1}
    snapshot = Snapshot(tmp_path / "gone", {"table": lambda: found})
    for _ in range(2):
        with pytest.raises(RunFolderError):
            snapshot.write()
        snapshot.write()
        found["step"] += 1


@pytest.mark.parametrize("content", [None, b"", b'{"table": '])
def test_what_is_no_whole_snapshot_is_refused(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / FILE.format(0)).write_bytes(content)
    with pytest.raises(RunError, match="left nothing to go on with"):
        read(tmp_path)
