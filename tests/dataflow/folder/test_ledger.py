"""The laws of the ledger: one outcome per group and sink, all or nothing, nothing lost."""

import contextlib
import gc
import os
import re
import shutil
import sqlite3
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from dataflow.folder.ledger import Ledger, LedgerError, PlannedStep, schema
from dataflow.folder.ledger.schema import SCHEMA_VERSION, STATES, connect


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    consumers = {"actor": ["prompts"], "critic": ["prompts"], "evaluate": ["held_out"]}
    with Ledger.create(tmp_path / "ledger.db", consumers, clock=lambda: 5.0) as made:
        yield made


def issue(ledger: Ledger, number: int, source: str = "prompts") -> list[int]:
    first = ledger.next_group_id(source)
    ids = list(range(first, first + number))
    ledger.issue(source, [(group, f"task-{group}") for group in ids])
    return ids


def commit(ledger: Ledger, step: int, trained: object, node: str = "actor", **more: object) -> None:
    ledger.commit_step(node, step, version=step, source="prompts", trained=trained, **more)


def rows(ledger: Ledger, query: str) -> list[tuple[object, ...]]:
    with contextlib.closing(sqlite3.connect(ledger.path)) as db:
        return db.execute(query).fetchall()


def test_every_issued_group_is_trained_or_dropped_or_in_flight(ledger: Ledger) -> None:
    issue(ledger, 10)
    ledger.advance("prompts", range(6), "generating")
    ledger.advance("prompts", [0, 1, 2], "scored")
    commit(ledger, 1, [0, 1], dropped={2: "stale"})
    ledger.drop("actor", "prompts", {9: "too long"})
    counts = ledger.counts("actor")
    assert (counts.issued, counts.trained, counts.missing) == (10, 2, 0)
    assert counts.dropped == {"stale": 1, "too long": 1}
    assert counts.in_flight == {"issued": 3, "generating": 3}
    assert (
        ledger.verdict("actor")
        == "clean: 10 groups issued = 2 trained + 2 dropped (1 stale, 1 too long) + 6 in flight (3"
        " issued, 3 generating)"
    )


def test_of_some_groups_those_in_flight_are_found_at_a_cost_that_does_not_grow_with_the_ledger(
    ledger: Ledger,
) -> None:
    """A node that was started again asks this of every batch that comes."""
    instructions = 0

    def count() -> int:
        nonlocal instructions
        instructions += 1
        return 0

    def cost() -> int:
        before = instructions
        assert [group.group_id for group in ledger.in_flight("prompts", "actor", [1, 2, 9])] == [
            2,
            9,
        ]
        return instructions - before

    issue(ledger, 10)
    commit(ledger, 1, [0, 1])
    assert ledger.in_flight("prompts", "actor", []) == []
    ledger._db.set_progress_handler(count, 1)
    short = cost()
    ledger._db.set_progress_handler(None, 1)
    ledger.issue("prompts", [(group, str(group)) for group in range(10, 3_000)])
    commit(ledger, 2, range(10, 2_000))
    ledger._db.set_progress_handler(count, 1)
    assert cost() < 2 * short


def test_the_law_holds_for_each_trainer_of_the_same_groups(ledger: Ledger) -> None:
    issue(ledger, 4)
    commit(ledger, 1, [0, 1], node="actor")
    commit(ledger, 1, [0, 1, 2], node="critic")
    assert ledger.counts("actor").trained == 2
    assert ledger.counts("critic").trained == 3
    assert [group.group_id for group in ledger.in_flight("prompts")] == [2, 3]


def test_no_group_is_trained_twice(ledger: Ledger) -> None:
    issue(ledger, 4)
    commit(ledger, 1, [0, 1])
    with pytest.raises(
        LedgerError, match=r"'actor' would end group 1 of 'prompts' twice: it was trained at step 1"
    ):
        commit(ledger, 2, [2, 1])
    with pytest.raises(LedgerError, match="two outcomes in one call"):
        commit(ledger, 2, [2, 2])
    with pytest.raises(LedgerError, match="two outcomes in one call"):
        commit(ledger, 2, [2], dropped={2: "stale"})
    with pytest.raises(LedgerError, match="twice"):
        ledger.drop("actor", "prompts", {0: "stale"})


def test_a_refused_step_leaves_no_trace(ledger: Ledger) -> None:
    issue(ledger, 4)
    commit(ledger, 1, [0])
    before = ledger.counts("actor")
    with pytest.raises(LedgerError, match="twice"):
        commit(ledger, 2, [1, 2, 3, 0])
    assert ledger.counts("actor") == before
    assert ledger.last_step("actor") == 1
    commit(ledger, 2, [1, 2, 3])


