"""What else can be done to a ledger: what the run says of itself, groups issued again, checkpoints,
steps taken back, where files lie.
"""

import sqlite3
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from dataflow.folder.ledger import places
from dataflow.folder.ledger.calls import (
    Advance,
    CommitRound,
    CommitStep,
    Drop,
    Issue,
    Write,
    last_step,
    update_groups,
)
from dataflow.folder.ledger.schema import LedgerError

_REISSUE = (
    "UPDATE groups SET state = 'issued', issues = issues + 1 WHERE source = ? AND group_id = ?"
)
_STEP_KEYS = "node, step, version, source, metrics, checkpoint, at"
_OUTCOME_KEYS = "source, group_id, node, outcome, step, reason"


class SetFacts(Write):
    """As `BaseLedger.set_facts`; the values are JSON."""

    facts: Mapping[str, str]

    doing = "put down what the run is"

    def run(self, db: sqlite3.Connection, now: float) -> None:
        db.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", self.facts.items())


class Reissue(Write):
    """As `BaseLedger.reissue`."""

    source: str
    group_ids: Sequence[int]

    doing = "issue groups again"

    def run(self, db: sqlite3.Connection, now: float) -> None:
        """Do it, and count it."""
        update_groups(db, _REISSUE, self.source, self.group_ids)


class RecordCheckpoint(Write):
    """As `BaseLedger.record_checkpoint`."""

    node: str
    step: int
    checkpoint: str | None

    doing = "record the checkpoint of step {step}"

    def run(self, db: sqlite3.Connection, now: float) -> None:
        key = (self.checkpoint, self.node, self.step)
        if (
            db.execute("UPDATE steps SET checkpoint = ? WHERE node = ? AND step = ?", key).rowcount
            != 1
        ):
            raise LedgerError(
                f"'{self.node}' has a checkpoint of step {self.step}, which it did not commit;"
                " commit the step first"
            )


class RollBack(Write):
    """As `BaseLedger.roll_back_to`, without its answer."""

    step: int
    node: str

    doing = "roll '{node}' back to step {step}"

    def run(self, db: sqlite3.Connection, now: float) -> None:
        """Move the steps after it, and their outcomes, to a new abandoned line."""
        node, step, last = self.node, self.step, last_step(db, self.node)
        if not 0 <= step <= last:
            raise LedgerError(
                f"'{node}' cannot go back to step {step}: its last one is {last}; use an older"
                " checkpoint"
            )
        line = db.execute(
            "INSERT INTO lines (node, to_step, from_step, at) VALUES (?, ?, ?, ?)",
            (node, step, last, now),
        ).lastrowid
        for table, keys in (("outcomes", _OUTCOME_KEYS), ("steps", _STEP_KEYS)):
            later = f"FROM {table} WHERE node = ? AND step > ?"
            copied = f"INSERT INTO abandoned_{table} (line, {keys}) SELECT ?, {keys} {later}"
            db.execute(copied, (line, node, step))
            db.execute(f"DELETE {later}", (node, step))
        places.forget_after(db, node, step)


class SetPlace(Write):
    """As `places.set_place`."""

    path: str
    host: str

    doing = "note where '{path}' lies"

    def run(self, db: sqlite3.Connection, now: float) -> None:
        places.set_place(db, self.path, self.host)


AnyWrite: TypeAlias = (
    SetFacts
    | Issue
    | Advance
    | Reissue
    | CommitStep
    | Drop
    | CommitRound
    | RecordCheckpoint
    | RollBack
    | SetPlace
)
