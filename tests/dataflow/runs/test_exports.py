"""`dataflow export`: all rows, or none; a folder that `datasets` reads; pairs of the best and the
worst.
"""

import errno
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from runs_made import GROUP, PROMPTS, STEPS

from dataflow import Run, cli
from dataflow.errors import RunError
from dataflow.folder.run_folder import RunFolder
from dataflow.runs.export import ExportShards, Pairing, chosen_and_rejected, export
from dataflow.system.files import RunFolderError


def test_every_row_comes_out_as_it_is(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "data"
    assert cli.export_run(made, to="parquet", out=out) == 0
    assert f"wrote {out}: {STEPS * PROMPTS * GROUP} rows trained" in capsys.readouterr().out
    assert sorted(path.name for path in out.iterdir() if "untrained" not in path.name) == [
        "trained-00000.parquet"
    ]
    assert pq.read_table(out / "trained-00000.parquet").equals(Run(made).rollouts())
    with pytest.raises(
        RunError,
        match=r"is there already, and nothing is written over; name another place with --out",
    ):
        cli.export_run(made, to="parquet", out=out)


def test_large_runs_go_out_in_bounded_pieces(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dataflow.runs.export.GROUP_BYTES", 2_000)
    held: list[int] = []
    write = pq.ParquetWriter.write_table
    monkeypatch.setattr(
        pq.ParquetWriter,
        "write_table",
        lambda self, table: (held.append(table.nbytes), write(self, table))[1],
    )
    shard = ExportShards(
        tmp_path / "small", "trained", Run(made).rollouts().schema, shard_bytes=20_000
    )
    shard.write(Run(made).rollout_batches())
    shard.close()
    assert max(held) < 10_000 < sum(held)
    files = sorted((tmp_path / "small").iterdir())
    assert len(files) > 1
    assert pa.concat_tables([pq.read_table(path) for path in files]).equals(Run(made).rollouts())


def test_a_dataset_for_hugging_face_has_a_card_that_names_its_files(
    made: Path, tmp_path: Path
) -> None:
    out = tmp_path / "data"
    export(RunFolder.open(made), "hf", out)
    text = (out / "README.md").read_text()
    head = text.split("---\n")[1]
    splits = dict(re.findall(r'- split: (\w+)\n    path: "(data/\w+-\*\.parquet)"', head))
    assert "trained" in splits
    for split, pattern in splits.items():
        assert list(out.glob(pattern)), split
    columns = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    assert columns == set(pq.read_table(next(out.glob("data/trained-*.parquet"))).column_names)


def test_datasets_reads_it(made: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="the extra 'hub' is not installed")
    out = tmp_path / "data"
    export(RunFolder.open(made), "hf", out)
    found = datasets.load_dataset(str(out), cache_dir=str(tmp_path / "cache"))
    assert found["trained"].num_rows == STEPS * PROMPTS * GROUP


def test_pairs_are_the_best_and_the_worst_of_each_group_and_what_gives_none_is_counted(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "pairs"
    # The fakes of a group all say the same, so that no reward makes a pair of them.
    with pytest.raises(
        RunError,
        match=r"no group gave a pair; left out: 12 groups without signal .*, 36 groups whose",
    ):
        cli.export_run(made, to="parquet", out=out, pairs=True)
    assert not out.exists()
    assert not list(tmp_path.iterdir()), "nothing is left of it"
    with pytest.raises(
        RunError, match=r"'quality' is none; give --by one of \[.*'length'.*'reward'"
    ):
        cli.export_run(made, to="parquet", out=out, pairs=True, by="quality")


def row(
    group: int, position: int, value: float | None, error: str | None = None
) -> dict[str, object]:
    return {
        "prompt": f"p{group}",
        "prompt_id": str(group),
        "completion": f"c{group}.{position}",
        "group_id": group,
        "rollout_id": group * 4 + position,
        "position": position,
        "error": error,
        "reward": value,
        "step": 1,
        "source": "prompts",
    }


def test_a_pair_needs_two_scored_rollouts_that_differ_in_reward_and_text() -> None:
    rows = [row(0, 0, 0.0), row(0, 1, 1.0), row(0, 2, 1.0)]
    best, worst = chosen_and_rejected(rows, "reward")
    assert (best["position"], worst["position"]) == (1, 0)
    assert chosen_and_rejected([row(0, 0, 1.0), row(0, 1, 1.0)], "reward") == "alike"
    assert (
        chosen_and_rejected([row(0, 0, 1.0), row(0, 1, None), row(0, 2, 0.0, "boom")], "reward")
        == "lonely"
    )
    assert chosen_and_rejected([row(0, 0, 1.0), row(0, 1, float("nan"))], "reward") == "lonely"
    assert (
        chosen_and_rejected([row(0, 0, 1.0), {**row(0, 1, 0.0), "completion": "c0.0"}], "reward")
        == "same_text"
    )


def test_a_group_that_two_batches_share_is_one_group() -> None:
    rows = [
        row(0, 0, 0.0),
        row(0, 1, 1.0),
        row(1, 0, 0.5),
        row(1, 1, 0.5),
        row(2, 0, 1.0),
        row(2, 1, 0.0),
    ]
    pairing = Pairing("reward")
    batches = [
        pa.RecordBatch.from_pylist(rows[:1]),
        pa.RecordBatch.from_pylist(rows[1:3]),
        pa.RecordBatch.from_pylist(rows[3:]),
    ]
    found = pa.Table.from_batches(pairing.of(batches)).to_pylist()
    assert [(pair["chosen"], pair["rejected"], pair["chosen_reward"]) for pair in found] == [
        ("c0.1", "c0.0", 1.0),
        ("c2.0", "c2.1", 1.0),
    ]
    assert (pairing.left.pairs, pairing.left.alike) == (2, 1)


def test_a_full_disk_is_one_sentence_and_leaves_nothing(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = pq.ParquetWriter.write_table

    def full(self: pq.ParquetWriter, table: pa.Table) -> None:
        write(self, table)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(pq.ParquetWriter, "write_table", full)
    with pytest.raises(
        RunFolderError, match=r"No space left on device; make room .*\), or name another place"
    ):
        export(RunFolder.open(made), "hf", tmp_path / "data")
    assert not list(tmp_path.iterdir())


def test_files_that_may_not_be_so_large_are_one_sentence_and_leave_nothing(
    made: Path, tmp_path: Path
) -> None:
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, hard))
    try:
        with pytest.raises(RunFolderError, match="File too large; raise the limit on file sizes"):
            export(RunFolder.open(made), "parquet", tmp_path / "data")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_kill_leaves_no_half_written_dataset(made: Path, tmp_path: Path) -> None:
    """Killed at moments all over the export; what is at its place is whole or not there."""
    out = tmp_path / "data"
    program = (
        "import sys, time; from pathlib import Path; from dataflow.runs import export;from"
        " dataflow.folder.run_folder import RunFolder; export.GROUP_BYTES = 1000;flush ="
        " export.ExportShards._flush;export.ExportShards._flush = lambda self: (flush(self),"
        " print(flush=True), time.sleep(0.02))[0];export.export(RunFolder.open(sys.argv[1]), 'hf',"
        " Path(sys.argv[2]))"
    )
    for after in (1, 4, 9):
        with subprocess.Popen(
            [sys.executable, "-c", program, str(made), str(out)], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            for _ in range(after):
                process.stdout.readline()
            process.kill()
        assert not out.exists()
    export(RunFolder.open(made), "hf", out)
    assert pq.read_table(out / "data" / "trained-00000.parquet").equals(Run(made).rollouts())


def test_what_no_dataset_is_made_of_is_refused(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "empty")
    with pytest.raises(
        RunError, match="has nothing to export: no rollouts; .*the ledger was not asked"
    ):
        export(folder, "parquet", tmp_path / "data")
    with pytest.raises(RunError, match="a run is exported to parquet or hf, but got 'csv'"):
        export(folder, "csv", tmp_path / "data")
    assert not (tmp_path / "data").exists()