def test_a_group_that_was_never_issued_gets_no_outcome_and_no_state(ledger: Ledger) -> None:
    issue(ledger, 2)
    with pytest.raises(LedgerError, match=r"group 2 of 'prompts', which was never issued"):
        commit(ledger, 1, [0, 2])
    with pytest.raises(
        LedgerError, match=r"groups \[7, 8\] of 'prompts' were never issued \(the next one is 2\)"
    ):
        ledger.advance("prompts", [1, 7, 8], "scored")
    with pytest.raises(LedgerError, match="never issued"):
        ledger.advance("prompts", [-1], "scored")
    assert ledger.counts("actor").in_flight == {"issued": 2}


def test_going_back_to_a_checkpoint_puts_later_groups_in_flight_and_plans_their_repetition(
    ledger: Ledger,
) -> None:
    issue(ledger, 8)
    commit(ledger, 1, [0, 1], checkpoint="checkpoints/step-000001")
    commit(ledger, 2, [2, 4], dropped={3: "stale"})
    commit(ledger, 3, [5, 6])
    ledger.drop("actor", "prompts", {7: "refused"})
    plan = ledger.roll_back_to(1, "actor")
    assert plan == [
        PlannedStep(step=2, source="prompts", trained=(2, 4), dropped={3: "stale"}),
        PlannedStep(step=3, source="prompts", trained=(5, 6), dropped={}),
    ]
    assert ledger.last_step("actor") == 1
    counts = ledger.counts("actor")
    assert (counts.trained, counts.dropped, counts.in_flight) == (2, {"refused": 1}, {"scored": 5})
    assert rows(ledger, "SELECT line, node, to_step, from_step, at FROM lines") == [
        (1, "actor", 1, 3, 5.0)
    ]
    for planned in plan:
        commit(ledger, planned.step, planned.trained, dropped=planned.dropped)
    assert ledger.replay_plan("actor") == []
    assert ledger.counts("actor").trained == 6


def test_a_second_crash_during_the_repetition_still_knows_the_whole_plan(ledger: Ledger) -> None:
    issue(ledger, 6)
    for step in range(1, 6):
        commit(ledger, step, [step])
    plan = ledger.roll_back_to(1, "actor")
    commit(ledger, 2, plan[0].trained)
    assert [planned.step for planned in ledger.roll_back_to(1, "actor")] == [2, 3, 4, 5]


def test_the_plan_ends_where_the_new_line_went_another_way(ledger: Ledger) -> None:
    issue(ledger, 6)
    for step in range(1, 5):
        commit(ledger, step, [step])
    ledger.roll_back_to(1, "actor")
    commit(ledger, 2, [3])
    assert ledger.replay_plan("actor") == []
    assert [planned.trained for planned in ledger.roll_back_to(1, "actor")] == [(3,)]


def test_going_back_touches_no_other_trainer(ledger: Ledger) -> None:
    issue(ledger, 2)
    commit(ledger, 1, [0, 1], node="actor")
    commit(ledger, 1, [0, 1], node="critic")
    ledger.roll_back_to(0, "actor")
    assert (ledger.counts("actor").trained, ledger.counts("critic").trained) == (0, 2)


def test_a_step_that_never_was_cannot_be_gone_back_to(ledger: Ledger) -> None:
    with pytest.raises(LedgerError, match="cannot go back to step 3: its last one is 0"):
        ledger.roll_back_to(3, "actor")
    with pytest.raises(LedgerError, match="checkpoint of step 1, which it did not commit"):
        ledger.record_checkpoint("actor", 1, "checkpoints/step-000001")


def test_a_step_keeps_its_metrics_and_checkpoint(ledger: Ledger) -> None:
    issue(ledger, 1)
    commit(ledger, 1, [0], metrics={"loss": np.float32("nan"), "reward": np.float64(0.5)})
    ledger.record_checkpoint("actor", 1, "checkpoints/step-000001")
    ledger.flush()
    assert rows(ledger, "SELECT metrics, checkpoint, version, at FROM steps") == [
        ('{"loss": null, "reward": 0.5}', "checkpoints/step-000001", 1, 5.0)
    ]


def test_a_reader_sees_what_was_committed_and_cannot_write(ledger: Ledger) -> None:
    issue(ledger, 2)
    with Ledger.open(ledger.path, readonly=True) as reader:
        assert reader.counts("actor").issued == 2
        with pytest.raises(LedgerError, match="readonly"):
            issue(reader, 1)


def test_a_ledger_is_never_created_over_another(ledger: Ledger) -> None:
    with pytest.raises(LedgerError, match="exists already"):
        Ledger.create(ledger.path)


