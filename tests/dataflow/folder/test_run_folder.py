"""The run folder: files that are whole or not there, and errors that say what the disk said."""

import contextlib
import errno
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from dataflow.folder.arrow_reading import arrow_schema, read_arrow, stream_arrow
from dataflow.folder.run_folder import RunFolder
from dataflow.system.files import RunFolderError, append_line, to_json, write_atomically


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "runs", "sorting", now=0)


def table(*groups: int) -> pa.Table:
    return pa.table({"group_id": list(groups), "versions": [[-1, 0, 1]] * len(groups)})


def test_each_run_gets_a_folder_of_its_own_and_latest_points_to_the_newest(tmp_path: Path) -> None:
    runs = [RunFolder.create(tmp_path / "runs", "my graph/é", now=0) for _ in range(3)]
    names = [run.path.name for run in runs]
    assert names[0].startswith("my-graph-")
    assert names[1:] == [f"{names[0]}-2", f"{names[0]}-3"]
    assert RunFolder.open(tmp_path / "runs" / "latest") == RunFolder(runs[2].path.resolve())


def test_the_layout_is_that_of_the_design(folder: RunFolder) -> None:
    below = {
        name: str(path.relative_to(folder.path))
        for name, path in {
            "graph": folder.graph_json,
            "svg": folder.graph_svg,
            "config": folder.config,
            "log": folder.log("a", 1),
            "metrics": folder.metrics,
            "ledger": folder.ledger,
            "trace": folder.trace,
            "step": folder.rollouts_of().step_file(1),
            "eval": folder.rollouts_of().evaluation_file(100),
            "critic": folder.rollouts_of("critic").step_file(1),
            "checkpoint": folder.checkpoints.folder(100),
        }.items()
    }
    assert below == {
        "graph": "graph.json",
        "svg": "graph.svg",
        "config": "config.json",
        "log": "logs/a-1.log",
        "metrics": "metrics.jsonl",
        "ledger": "ledger.db",
        "trace": "trace.json",
        "step": "rollouts/step-000001.arrow",
        "eval": "rollouts/eval-000100.arrow",
        "critic": "rollouts/critic/step-000001.arrow",
        "checkpoint": "checkpoints/step-000100",
    }
    assert folder.logs.is_dir() and folder.rollouts.is_dir() and folder.checkpoints.path.is_dir()


def test_no_folder_and_no_file_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(
        RunFolderError, match="nothing is there; give the folder that the run printed"
    ):
        RunFolder.open(tmp_path / "absent")
    (tmp_path / "file").touch()
    with pytest.raises(RunFolderError, match="that is a file"):
        RunFolder.open(tmp_path / "file")
    with pytest.raises(
        RunFolderError, match=r"creating the run folder .* failed: .*; move away what stands there"
    ):
        RunFolder.create(tmp_path / "file", "g")


@dataclass(frozen=True)
class Knobs:
    rate: float
    path: Path


def test_json_is_strict_and_takes_what_metrics_and_configs_hold() -> None:
    value = {
        "nan": math.nan,
        "infinite": np.float32(np.inf),
        "number": np.int64(3),
        "flag": np.bool_(True),
        "none": None,
        "array": np.array([[1.0, math.nan]]),
        7: (1, 2),
        "set": {"b", "a"},
        "knobs": Knobs(0.5, Path("x/y")),
    }
    assert json.loads(to_json(value)) == {
        "nan": None,
        "infinite": None,
        "number": 3,
        "flag": True,
        "none": None,
        "array": [[1.0, None]],
        "7": [1, 2],
        "set": ["a", "b"],
        "knobs": {"rate": 0.5, "path": "x/y"},
    }
    with pytest.raises(TypeError, match="a object cannot stand in JSON"):
        to_json({"x": object()})


def test_json_files_come_back_and_bad_ones_count_as_missing_and_are_named(
    folder: RunFolder, caplog: pytest.LogCaptureFixture
) -> None:
    folder.write_json("config.json", {"max_staleness": {"trainer": 4}})
    assert folder.read_json("config.json") == {"max_staleness": {"trainer": 4}}
    folder.config.write_text("{")
    assert folder.read_json("config.json") == {} and "config.json' is not JSON" in caplog.text
    caplog.clear()
    assert folder.read_json("absent.json") == {} and not caplog.text


def test_metrics_survive_a_line_that_a_crash_tore(folder: RunFolder) -> None:
    assert folder.read_metrics() == []
    folder.append_metrics({"step": 1, "loss": math.nan})
    with folder.metrics.open("a") as file:
        file.write('{"step": 2, "lo')
    assert folder.scan_metrics() == ([{"step": 1, "loss": None}], 1)
    folder.append_metrics({"step": 3})
    assert folder.read_metrics() == [{"step": 1, "loss": None}, {"step": 3}]
    assert folder.scan_metrics()[1] == 1


def test_a_line_is_appended_in_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[bytes] = []
    real = os.write
    monkeypatch.setattr(
        os, "write", lambda handle, content: (writes.append(content), real(handle, content))[1]
    )
    append_line(tmp_path / "lines", '{"a": 1}')
    assert writes == [b'{"a": 1}\n']


