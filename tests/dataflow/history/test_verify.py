"""Each law of verify: a good folder is clean, and the same folder with one thing changed is
BROKEN.
"""

import contextlib
import json
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from dataflow.folder.finished import Finished
from dataflow.folder.ledger import HOME, Ledger
from dataflow.folder.ledger.schema import connect
from dataflow.folder.run_folder import RunFolder
from dataflow.history.verify import report, verify
from dataflow.system.files import RunFolderError

STEPS, PROMPTS_PER_STEP, GROUP_SIZE, BOUND = 5, 4, 3, 2


DROPPED = {5: "stale", 6: "stale", 12: "failed"}  # in steps 2, 2 and 3


def rollouts(groups: Iterable[int], trainer_version: int) -> pa.Table:
    """Whole groups, each 0 to BOUND versions behind the trainer, the last rollout of each
    failed.
    """
    ids = np.repeat(np.array(list(groups), np.int64), GROUP_SIZE)
    position = np.tile(np.arange(GROUP_SIZE, dtype=np.int32), len(ids) // GROUP_SIZE)
    oldest = np.maximum(trainer_version - ids % (BOUND + 1), 0)
    failed = position == GROUP_SIZE - 1
    return pa.table(
        {
            "group_id": ids,
            "group_size": pa.array(np.zeros(len(ids)), pa.int32()),
            "min_version": pa.array(np.zeros(len(ids)), pa.int32()),
            "rollout_id": ids * GROUP_SIZE + position,
            "position": position,
            "versions": pa.array(
                [
                    [-1] if bad else [-1, min(first + 1, trainer_version), first]
                    for first, bad in zip(oldest, failed, strict=True)
                ],
                pa.list_(pa.int32()),
            ),
            "error": pa.array(["out of memory" if bad else None for bad in failed], pa.string()),
        }
    )


def commit(
    folder: RunFolder, ledger: Ledger, step: int, trained: list[int], dropped: dict[int, str]
) -> None:
    folder.rollouts_of().write(step, rollouts(trained, step - 1))
    ledger.commit_step(
        "trainer", step, version=step, source="prompts", trained=trained, dropped=dropped
    )
    reasons = list(dropped.values())
    folder.append_metrics(
        {"step": step, "loss": 0.5, "dropped": {why: reasons.count(why) for why in set(reasons)}}
    )


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = RunFolder.create(tmp_path_factory.mktemp("runs"), "sorting")
    folder.write_json("config.json", {"max_staleness": {"trainer": BOUND}})
    with Ledger.create(folder.ledger, {"trainer": ["prompts"], "evaluate": ["held_out"]}) as ledger:
        ledger.issue("prompts", [(group, f"t{group}") for group in range(26)])
        ledger.issue("held_out", [(group, f"h{group}") for group in range(4)])
        folder.rollouts_of().write_evaluation(0, rollouts(range(2), 0))
        ledger.commit_round("evaluate", 0, {"held_out": [0, 1]})
        folder.append_metrics({"step": 0, "eval_accuracy": 0.2})
        place = 0
        for step in range(1, STEPS + 1):
            trained: list[int] = []
            dropped: dict[int, str] = {}
            while len(trained) < PROMPTS_PER_STEP:
                if place in DROPPED:
                    dropped[place] = DROPPED[place]
                else:
                    trained.append(place)
                place += 1
            commit(folder, ledger, step, trained, dropped)
        folder.append_metrics({"step": STEPS, "eval_accuracy": 0.4})
    return folder.path


@pytest.fixture
def run(good: Path, tmp_path: Path) -> RunFolder:
    shutil.copytree(good, tmp_path / "run")
    return RunFolder(tmp_path / "run")


def sql(run: RunFolder, *statements: str) -> None:
    with contextlib.closing(connect(run.ledger, mode="rw")) as db:
        db.execute("PRAGMA foreign_keys = OFF")
        for statement in statements:
            assert db.execute(statement).rowcount != 0, statement


def rewrite(run: RunFolder, step: int, change: Callable[[pa.Table], pa.Table]) -> None:
    run.rollouts_of().write(step, change(run.rollouts_of().read(step)))


def put(table: pa.Table, name: str, values: object) -> pa.Table:
    at = table.column_names.index(name)
    return table.set_column(at, name, pa.array(values, table.schema.field(name).type))


def metrics(
    run: RunFolder, change: Callable[[dict[str, object]], dict[str, object] | None]
) -> None:
    lines = [change(line) for line in run.read_metrics()]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines if line is not None))


