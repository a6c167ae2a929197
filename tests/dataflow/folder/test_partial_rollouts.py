"""What unfinished rollouts have drawn outlives the process that drew it, and is never joined with
what another drew.
"""

from pathlib import Path

import numpy as np
import pytest

from dataflow.folder.finished import PartialRolloutFiles
from dataflow.folder.partial_rollouts import PartialRollout, PartialRow
from dataflow.system.files import RunFolderError
from dataflow.tokens.rollout_tokens import KINDS, RolloutTokens, SamplingMask


def stretch(
    begin: int, count: int, version: int = 0, masks: bool = False, **ended: str
) -> PartialRollout:
    places = np.arange(begin, begin + count, dtype=np.int32)
    left = SamplingMask.of([places[: i % 3] for i in range(count)]) if masks else None
    tokens = RolloutTokens.drawn(places + 100 * version, -places, np.full(count, version), left)
    return PartialRollout(begin=begin, tokens=tokens, **ended)


def piece(group: int, position: int, begin: int, count: int, **more: object) -> PartialRow:
    return PartialRow(group, position, 7, stretch(begin, count, **more))  # type: ignore[arg-type]


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*"))


def later(
    folder: Path, waited_for: list[int], attempt: int = 1, replica: int = 0
) -> PartialRolloutFiles:
    made = PartialRolloutFiles(folder, "prompts", replica=replica, attempt=attempt)
    made.load(waited_for)
    return made


def tokens(parts: PartialRolloutFiles, group: int) -> dict[int, list[int]]:
    """By position, of the longest line."""
    return {each.position: each.rollout.tokens.ids.tolist() for each in reversed(parts.find(group))}


def test_stretches_are_joined_again_with_all_that_is_known_of_them(tmp_path: Path) -> None:
    first = PartialRolloutFiles(tmp_path, "prompts")
    first.append(
        [
            piece(0, 0, 0, 5, masks=True),
            piece(0, 1, 0, 6, masks=True),
            piece(3, 0, 0, 2, masks=True),
        ]
    )
    first.append(
        [
            piece(0, 0, 5, 4, masks=True, finish_reason="stop", text="hi"),
            piece(1, 0, 0, 1, masks=True),
        ]
    )
    second = later(tmp_path, [0, 1, 2])
    whole, other = second.find(0)
    assert (whole.group, whole.position, whole.mark) == (0, 0, 7) and other.position == 1
    found, expected = whole.rollout, stretch(0, 9)
    for name, kind in KINDS.items():
        np.testing.assert_array_equal(getattr(found.tokens, name), getattr(expected.tokens, name))
        assert getattr(found.tokens, name).dtype == kind
    assert [mask.tolist() for mask in found.tokens.sampling_mask.lists()] == [
        mask.tolist()
        for part in (stretch(0, 5, masks=True), stretch(5, 4, masks=True))
        for mask in part.tokens.sampling_mask.lists()
    ]
    assert (found.begin, found.finish_reason, found.text) == (0, "stop", "hi")
    assert other.rollout.finish_reason is None and other.rollout.text is None
    assert len(second.find(1)) == 1 and second.find(2) == []
    assert second.find(3) == [], "it has an outcome"


def test_the_end_of_a_rollout_is_kept_where_its_tokens_were_before(tmp_path: Path) -> None:
    first = PartialRolloutFiles(tmp_path, "prompts")
    first.append([piece(0, 0, 0, 5)])
    first.append([piece(0, 0, 5, 0, finish_reason="length")])
    (found,) = later(tmp_path, [0]).find(0)
    assert (
        found.rollout.tokens.ids.tolist() == [0, 1, 2, 3, 4]
        and found.rollout.finish_reason == "length"
    )


def test_a_torn_end_takes_no_stretch_that_stood_before_it(tmp_path: Path) -> None:
    first = PartialRolloutFiles(tmp_path, "prompts")
    sizes = []
    for begin in (0, 40, 80):
        first.append([piece(0, 0, begin, 40)])
        sizes.append(next(tmp_path.iterdir()).stat().st_size)
    path = next(tmp_path.iterdir())
    whole = path.read_bytes()
    for size in range(0, len(whole) + 1, 37):
        path.write_bytes(whole[:size])
        kept = 40 * sum(end <= size for end in sizes)
        assert tokens(later(tmp_path, [0]), 0) == ({0: list(range(kept))} if kept else {})
        assert path.exists() == bool(kept)