def test_a_full_disk_is_named_with_what_is_free(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(
        RunFolderError, match=r"No space left on device; make room on that disk \(.* MiB are free\)"
    ):
        append_line(tmp_path / "metrics.jsonl", "{}")


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "make room"),
        (errno.EACCES, "write permission"),
        (errno.EROFS, "read-only"),
        (errno.EIO, "disk"),
    ],
)
def test_a_failed_write_leaves_the_old_file_and_says_why(
    tmp_path: Path, number: int, advice: str
) -> None:
    path = tmp_path / "state.json"
    path.write_text("old")

    def fail(file: object) -> None:
        file.write(b"half")
        raise OSError(number, os.strerror(number))

    with pytest.raises(RunFolderError, match=f"{os.strerror(number)}; .*{advice}"):
        write_atomically(path, fail)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_rollouts_come_back_as_they_were_written(folder: RunFolder) -> None:
    whole = table(0, 0, 1)
    folder.rollouts_of().write(1, whole)
    folder.rollouts_of().write(2, whole.to_batches()[0].slice(1, 2))
    folder.rollouts_of().write(3, [*table(4).to_batches(), *table(5, 6).to_batches()])
    folder.rollouts_of("held_out").write_evaluation(10, whole)
    assert folder.rollouts_of().read(1) == whole
    assert folder.rollouts_of().read(2) == whole.slice(1)
    assert folder.rollouts_of().read(3) == table(4, 5, 6)
    assert folder.rollouts_of("held_out").read_evaluation(10) == whole
    with pytest.raises(RunFolderError, match=r"step-000009\.arrow' failed: .*No such file"):
        folder.rollouts_of().read(9)


def test_rows_stay_readable_when_their_file_is_replaced(folder: RunFolder) -> None:
    folder.rollouts_of().write(1, table(0))
    old = folder.rollouts_of().read(1)
    folder.rollouts_of().write(1, table(1, 2))
    assert old == table(0)
    assert folder.rollouts_of().read(1) == table(1, 2)


def test_rollouts_wait_for_the_disk_only_where_a_checkpoint_asks(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[str] = []
    monkeypatch.setattr(
        os, "fsync", lambda handle: flushed.append(Path(f"/proc/self/fd/{handle}").readlink().name)
    )
    folder.rollouts_of().write(1, table(0))
    folder.rollouts_of().write(2, table(1))
    assert flushed == []
    folder.rollouts_of().flush([1, 2])
    assert flushed == ["step-000001.arrow", "step-000002.arrow", "rollouts"]
    with pytest.raises(RunFolderError, match=r"flushing .*rollouts' failed: No such file"):
        folder.rollouts_of().flush([3])


def test_rows_that_make_no_table_are_refused(folder: RunFolder) -> None:
    for rows in ([], [*table(0).to_batches(), *pa.table({"other": [1]}).to_batches()]):
        with pytest.raises(RunFolderError, match="do not make one table"):
            folder.rollouts_of().write(1, rows)
    assert list(folder.rollouts.iterdir()) == []


@pytest.mark.parametrize("keep", [0, 1, 50, -1])
def test_a_truncated_arrow_file_is_an_error_not_a_crash(folder: RunFolder, keep: int) -> None:
    path = folder.rollouts_of().write(1, table(*range(100)))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(RunFolderError, match=r"is not a whole Arrow file|reading"):
        read_arrow(path)


def test_offsets_that_lead_out_of_the_file_are_an_error_not_a_crash(folder: RunFolder) -> None:
    path = folder.rollouts_of().write(1, table(*range(100)))
    content = path.read_bytes()
    offsets = np.arange(0, 303, 3, dtype=np.int32).tobytes()
    assert content.count(offsets) == 1
    path.write_bytes(content.replace(offsets, (np.frombuffer(offsets, np.int32) * 10**6).tobytes()))
    with pytest.raises(RunFolderError, match="is not a whole Arrow file"):
        read_arrow(path)


def test_a_folder_named_latest_is_never_overwritten_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "latest").mkdir()
    assert RunFolder.create(tmp_path, "g").path.is_dir()
    assert (tmp_path / "latest").is_dir() and not (tmp_path / "latest").is_symlink()
    assert (
        "latest' failed: Is a directory; move that folder away; the run goes on without it"
        in caplog.text
    )


def test_a_rollouts_file_of_which_a_bit_has_changed_is_read_by_nobody(folder: RunFolder) -> None:
    path = folder.rollouts_of().write(1, table(*range(8)))
    content = path.read_bytes()
    for at in range(0, len(content), 67):
        path.write_bytes(content[:at] + bytes([content[at] ^ 16]) + content[at + 1 :])
        for read in (read_arrow, lambda path: list(stream_arrow(path))):
            with pytest.raises(RunFolderError, match="was damaged after it was written"):
                read(path)
        with contextlib.suppress(RunFolderError):
            arrow_schema(path)