def test_what_is_no_ledger_is_refused_with_a_reason(tmp_path: Path) -> None:
    with pytest.raises(
        LedgerError, match="unable to open database file; check that the run folder exists"
    ):
        Ledger.open(tmp_path / "absent.db")
    (tmp_path / "text.db").write_text(
        "no database at all, but long enough to look like a header of one " * 20
    )
    with pytest.raises(LedgerError, match="not a database; this is not the ledger of a run"):
        Ledger.open(tmp_path / "text.db")
    (tmp_path / "empty.db").touch()
    with pytest.raises(LedgerError, match="no such table: schema; this is not the ledger"):
        Ledger.open(tmp_path / "empty.db")


def test_a_ledger_of_another_release_is_refused(ledger: Ledger) -> None:
    with contextlib.closing(sqlite3.connect(ledger.path)) as db, db:
        db.execute("UPDATE schema SET version = 99")
    with pytest.raises(
        LedgerError, match=f"found version 99, this code reads {SCHEMA_VERSION}; use the release"
    ):
        Ledger.open(ledger.path)


def test_on_every_python_a_connection_that_nobody_closes_is_told_of(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        Ledger.create(tmp_path / "closed.db").close()
        assert told == []
        Ledger.open(tmp_path / "closed.db")
        gc.collect()
    assert [each.category for each in told] == [ResourceWarning]


def test_a_ledger_that_cannot_be_made_leaves_no_connection(tmp_path: Path) -> None:
    def cut_short() -> Iterator[str]:
        yield "prompts"
        raise OSError("no sources any more")

    def refused(make: Callable[[], Ledger], message: str) -> None:
        with pytest.raises((LedgerError, OSError), match=message):
            make()

    (tmp_path / "empty.db").touch()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        refused(
            lambda: Ledger.create(tmp_path / "new.db", {"trainer": cut_short()}),
            "no sources any more",
        )
        refused(lambda: Ledger.open(tmp_path / "empty.db"), "no such table")
        gc.collect()
    assert told == []


def test_a_full_disk_is_named_and_loses_nothing_committed(ledger: Ledger) -> None:
    issue(ledger, 50)
    pages = ledger._db.execute("PRAGMA page_count").fetchone()[0]
    ledger._db.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(LedgerError, match="full; make room on that disk, then resume"):
        issue(ledger, 5000)
    assert ledger.counts("actor").issued == 50
    commit(ledger, 1, [0])


def test_a_wait_for_another_writer_ends_with_a_reason(ledger: Ledger) -> None:
    db = connect(ledger.path, mode="rw", busy_timeout_s=0.0)
    impatient = Ledger(db, ledger.path, lambda: 0.0)
    ledger._db.execute("BEGIN IMMEDIATE")
    with pytest.raises(LedgerError, match="locked; another process writes to it"):
        issue(impatient, 1)
    ledger._db.execute("ROLLBACK")
    issue(impatient, 1)
    impatient.close()


def reads_for_ever(path: Path) -> sqlite3.Connection:
    """A browser of databases that has looked at the groups, and is left open."""
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("BEGIN")
    db.execute("SELECT count(*) FROM groups").fetchone()
    return db


def test_who_reads_holds_no_flush_up_and_what_was_flushed_is_all_that_was_committed(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the disk are the database as SQLite last flushed it, and the files that a flush was asked
    for: as after a cut of the power.
    """
    issue(ledger, 8)
    ledger._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    disk = tmp_path / "disk"
    disk.mkdir()
    shutil.copy(ledger.path, disk)
    monkeypatch.setattr(
        sys.modules["dataflow.folder.ledger.ledger"],
        "flush_to_disk",
        lambda path: None if path.is_dir() else shutil.copy(path, disk),
    )
    with contextlib.closing(reads_for_ever(ledger.path)) as reader:
        for step in (1, 2, 3):
            commit(ledger, step, [2 * step, 2 * step + 1])
            ledger.flush()
            with Ledger.open(disk / ledger.path.name) as found:
                assert found.last_step("actor") == step
        assert reader.execute("SELECT count(*) FROM steps").fetchone() == (0,), (
            "it still reads what it began with"
        )


def test_the_log_is_cut_when_who_read_for_long_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = 100
    monkeypatch.setattr(schema, "WAL_PAGES", pages)
    monkeypatch.setattr(schema, "WAL_BYTES", pages * 4096)
    with Ledger.create(tmp_path / "short.db", {"actor": ["prompts"]}) as ledger:
        with contextlib.closing(reads_for_ever(ledger.path)):
            while ledger.wal_bytes <= 2 * schema.WAL_BYTES:
                issue(ledger, 500)
        for _ in range(3):  # one moves the log into the database, the next begins it anew
            issue(ledger, 500)
        assert ledger.wal_bytes <= schema.WAL_BYTES


def test_a_forked_process_may_not_use_its_parents_connection(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getpid", lambda: -1)
    for use in (lambda: issue(ledger, 1), lambda: ledger.counts("actor"), ledger.flush):
        with pytest.raises(LedgerError, match="open it anew in each process"):
            use()


# What a resume and a replay ask


def test_committed_steps_are_told_with_their_groups_their_drops_and_their_metrics(
    ledger: Ledger,
) -> None:
    issue(ledger, 8)
    commit(ledger, 1, [0, 1], dropped={2: "stale"}, metrics={"loss": 0.1})
    commit(ledger, 2, [4, 3], metrics={"loss": 0.2})
    commit(ledger, 3, [5])
    commit(ledger, 1, [0], node="critic")
    first, second, third = ledger.steps("actor")
    assert (first.step, first.source, first.trained, first.dropped) == (
        1,
        "prompts",
        (0, 1),
        {2: "stale"},
    )
    assert (second.trained, second.metrics, third.dropped) == ((3, 4), {"loss": 0.2}, {})
    assert [step.step for step in ledger.steps("actor", 1, 2)] == [2]
    ledger.roll_back_to(1, "actor")
    assert [step.step for step in ledger.steps("actor")] == [1]


def test_drops_of_the_step_under_way_are_known_before_it_is_committed(ledger: Ledger) -> None:
    issue(ledger, 4)
    ledger.drop("actor", "prompts", {1: "stale"}, step=1)
    assert ledger.drops_at("actor", 1) == {1: "stale"}
    commit(ledger, 1, [0, 2], dropped={3: "failed"})
    assert ledger.drops_at("actor", 1) == {1: "stale", 3: "failed"}
    assert ledger.steps("actor")[0].dropped == {1: "stale", 3: "failed"}


def test_a_round_of_several_sources_is_recorded_whole_or_not_at_all(ledger: Ledger) -> None:
    issue(ledger, 3, "held_out")
    issue(ledger, 2, "other")
    assert ledger.last_round("evaluate") is None
    with pytest.raises(LedgerError, match="never issued"):
        ledger.commit_round("evaluate", 5, {"held_out": range(3), "other": [0, 7]})
    assert ledger.counts("evaluate").evaluated == 0
    ledger.commit_round("evaluate", 5, {"held_out": range(3), "other": [0]})
    assert (ledger.counts("evaluate").evaluated, ledger.last_round("evaluate")) == (4, 5)


def test_the_fate_of_a_group_is_told_sink_by_sink(ledger: Ledger) -> None:
    issue(ledger, 3)
    commit(ledger, 1, [0], node="actor")
    ledger.drop("critic", "prompts", {0: "stale"})
    assert [str(fate) for fate in ledger.fates("prompts", 0)] == [
        "trained by actor at step 1",
        "dropped by critic (stale)",
    ]
    assert ledger.fates("prompts", 1) == []
    assert ledger.sources("evaluate") == ["held_out"] and ledger.sources() == [
        "held_out",
        "prompts",
    ]


def test_a_damaged_page_is_found(ledger: Ledger) -> None:
    issue(ledger, 5000)
    ledger._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    Ledger.prove(ledger.path)
    content = bytearray(ledger.path.read_bytes())
    content[-4096:] = os.urandom(4096)
    ledger.close()
    for path in ledger.path.parent.glob("ledger.db-*"):
        path.unlink()
    ledger.path.write_bytes(content)
    with pytest.raises(LedgerError, match="damaged|malformed"):
        Ledger.prove(ledger.path)


def test_a_late_word_of_an_earlier_state_takes_no_group_back(ledger: Ledger) -> None:
    issue(ledger, 1)
    for at, reached in enumerate(STATES[1:], start=1):
        ledger.advance("prompts", [0], reached)
        for earlier in STATES[1:at]:
            ledger.advance("prompts", [0], earlier)
            assert ledger.counts("actor").in_flight == {reached: 1}


@pytest.mark.parametrize("change", ["prompt_id = 'task-9'", "issues = 2", "state = 'scored'"])
def test_a_row_that_says_something_else_than_was_written_is_found(
    ledger: Ledger, change: str
) -> None:
    issue(ledger, 3)
    Ledger.prove(ledger.path)
    ledger._db.create_function("row_sum", -1, lambda *values: 1, deterministic=True)
    ledger._db.execute(f"UPDATE groups SET {change} WHERE group_id = 1")
    with pytest.raises(
        LedgerError,
        match="1 row of its table groups are not as they were written; take it from a b",
    ):
        Ledger.prove(ledger.path)


def test_a_log_that_lost_what_was_committed_is_found_before_anybody_writes(
    ledger: Ledger, tmp_path: Path
) -> None:
    ledger._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    for _ in range(4):
        issue(ledger, 8)
    log = ledger._wal.read_bytes()
    (tmp_path / "left").mkdir()
    left = tmp_path / "left/ledger.db"
    shutil.copy(ledger.path, left)
    frame = 24 + 4096
    for at, fault in [(70, 1), (len(log) // 2, 1), (len(log) - 9, 1), (20, 1), (0, frame + 32)]:
        left.with_name("ledger.db-wal").write_bytes(
            log[:at] + bytes([log[at] ^ fault % 256]) + log[at + 1 :]
        )
        for _ in range(2):
            with pytest.raises(
                LedgerError,
                match="ledger.db-wal, (cannot be read behind page|are not as they were wr)",
            ):
                Ledger.prove(left)
    torn = 32 + (len(log) - 32) // frame // 2 * frame + 100
    left.with_name("ledger.db-wal").write_bytes(log[:torn])
    Ledger.prove(left)


def test_an_earlier_ledger_whose_rows_have_no_sums_is_read_and_written(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        db.execute("PRAGMA journal_mode = WAL")
        for statement in schema.TABLES:
            db.execute(re.sub(r"\n    , sum INTEGER AS [^\n]*STORED,", "\n    ,", statement))
        db.execute("INSERT INTO schema VALUES (2)")
    with Ledger.open(path) as ledger:
        assert "row_sum" not in rows(ledger, "SELECT group_concat(sql) FROM sqlite_master")[0][0]
        issue(ledger, 2)
        commit(ledger, 1, [0, 1])
        Ledger.prove(path)
        assert ledger.counts("actor").trained == 2


def test_steps_are_committed_in_order_without_gaps(ledger: Ledger) -> None:
    issue(ledger, 4)
    with pytest.raises(LedgerError, match="committed step 2 but its last one is 0; commit step 1"):
        commit(ledger, 2, [0])
    commit(ledger, 1, [0])
    with pytest.raises(LedgerError, match="committed step 1 but its last one is 1"):
        commit(ledger, 1, [1])


def test_states_only_move_forward_so_a_redelivery_changes_nothing(ledger: Ledger) -> None:
    issue(ledger, 3)
    ledger.advance("prompts", [0, 1], "scored")
    for state in STATES[1:]:
        ledger.advance("prompts", np.array([0, 1]), state)
    assert ledger.counts("actor").in_flight == {"issued": 1, "scored": 2}
    with pytest.raises(LedgerError, match="cannot advance to 'trained'"):
        ledger.advance("prompts", [0], "trained")


def test_groups_are_numbered_on_without_gaps(ledger: Ledger) -> None:
    issue(ledger, 2)
    with pytest.raises(LedgerError, match="issued group 3 where 2 is the next"):
        ledger.issue("prompts", [(3, "task-3")])
    ledger.issue("held_out", [(0, "h")])
    assert (ledger.next_group_id("prompts"), ledger.next_group_id("held_out")) == (2, 1)


def test_issuing_again_after_a_crash_keeps_what_is_known(ledger: Ledger) -> None:
    issue(ledger, 2)
    ledger.advance("prompts", [0], "scored")
    ledger.issue("prompts", [(1, "task-1"), (2, "task-2")])
    assert [(group.group_id, group.state) for group in ledger.in_flight("prompts")] == [
        (0, "scored"),
        (1, "issued"),
        (2, "issued"),
    ]
    with pytest.raises(
        LedgerError, match="group 1 of 'prompts' was issued for prompt 'task-1', and now for 'x'"
    ):
        ledger.issue("prompts", [(1, "x")])


def test_an_outcome_means_scored_whatever_arrives_late(ledger: Ledger) -> None:
    issue(ledger, 2)
    commit(ledger, 1, [0])
    ledger.advance("prompts", [0, 1], "generated")
    ledger.roll_back_to(0, "actor")
    assert ledger.counts("actor").in_flight == {"generated": 1, "scored": 1}


def test_a_sink_not_named_at_creation_is_known_from_its_first_outcome(tmp_path: Path) -> None:
    with Ledger.create(tmp_path / "l.db") as ledger:
        issue(ledger, 3)
        assert len(ledger.in_flight("prompts")) == 3
        commit(ledger, 1, [0])
        assert ledger.counts("actor").in_flight == {"issued": 2}