def test_a_stretch_is_passed_over_when_what_was_before_it_is_lost(tmp_path: Path) -> None:
    first = PartialRolloutFiles(tmp_path, "prompts", file_bytes=1)
    for begin in (0, 4, 8):
        first.append([piece(0, 0, begin, 4)])
    (tmp_path / "0-0-1.prompts.parts").unlink()
    assert tokens(later(tmp_path, [0]), 0) == {0: [0, 1, 2, 3]}


def test_a_line_goes_through_any_number_of_files_in_the_order_in_which_they_were_written(
    tmp_path: Path,
) -> None:
    first = PartialRolloutFiles(tmp_path, "prompts", file_bytes=1)
    for begin in range(0, 24, 2):
        first.append([piece(0, 0, begin, 2)])
    assert len(files(tmp_path)) == 12
    second = later(tmp_path, [0])
    assert tokens(second, 0) == {0: list(range(24))}
    second.forget(0)
    assert files(tmp_path) == []


def test_lines_of_several_processes_are_not_joined_and_the_longest_comes_first(
    tmp_path: Path,
) -> None:
    PartialRolloutFiles(tmp_path, "prompts", replica=0).append([piece(5, 0, 0, 4, version=1)])
    other = PartialRolloutFiles(tmp_path, "prompts", replica=1)
    other.append([piece(5, 0, 0, 4, version=2)])
    other.append([piece(5, 0, 4, 1, version=2)])
    PartialRolloutFiles(tmp_path, "other").append([piece(5, 0, 0, 50)])
    found = later(tmp_path, [5], replica=2).find(5)
    assert [each.rollout.tokens.ids.tolist() for each in found] == [
        [200, 201, 202, 203, 204],
        [100, 101, 102, 103],
    ]


def test_a_rollout_that_begins_anew_is_a_new_one(tmp_path: Path) -> None:
    first = PartialRolloutFiles(tmp_path, "prompts")
    first.append([piece(0, 0, 0, 9, version=1)])
    first.append([piece(0, 0, 0, 3, version=2)])
    assert tokens(later(tmp_path, [0]), 0) == {0: [200, 201, 202]}


def test_a_process_of_the_same_name_in_a_run_that_goes_on_overwrites_nothing(
    tmp_path: Path,
) -> None:
    PartialRolloutFiles(tmp_path, "prompts").append([piece(0, 0, 0, 4)])
    again = PartialRolloutFiles(tmp_path, "prompts")
    again.load([0])
    again.append([piece(0, 0, 0, 2, version=1)])
    assert files(tmp_path) == ["0-0-0.prompts.parts", "0-0-1.prompts.parts"]
    assert [len(each.rollout.tokens) for each in later(tmp_path, [0]).find(0)] == [4, 2]


def test_files_go_when_all_their_groups_have_an_outcome_but_not_those_that_another_replica_writes(
    tmp_path: Path,
) -> None:
    first = PartialRolloutFiles(tmp_path, "prompts", file_bytes=1)
    first.append([piece(0, 0, 0, 1), piece(1, 0, 0, 1)])
    first.append([piece(0, 0, 1, 1)])
    writing = PartialRolloutFiles(tmp_path, "prompts", replica=1)
    writing.append([piece(2, 0, 0, 1)])
    first.forget(1)
    assert len(files(tmp_path)) == 3
    first.forget(0)
    assert files(tmp_path) == ["1-0-0.prompts.parts"]
    stranger = later(tmp_path, [2])
    stranger.forget(2)
    later(tmp_path, [])
    assert files(tmp_path) == ["1-0-0.prompts.parts"]
    writing.forget(2)
    writing.close()
    assert files(tmp_path) == []


def test_a_disk_that_refuses_parts_is_named(tmp_path: Path) -> None:
    (tmp_path / "generator").write_text("a file where a folder should be")
    with pytest.raises(RunFolderError, match="generator"):
        PartialRolloutFiles(tmp_path / "generator", "prompts").append([piece(0, 0, 0, 1)])


def test_what_others_drew_is_looked_through_when_the_first_group_is_asked_for(
    tmp_path: Path,
) -> None:
    """A trainer may go back while the others start."""
    later = PartialRolloutFiles(tmp_path, "prompts", attempt=1, waited_for=lambda: [0])
    PartialRolloutFiles(tmp_path, "prompts").append([piece(0, 0, 0, 4), piece(1, 0, 0, 4)])
    assert tokens(later, 0) == {0: [0, 1, 2, 3]} and later.find(1) == []
