"""Checkpoints: only a committed, undamaged one is chosen, and no failed write loses a good one."""

import errno
import json
import os
from pathlib import Path

import pytest

from dataflow.folder import checkpoints
from dataflow.folder.checkpoints import MARKER, Checkpoints
from dataflow.system.files import RunFolderError


@pytest.fixture
def saved(tmp_path: Path) -> Checkpoints:
    made = Checkpoints(tmp_path / "checkpoints")
    for step in (100, 200):
        save(made, step, f"weights of {step}")
    return made


def save(made: Checkpoints, step: int, content: str) -> None:
    with made.writing(step, version=step) as folder:
        (folder / "model.safetensors").write_text(content)
        (folder / "optimiser").mkdir()
        (folder / "optimiser" / "rank-0.safetensors").write_text("moments")


def content(made: Checkpoints, step: int) -> str:
    return (made.folder(step) / "model.safetensors").read_text()


def test_the_newest_committed_checkpoint_is_chosen(saved: Checkpoints) -> None:
    assert saved.latest() == 200
    assert saved.latest(at_most=199) == 100
    assert saved.latest(at_most=99) is None
    assert saved.steps() == [100, 200]
    assert Checkpoints(saved.path / "absent").latest() is None


def test_the_marker_holds_step_facts_and_every_file(saved: Checkpoints) -> None:
    marker = json.loads((saved.folder(100) / MARKER).read_text())
    assert (marker["step"], marker["version"]) == (100, 100)
    assert sorted(marker["files"]) == ["model.safetensors", "optimiser/rank-0.safetensors"]
    assert marker["files"]["model.safetensors"]["bytes"] == len("weights of 100")


@pytest.mark.parametrize(
    ("damage", "fact"),
    [
        (lambda folder: (folder / MARKER).unlink(), "never committed"),
        (lambda folder: (folder / MARKER).write_text("{"), "cannot be read"),
        (lambda folder: (folder / MARKER).write_text("[]"), "cannot be read"),
        (lambda folder: (folder / "model.safetensors").unlink(), "'model.safetensors' is missing"),
        (
            lambda folder: (folder / "model.safetensors").write_text("weights of 20"),
            "is not as it was written",
        ),
        (
            lambda folder: (folder / "model.safetensors").write_text("weights of 201"),
            "is not as it was written",
        ),
        (
            lambda folder: folder.rename(folder.with_name("step-000300")),
            "its marker is of step 200",
        ),
    ],
)
def test_an_unmarked_or_damaged_checkpoint_is_never_chosen(
    saved: Checkpoints, damage: object, fact: str
) -> None:
    damage(saved.folder(200))
    assert saved.latest() == 100
    assert fact in (saved.damage(saved.steps()[-1]) or "")


def test_a_half_written_checkpoint_is_not_seen_and_its_rest_does_not_get_into_the_next(
    saved: Checkpoints,
) -> None:
    (saved.begin(300) / "rest").write_text("half")
    assert saved.latest() == 200
    save(saved, 300, "new")
    assert saved.latest() == 300
    assert not (saved.folder(300) / "rest").exists()


def test_a_failed_save_leaves_the_checkpoint_of_the_same_step_good(
    saved: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(
            RunFolderError,
            match=r"committing checkpoint .* failed: No space left on device; make room",
        ):
            save(saved, 200, "other")
    assert saved.latest() == 200
    assert content(saved, 200) == "weights of 200"
    save(saved, 200, "other")
    assert content(saved, 200) == "other"
    assert sorted(path.name for path in saved.path.iterdir()) == ["step-000100", "step-000200"]


def test_a_crash_at_any_rename_of_a_repeated_save_loses_no_checkpoint(
    saved: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Crash(BaseException):
        pass

    real = Path.replace
    for survived in range(3):
        calls = iter(range(99))

        def replace(
            path: Path, target: Path, calls: object = calls, survived: int = survived
        ) -> Path:
            if next(calls) == survived:
                raise Crash
            return real(path, target)

        folder = saved.begin(200)
        (folder / "model.safetensors").write_text("repeated")
        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", replace)
            with pytest.raises(Crash):
                saved.commit(200)
        assert saved.latest() == 200
        assert content(saved, 200) in ("weights of 200", "repeated")


def test_nothing_is_no_checkpoint(saved: Checkpoints) -> None:
    saved.begin(300)
    with pytest.raises(RunFolderError, match=r"step 300 cannot be committed: .* holds no file"):
        saved.commit(300)


def test_large_files_are_read_in_pieces(
    saved: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "_CHUNK_BYTES", 5)
    assert saved.latest() == 200


# Temporary ones


def save_temporary(made: Checkpoints, step: int) -> None:
    with made.writing(step, temporary=True) as folder:
        (folder / "model.safetensors").write_text(f"weights of {step}")


def test_a_temporary_checkpoint_is_chosen_as_any_other_and_goes_when_a_newer_one_stands(
    saved: Checkpoints,
) -> None:
    for step in (150, 250):
        save_temporary(saved, step)
    assert saved.latest() == 250 and saved.latest(at_most=199) == 150
    saved.clear(before=250)
    assert saved.steps() == [100, 200, 250]
    saved.clear(before=251)
    assert sorted(path.name for path in saved.path.iterdir()) == ["step-000100", "step-000200"]
    Checkpoints(saved.path / "absent").clear(before=9)


def test_a_temporary_checkpoint_that_is_to_stay_stays_undamaged(saved: Checkpoints) -> None:
    save_temporary(saved, 300)
    assert saved.keep(300) and not saved.keep(300) and not saved.keep(200) and not saved.keep(999)
    saved.clear(before=1000)
    assert saved.steps() == [100, 200, 300] and saved.damage(300) is None
    assert json.loads((saved.folder(300) / MARKER).read_text()).keys() == {"step", "files"}


def test_a_checkpoint_whose_marker_cannot_be_read_is_not_taken_for_temporary(
    saved: Checkpoints,
) -> None:
    save_temporary(saved, 150)
    (saved.folder(150) / MARKER).write_text('{"temporary": true')
    saved.clear(before=1000)
    assert saved.steps() == [100, 150, 200]


def test_a_removal_that_a_crash_cut_off_is_ended_by_the_next_and_its_rest_is_never_chosen(
    saved: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_temporary(saved, 300)
    with monkeypatch.context() as patch:
        patch.setattr(
            checkpoints.shutil,
            "rmtree",
            lambda path: (path / "model.safetensors").unlink() or exit(),
        )
        with pytest.raises(SystemExit):
            saved.clear(before=301)
    assert saved.steps() == [100, 200] and saved.latest() == 200
    save_temporary(saved, 300)
    saved.clear(before=301)
    assert sorted(path.name for path in saved.path.iterdir()) == ["step-000100", "step-000200"]


def test_rests_of_writes_that_crashed_go_with_the_next_and_a_marked_one_is_no_rest(
    saved: Checkpoints,
) -> None:
    for step in (110, 120, 900):
        (saved.begin(step) / "model.safetensors").write_text("half")
    (saved.path / ".step-000120.partial" / MARKER).write_text("{}")
    saved.clear(before=300)
    assert sorted(path.name for path in saved.path.glob(".*")) == [
        ".step-000120.partial",
        ".step-000900.partial",
    ]
    assert saved.steps() == [100, 200]
