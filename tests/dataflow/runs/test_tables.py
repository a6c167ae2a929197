"""`Run(...)`: a run's files as Arrow; what a crash left of them; which rollouts count."""

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from runs_made import GROUP, PROMPTS, STEPS

from dataflow import Run
from dataflow.errors import RunError
from dataflow.folder.finished import SealedWriter
from dataflow.folder.ledger import Ledger
from dataflow.folder.run_folder import RunFolder, write_arrow
from dataflow.runs.tables import rollout_batches, rollout_schema, series, table_of
from dataflow.runs.which import Part, parts_of
from dataflow.system.files import RunFolderError


def test_every_trained_rollout_is_a_row_with_its_step_and_its_scores(made: Path) -> None:
    seen = Run(made)
    rows = seen.rollouts()
    assert rows.num_rows == STEPS * PROMPTS * GROUP
    assert pc.all(
        pc.equal(rows.column("step"), pc.add(pc.divide(rows.column("group_id"), PROMPTS), 1))
    ).as_py()
    assert set(rows.column("outcome").to_pylist()) == {"trained"}
    assert set(rows.column("node").to_pylist()) == {"trainer"}
    assert set(rows.column("source").to_pylist()) == {"prompts"}
    assert {
        "prompt",
        "completion",
        "tokens",
        "logprobs",
        "versions",
        "mask",
        "reward",
        "length",
    } <= {*rows.column_names}
    assert rows.column("staleness").to_pylist() == [
        step - 1 for step in rows.column("step").to_pylist()
    ]
    assert rows.column("drop_reason").null_count == rows.num_rows
    some = seen.rollouts(columns=["staleness", "reward"])
    assert some.column_names == ["staleness", "reward"]
    assert some.column("staleness").equals(rows.column("staleness"))
    assert sum(batch.num_rows for batch in seen.rollout_batches(columns=["step"])) == rows.num_rows


def test_a_run_says_how_it_stands_and_has_steps_and_faults(made: Path, tmp_path: Path) -> None:
    seen = Run(made)
    assert (seen.state, seen.name, seen.graph["name"]) == ("finished", made.name, "fakes")
    assert {"python", "packages", "cpus"} <= set(seen.config["environment"])
    assert seen.steps().column("step").to_pylist() == list(range(1, STEPS + 1))
    assert seen.faults().num_rows == seen.evaluations().num_rows == 0
    copy = shutil.copytree(made, tmp_path / "copy")
    (copy / "faults.jsonl").write_text(
        '{"worker": "generator-0", "cause": "was killed", "recovered_s": 1.5}\n{"wor'
    )
    assert Run(copy).faults().to_pylist() == [
        {"worker": "generator-0", "cause": "was killed", "recovered_s": 1.5}
    ]
    for look in (seen.steps, lambda trainer: seen.rollouts(trainer=trainer)):
        assert look("trainer").num_rows
        with pytest.raises(
            RunError,
            match=r"no trainer 'trainr'; name one of \['trainer'\]; did you mean 'trainer'",
        ):
            look("trainr")
    with pytest.raises(RunFolderError, match="no run folder at"):
        Run(tmp_path / "nowhere")


def test_a_notebook_shows_the_curves_and_the_graph_of_a_run(made: Path, tmp_path: Path) -> None:
    copy = RunFolder.open(shutil.copytree(made, tmp_path / "copy"))
    assert "No step was finished" in Run(copy.path)._repr_html_()
    for step in range(1, STEPS + 1):
        copy.append_metrics(
            {"step": step, "node": "trainer", "loss": 1 / step, "reward_mean": step / 9}
        )
    shown = Run(copy.path)._repr_html_()
    assert shown.count("<svg") == 3, "two curves and the graph"
    assert "<title>loss</title>" in shown and "<title>reward, mean of a step</title>" in shown
    assert all(name in shown for name in ("generator", "reward", "trainer", copy.path.name))
    assert "<script" not in shown and "http:" not in shown.replace("http://www.w3.org/", "")