def broken(run: RunFolder, fact: str) -> None:
    verdict = verify(run.path)
    assert not verdict.clean
    assert verdict.exit_status == 1
    assert verdict.line.startswith("BROKEN: ")
    assert any(fact in found for found in verdict.faults), verdict.faults


def test_a_good_folder_is_clean_and_its_figures_stand_in_one_line(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(run.path) == 0
    assert (
        capsys.readouterr().out
        == "clean: 26 groups issued = 20 trained + 3 dropped (2 stale, 1 failed) + 3 in flight (3"
        " waiting); 5 steps; max staleness 2 of 2 | evaluate: 4 groups issued = 2 evaluated + 0"
        " dropped + 2 in flight (2 waiting)\n"
    )


def test_groups_are_numbered_without_gaps(run: RunFolder) -> None:
    sql(run, "DELETE FROM groups WHERE source = 'prompts' AND group_id = 24")
    broken(run, "groups [24] of source 'prompts' were never issued")


def test_an_outcome_needs_an_issued_group(run: RunFolder) -> None:
    sql(run, "INSERT INTO outcomes VALUES ('prompts', 70, 'trainer', 'dropped', NULL, 'stale')")
    broken(run, "'trainer' has outcomes for groups [70], never issued")


def test_a_group_whose_row_vanished_breaks_the_identity(run: RunFolder) -> None:
    sql(run, "DELETE FROM groups WHERE source = 'prompts' AND group_id = 0")
    broken(run, "25 groups issued != 20 trained + 3 dropped")


def test_no_group_has_two_outcomes(run: RunFolder) -> None:
    sql(
        run,
        "CREATE TABLE loose AS SELECT * FROM outcomes",
        "DROP TABLE outcomes",
        "ALTER TABLE loose RENAME TO outcomes",
        "INSERT INTO outcomes VALUES ('prompts', 0, 'trainer', 'trained', 5, NULL, 0)",
    )
    broken(run, "'trainer' has two outcomes for groups [0]")


def test_a_drop_has_a_reason(run: RunFolder) -> None:
    sql(run, "UPDATE outcomes SET reason = '' WHERE group_id = 12 AND source = 'prompts'")
    broken(run, "dropped groups [12] without a reason")


def test_steps_follow_each_other(run: RunFolder) -> None:
    sql(run, "DELETE FROM steps WHERE step = 3")
    broken(run, "steps [3] of 'trainer' were never committed")
    broken(run, "have an outcome at a step that 'trainer' never committed")


def test_every_trained_group_stands_in_the_file_of_its_step(run: RunFolder) -> None:
    rewrite(run, 1, lambda table: table.filter(pc.not_equal(table["group_id"], 2)))
    broken(run, "groups [2] ended at step 1 of 'trainer' but do not stand in step-000001.arrow")


def test_every_group_in_the_file_of_a_step_was_trained_there(run: RunFolder) -> None:
    sql(run, "DELETE FROM outcomes WHERE source = 'prompts' AND group_id = 0")
    broken(run, "groups [0] stand in step-000001.arrow but did not end at step 1 of 'trainer'")


def test_no_group_stands_in_the_files_of_two_steps(run: RunFolder) -> None:
    extra = run.rollouts_of().read(1).slice(0, GROUP_SIZE)
    rewrite(run, 4, lambda table: pa.concat_tables([table, extra]))
    broken(run, "group 0 of 'prompts' stands in the files of steps 1 and 4")


def test_a_missing_file_of_a_committed_step_is_named(run: RunFolder) -> None:
    run.rollouts_of().step_file(3).unlink()
    broken(run, "step-000003.arrow' failed: ")


@pytest.mark.parametrize("kept", [slice(0, -1), slice(1, None)])
def test_trained_groups_are_whole(run: RunFolder, kept: slice) -> None:
    rewrite(run, 2, lambda table: table.take(list(range(len(table)))[kept]))
    broken(run, "in step-000002.arrow are not whole")


def test_a_rollout_that_stands_twice_makes_its_group_not_whole(run: RunFolder) -> None:
    rewrite(run, 2, lambda table: table.take([0, *range(len(table))]))
    broken(run, "groups [4] in step-000002.arrow are not whole")


def test_a_group_size_that_the_rows_name_is_kept(run: RunFolder) -> None:
    rewrite(
        run,
        1,
        lambda table: put(table, "group_size", [GROUP_SIZE + 1] * 3 + [0] * (len(table) - 3)),
    )
    broken(run, "groups [0] in step-000001.arrow are not whole")


def test_the_order_of_rows_does_not_matter(run: RunFolder) -> None:
    rewrite(run, 2, lambda table: table.take(np.random.default_rng(0).permutation(len(table))))
    assert verify(run.path).clean


def test_no_rollout_is_older_than_the_bound(run: RunFolder) -> None:
    rewrite(
        run, 5, lambda table: put(table, "versions", [[4, 1], *table["versions"].to_pylist()[1:]])
    )
    broken(run, "step 5 of 'trainer' trained rollouts 3 versions old; the bound is 2")


def test_no_rollout_comes_from_a_version_that_did_not_exist(run: RunFolder) -> None:
    rewrite(
        run, 2, lambda table: put(table, "versions", [[1, 2], *table["versions"].to_pylist()[1:]])
    )
    broken(run, "step 2 of 'trainer' trained rollouts of version 2, which did not exist before it")


def test_failed_rollouts_stand_in_the_file_but_are_not_judged_by_age(run: RunFolder) -> None:
    rewrite(
        run,
        5,
        lambda table: put(
            table,
            "versions",
            [[0] if bad else [4] for bad in table["error"].is_valid().to_pylist()],
        ),
    )
    assert verify(run.path).clean


def test_a_lower_bound_in_the_config_is_the_one_that_counts(run: RunFolder) -> None:
    run.write_json("config.json", {"max_staleness": {"trainer": 1}})
    broken(run, "the bound is 1")


def test_metrics_tell_of_the_same_drops_as_the_ledger(run: RunFolder) -> None:
    metrics(run, lambda line: line | ({"dropped": {"stale": 1}} if line["step"] == 2 else {}))
    broken(
        run,
        "metrics.jsonl tells of drops {'stale': 1} at step 2 of 'trainer', the ledger of"
        " {'stale': 2}",
    )


def test_a_drop_without_a_line_of_metrics_is_seen(run: RunFolder) -> None:
    metrics(
        run, lambda line: line | ({"dropped": {}} if line["step"] == 3 and "loss" in line else {})
    )
    broken(run, "the ledger of {'failed': 1}")


def test_steps_without_a_line_of_metrics_are_told_and_break_no_law(run: RunFolder) -> None:
    metrics(run, lambda line: None if line["step"] in (2, 3) else line)
    verdict = verify(run.path)
    assert verdict.clean
    assert verdict.notes == [
        "steps [2, 3] of 'trainer' have no line with their drops in metrics.jsonl"
    ]


def test_evaluated_groups_stand_whole_in_their_file(run: RunFolder) -> None:
    run.rollouts_of().write_evaluation(0, rollouts([0], 0).slice(1))
    broken(run, "groups [1] ended at step 0 of 'evaluate' but do not stand in eval-000000.arrow")
    broken(run, "groups [0] in eval-000000.arrow are not whole")


def of_two_sources(held_out: Iterable[int], harder: Iterable[int]) -> pa.Table:
    """Rows of an evaluation of two sources, whose groups have the same numbers."""
    tables = [("harder", rollouts(harder, 0)), ("held_out", rollouts(held_out, 0))]
    return pa.concat_tables(
        table.append_column("of_source", pa.repeat(name, len(table))) for name, table in tables
    )


def test_groups_of_two_sources_with_the_same_numbers_are_each_whole(run: RunFolder) -> None:
    with Ledger.open(run.ledger) as ledger:
        ledger.issue("harder", [(group, f"x{group}") for group in range(2)])
    sql(
        run,
        "INSERT INTO consumers (node, source) VALUES ('evaluate', 'harder')",
        "INSERT INTO outcomes (source, group_id, node, outcome, step) VALUES ('harder', 1,"
        " 'evaluate', 'evaluated', 0)",
    )
    run.rollouts_of().write_evaluation(0, of_two_sources([0, 1], [1]))
    assert verify(run.path).faults == []
    run.rollouts_of().write_evaluation(0, of_two_sources([0, 1], [0]))
    broken(
        run,
        "groups [1] of 'harder' ended at step 0 of 'evaluate' but do not stand in"
        " eval-000000.arrow",
    )
    broken(
        run,
        "groups [0] of 'harder' stand in eval-000000.arrow but did not end at step 0 of 'evaluate'",
    )
    run.rollouts_of().write_evaluation(0, of_two_sources([0, 1], [1]).slice(1))
    broken(run, "groups [1] of 'harder' in eval-000000.arrow are not whole")


def test_an_evaluation_reads_nothing_older_than_its_prompts_demand(run: RunFolder) -> None:
    table = run.rollouts_of().read_evaluation(0)
    run.rollouts_of().write_evaluation(0, put(table, "min_version", [1] * len(table)))
    broken(run, "4 rollouts in eval-000000.arrow are older than their min_version")


@pytest.mark.parametrize(
    ("damage", "fact"),
    [
        (lambda run: run.ledger.unlink(), "unable to open"),
        (lambda run: run.ledger.write_bytes(b"x" * 9000), "not a database"),
        (
            lambda run: (
                run.rollouts_of()
                .step_file(2)
                .write_bytes(run.rollouts_of().step_file(2).read_bytes()[:200])
            ),
            "not a whole Arrow file",
        ),
        (
            lambda run: rewrite(run, 2, lambda table: table.drop_columns(["position"])),
            "lacks the columns ['position']",
        ),
        (
            lambda run: rewrite(run, 2, lambda table: put(table, "position", [None] * len(table))),
            "nulls",
        ),
    ],
)
def test_what_cannot_be_read_is_broken_with_the_reason(
    run: RunFolder, damage: Callable[[RunFolder], object], fact: str
) -> None:
    damage(run)
    broken(run, fact)


def test_the_bound_is_that_of_the_ledger_whatever_became_of_the_file(run: RunFolder) -> None:
    run.config.write_text("{")
    verdict = verify(run.path)
    assert verdict.clean
    assert any("config.json' is not JSON" in note for note in verdict.notes)
    assert "neither ledger.db nor config.json says what the bound on staleness is" in verdict.notes
    with Ledger.open(run.ledger) as ledger:
        ledger.set_facts({"config": {"max_staleness": {"trainer": 1}}})
    broken(run, "the bound is 1")


def test_a_damaged_page_of_the_ledger_is_broken(run: RunFolder) -> None:
    with run.ledger.open("r+b") as file:
        file.seek(4096 * 4)
        file.write(b"\xff" * 4096)
    assert not verify(run.path).clean


def test_the_first_facts_are_shown_and_the_rest_counted(run: RunFolder) -> None:
    for step in range(1, STEPS + 1):
        run.rollouts_of().step_file(step).unlink()
    line = verify(run.path).line
    assert line.count("failed: ") == 3
    assert line.endswith("; and 2 more")


def test_a_crash_between_the_rollouts_and_their_commit_breaks_no_law(run: RunFolder) -> None:
    run.rollouts_of().write(STEPS + 1, rollouts([23, 24], STEPS))
    verdict = verify(run.path)
    assert verdict.clean
    assert "rollouts of steps [6] that 'trainer' has not committed" in verdict.notes[0]
    assert str(verdict).splitlines()[1].startswith("  note: ")


def test_a_crash_between_the_commit_and_its_metrics_breaks_no_law(run: RunFolder) -> None:
    lines = run.metrics.read_text().splitlines()
    run.metrics.write_text("\n".join(lines[:-2]) + '\n{"step": 5, "lo')
    verdict = verify(run.path)
    assert verdict.clean
    assert verdict.notes == [
        "1 torn line in metrics.jsonl: a crash during the write",
        "steps [5] of 'trainer' have no line with their drops in metrics.jsonl",
    ]


def test_a_line_taken_back_and_made_again_is_clean(run: RunFolder) -> None:
    with Ledger.open(run.ledger) as ledger:
        plan = ledger.roll_back_to(1, "trainer")
        assert verify(run.path).clean
        for planned in plan[:2]:
            commit(run, ledger, planned.step, list(planned.trained), dict(planned.dropped))
    verdict = verify(run.path)
    assert verdict.clean, verdict.faults
    assert verdict.line.startswith("clean: 26 groups issued = 12 trained + 3 dropped")
    assert any("rollouts of steps [4, 5]" in note for note in verdict.notes)


def test_two_trainers_of_the_same_groups_are_judged_each_for_itself(run: RunFolder) -> None:
    with Ledger.open(run.ledger) as ledger:
        run.rollouts_of("critic").write(1, rollouts(range(2), 0))
        ledger.commit_step("critic", 1, version=1, source="prompts", trained=range(2))
    metrics(run, lambda line: line | {"node": "trainer"})
    run.append_metrics({"step": 1, "node": "critic", "dropped": {}})
    verdict = verify(run.path)
    assert verdict.clean, verdict.faults
    assert verdict.line.startswith(
        "clean: critic: 26 groups issued = 2 trained + 0 dropped + 24 in flight (24 waiting); 1"
        " step"
    )
    run.rollouts_of("critic").write(1, rollouts(range(3), 0))
    broken(run, "groups [2] stand in step-000001.arrow but did not end at step 1 of 'critic'")


def test_a_run_that_stopped_before_its_first_step_is_clean(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "empty")
    with Ledger.create(folder.ledger) as ledger:
        assert verify(folder.path).line == "clean: nothing was issued"
        ledger.issue("prompts", [(0, "a")])
    verdict = verify(folder.path)
    assert verdict.clean
    assert "no sink is known for source 'prompts': its 1 groups are in flight" in verdict.notes


def test_a_path_without_a_run_is_the_users_error(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="no run folder at"):
        verify(tmp_path / "absent")


def test_a_run_under_way_may_be_judged(run: RunFolder) -> None:
    with Ledger.open(run.ledger) as ledger:
        ledger.issue("prompts", [(26, "t26")])
        assert verify(run.path).line.startswith("clean: 27 groups issued")


# Runs that were taken up again


def test_a_run_that_went_back_and_on_is_judged_by_the_last_line_of_each_step(
    run: RunFolder,
) -> None:
    with Ledger.open(run.ledger) as ledger:
        ledger.roll_back_to(3, "trainer")
        groups = ledger.steps("trainer")[-1].trained
        following = [group.group_id for group in ledger.in_flight("prompts", "trainer")]
        assert max(groups) < following[0]
        commit(run, ledger, 4, following[:3], {following[3]: "failed"})
    verdict = verify(run.path)
    assert verdict.clean, verdict.line
    assert "4 steps" in verdict.summary
    assert any(
        "steps [5] of 'trainer' that are not on the surviving line" in note
        for note in verdict.notes
    )
    with Ledger.open(run.ledger) as ledger:
        ledger.roll_back_to(3, "trainer")
        commit(run, ledger, 4, following[:4], {})
    metrics(
        run,
        lambda line: (
            {**line, "dropped": {"failed": 1}} if line["step"] == 4 and "loss" in line else line
        ),
    )
    broken(run, "metrics.jsonl tells of drops {'failed': 1} at step 4")


def test_what_a_recovery_leaves_in_the_folder_breaks_no_law_and_is_told(run: RunFolder) -> None:
    run.finished("generator").mkdir(parents=True)
    (run.finished("generator") / "0-part1-0-0.prompts.arrows").write_bytes(b"torn")
    config = run.read_json("config.json")
    run.write_json(
        "config.json",
        config | {"resumed": [{"at": 1.0, "from": {"trainer": 2, "critic": 1}, "steps": 5}]},
    )
    lines = [
        {"worker": "generator-0", "recovered_s": 0.4},
        {"worker": "generator-0", "recovered_s": None},
    ]
    (run.path / "faults.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines) + '{"worker": "trai'
    )
    verdict = verify(run.path)
    assert verdict.clean, verdict.line
    assert "the run was taken up again after step 2" in verdict.notes
    assert (
        "worker 'generator-0' ended 2 times when it should not, and came back 1 times"
        in verdict.notes
    )


def test_only_drops_may_stand_at_the_step_under_way(run: RunFolder) -> None:
    with Ledger.open(run.ledger) as ledger:
        ledger.drop("trainer", "prompts", {24: "stale"}, step=STEPS + 1)
        assert verify(run.path).clean, verify(run.path).line
        ledger.drop("trainer", "prompts", {25: "stale"}, step=STEPS + 2)
    broken(run, "groups [25] have an outcome at a step that 'trainer' never committed")


def test_rollouts_that_another_host_has_are_judged_by_the_ledger_whatever_stands_here(
    run: RunFolder,
) -> None:
    with Ledger.open(run.ledger) as ledger:
        ledger.set_place("rollouts/step-000002.arrow", "c")
        ledger.set_place("rollouts/step-000003.arrow", HOME)
    run.rollouts_of().step_file(2).write_bytes(b"of a line that was taken back")
    verdict = verify(run.path)
    assert verdict.clean, verdict.line
    assert any(
        "the rollouts of 1 step of 'trainer' are on host c, and not here" in note
        for note in verdict.notes
    )


def test_a_checkpoint_that_is_not_as_it_was_written_is_a_fault_and_what_was_not_read_is_told(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (2, 4):
        with run.checkpoints.writing(step) as place:
            (place / "weights").write_bytes(b"w" * 100)
    assert verify(run.path).clean
    weights = run.checkpoints.folder(2) / "weights"
    weights.write_bytes(b"w" * 99 + b"v")
    broken(
        run, "the checkpoint of step 2 of 'trainer' is damaged: 'weights' is not as it was written"
    )
    monkeypatch.setattr(sys.modules["dataflow.history.verify.verdict"], "CHECKPOINT_BYTES", 300)
    verdict = verify(run.path)
    assert verdict.clean and "1 checkpoints of 'trainer' are as large as they were; --deep" in str(
        verdict
    )
    assert not verify(run.path, deep=True).clean
    weights.write_bytes(b"w" * 99)
    broken(run, "the checkpoint of step 2 of 'trainer' is damaged")


def test_finished_groups_of_which_a_bit_has_changed_are_a_fault(run: RunFolder) -> None:
    kept = Finished(run.finished("generator"), "prompts")
    kept.append(rollouts([24], 0).to_batches()[0])
    kept.close()
    assert verify(run.path).clean
    (path,) = run.finished("generator").iterdir()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    broken(run, "groups that stand there are drawn anew")
