"""What weights drew that a run has gone back behind is found by nobody any more, and nothing else
is lost.
"""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from dataflow.folder.finished import Finished, PartialRolloutFiles, take_out_abandoned
from dataflow.folder.partial_rollouts import PartialRollout, PartialRow
from dataflow.staleness import newest_versions
from dataflow.system.files import RunFolderError
from dataflow.tokens.rollout_tokens import RolloutTokens

EARLIER = "0-part1-0-0.prompts"


def rows(*versions: list[int], groups: list[int]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        [pa.array(groups, pa.int64()), pa.array(versions, pa.list_(pa.int32()))],
        names=["group_id", "versions"],
    )


def of_an_ended_part(folder: Path) -> None:
    """Name files as a run does that is taken up."""
    for path in folder.iterdir():
        path.replace(path.with_name(path.name.replace("0-0-0", "0-part1-0-0")))


def finished(folder: Path, *batches: pa.RecordBatch) -> None:
    kept = Finished(folder, "prompts")
    for batch in batches:
        kept.append(batch)
    kept.close()
    of_an_ended_part(folder)


def found(folder: Path, groups: range) -> dict[int, pa.RecordBatch]:
    kept = Finished(folder, "prompts")
    kept.load(groups)
    return {group: batch for group in groups if (batch := kept.find(group)) is not None}


def stretch(begin: int, version: int, count: int = 3) -> PartialRollout:
    places = np.arange(begin, begin + count, dtype=np.int32)
    return PartialRollout(
        begin=begin, tokens=RolloutTokens.drawn(places, places, np.full(count, version))
    )


def test_finished_groups_with_a_token_of_weights_that_are_gone_are_found_no_more(
    tmp_path: Path,
) -> None:
    whole = rows([-1, 2, 3], [-1, 3], groups=[2, 2])
    finished(
        tmp_path / "generator",
        pa.concat_batches([rows([-1, 3], [-1, 4], groups=[0, 0]), whole]),
        rows([5], [], groups=[1, 3]),
    )
    assert take_out_abandoned(tmp_path, "prompts", 3) == 3
    left = found(tmp_path / "generator", range(4))
    assert sorted(left) == [2, 3] and left[2] == whole
    assert take_out_abandoned(tmp_path, "prompts", 3) == 0


def test_files_without_such_a_token_stay_as_they_are_and_those_with_nothing_else_go(
    tmp_path: Path,
) -> None:
    finished(tmp_path / "one", rows([1, 2], groups=[0]))
    finished(tmp_path / "other", rows([7], groups=[1]))
    kept = (tmp_path / "one" / f"{EARLIER}.arrows").stat()
    assert take_out_abandoned(tmp_path, "prompts", 2) == 1
    assert (tmp_path / "one" / f"{EARLIER}.arrows").stat() == kept
    assert list((tmp_path / "other").iterdir()) == []


def test_other_sources_and_files_that_may_be_written_to_are_not_touched(tmp_path: Path) -> None:
    finished(tmp_path / "generator", rows([9], groups=[0]))
    writing = Finished(tmp_path / "generator", "prompts", attempt=1)
    writing.append(rows([9], groups=[1]))
    assert take_out_abandoned(tmp_path, "other", 2) == 0
    assert take_out_abandoned(tmp_path, "prompts", 2) == 1
    assert sorted(found(tmp_path / "generator", range(2))) == [1]


def test_an_unfinished_rollout_keeps_what_weights_drew_that_are_still_there(tmp_path: Path) -> None:
    parts = PartialRolloutFiles(tmp_path / "generator", "prompts")
    parts.append([PartialRow(0, 0, 7, stretch(0, 3)), PartialRow(0, 1, 7, stretch(0, 4))])
    parts.append([PartialRow(0, 0, 7, stretch(3, 4)), PartialRow(0, 1, 7, stretch(3, 4))])
    parts.close()
    of_an_ended_part(tmp_path / "generator")
    assert take_out_abandoned(tmp_path, "prompts", 3) == 3
    later = PartialRolloutFiles(tmp_path / "generator", "prompts")
    later.load([0])
    (left,) = later.find(0)
    assert (left.position, left.rollout.tokens.ids.tolist()) == (0, [0, 1, 2])


def test_a_disk_that_refuses_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished(tmp_path / "generator", rows([1], groups=[0]), rows([5], groups=[1]))

    def full(*given: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        with pytest.raises(RunFolderError, match="space left"):
            take_out_abandoned(tmp_path, "prompts", 3)
    assert sorted(found(tmp_path / "generator", range(2))) == [0, 1]


def test_the_newest_version_of_a_rollout_is_that_of_its_latest_token() -> None:
    column = pa.array([[9], [-1, 3, 4], [], [-1, -1], [2, 2]], pa.list_(pa.int32()))
    assert newest_versions(column).tolist() == [9, 4, -1, -1, 2]
    assert newest_versions(column.slice(1, 2)).tolist() == [4, -1]
    assert newest_versions(pa.array([], pa.list_(pa.int32()))).tolist() == []