def test_a_step_that_the_ledger_has_not_taken_in_does_not_count(made: Path, tmp_path: Path) -> None:
    folder = RunFolder.open(shutil.copytree(made, tmp_path / "copy"))
    table = folder.rollouts_of().read(STEPS)
    folder.rollouts_of().write(STEPS + 1, table)
    assert [part.step for part in parts_of(folder)[0]] == list(range(1, STEPS + 1))
    with Ledger.open(folder.ledger) as ledger:
        ledger.roll_back_to(STEPS - 2, "trainer")
    assert [part.step for part in parts_of(folder)[0]] == list(range(1, STEPS - 1))
    folder.ledger.write_bytes(b"no database at all, and long enough to be looked at" * 100)
    for beside in folder.path.glob("ledger.db-*"):
        beside.unlink()
    files, notes = parts_of(folder)
    assert len(files) == STEPS + 1
    assert "the ledger was not asked which steps count" in notes[0]


def test_rollouts_that_nobody_trained_are_told_with_the_reason(made: Path, tmp_path: Path) -> None:
    folder = RunFolder.open(shutil.copytree(made, tmp_path / "copy"))
    with Ledger.open(folder.ledger) as ledger:
        upto = ledger.next_group_id("prompts")
        ledger.issue("prompts", [(upto, "a"), (upto + 1, "b")])
        ledger.drop("trainer", "prompts", {upto: "too easy"})
    rows = folder.rollouts_of().read(1).drop_columns(["reward", "length"])
    groups = [GROUP * [group] for group in (0, upto, upto + 1)]
    ids = pa.array(np.ravel(groups), pa.int64())
    place = rows.schema.get_field_index("group_id")
    batch = (
        rows.slice(0, 3 * GROUP).set_column(place, "group_id", ids).combine_chunks().to_batches()[0]
    )
    kept = folder.finished("generator") / "0-0-0.prompts.arrows"
    kept.parent.mkdir(parents=True, exist_ok=True)
    for old in kept.parent.glob("*.arrows"):
        old.unlink()
    with kept.open("wb") as sink:
        writer = SealedWriter(sink, batch.schema)
        writer.write_batch(batch)
        writer.write_batch(batch)
    whole = kept.read_bytes()
    kept.write_bytes(whole[:-20])
    found = Run(folder.path).untrained()
    assert found.num_rows == 2 * GROUP, "a group is told once, and one that was trained is not"
    assert found.column("outcome").to_pylist() == GROUP * ["dropped"] + GROUP * ["in flight"]
    assert found.column("drop_reason").to_pylist() == GROUP * ["too easy"] + GROUP * [None]


def test_files_with_other_columns_make_one_table_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    first, second = tmp_path / "step-000001.arrow", tmp_path / "step-000002.arrow"
    write_arrow(first, pa.table({"group_id": pa.array([0], pa.int64()), "reward": [1.0]}))
    write_arrow(second, pa.table({"group_id": pa.array([1], pa.int64()), "length": [3]}))
    parts = [
        Part(path=path, outcome="trained", node="t", source=None, step=n)
        for n, path in enumerate((first, second), 1)
    ]
    rows = pa.Table.from_batches(rollout_batches(parts)).to_pylist()
    assert [(row["step"], row["reward"], row["length"]) for row in rows] == [
        (1, 1.0, None),
        (2, None, 3),
    ]
    write_arrow(second, pa.table({"group_id": pa.array([1], pa.int64()), "reward": ["good"]}))
    with pytest.raises(
        RunFolderError, match=r"'step-000002.arrow' has other types than the files before it"
    ):
        rollout_schema(parts)
    second.write_bytes(second.read_bytes()[:-30])
    with pytest.raises(RunFolderError, match="is not a whole Arrow file"):
        rollout_schema(parts)


def test_figures_of_any_kind_become_columns_and_series() -> None:
    lines = [
        {"step": 2, "loss": 1, "dropped": {"stale": 2}, "ok": True, "who": "a", "large": 1 << 70},
        {"step": 1, "loss": None, "dropped": {}, "ok": None, "more": [1]},
        {"step": 3, "loss": 0.5},
    ]
    table = table_of(lines)
    assert table.column("loss").to_pylist() == [1.0, None, 0.5]
    assert table.column("dropped").to_pylist() == ['{"stale": 2}', "{}", None]
    assert table.column("ok").type == pa.bool_()
    assert table.column("large").to_pylist()[0] == float(1 << 70)
    assert series(
        [*lines, {"step": 4, "loss": float("nan")}, {"step": 3, "loss": 0.25}], "loss"
    ) == [(2, 1), (3, 0.25)]
