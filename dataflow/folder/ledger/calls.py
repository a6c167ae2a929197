"""What can be done to a ledger, a class each: done here in a transaction, or sent to the process
that has it open.

Here what a group goes through, from its issue to its outcome.
"""

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

import msgspec

from dataflow.folder.ledger.refusals import check_same_prompt, conflict, some
from dataflow.folder.ledger.schema import STATES, LedgerError
from dataflow.system.messages import Message

T = TypeVar("T")
Outcome: TypeAlias = tuple[str, int, str, str, int | None, str | None]
"""source, group_id, node, outcome, step, reason."""

_ADVANCE = {
    state: (
        f"UPDATE groups SET state = '{state}' WHERE source = ? AND group_id = ? AND state IN "
        f"({', '.join(repr(earlier) for earlier in STATES[:rank])})"
    )
    for rank, state in enumerate(STATES)
    if rank > 0
}
"""How groups move forward to a state; those that are there or further are left alone."""
_OUTCOME = (
    "INSERT INTO outcomes (source, group_id, node, outcome, step, reason) VALUES (?, ?, ?, ?, ?, ?)"
)
_STEP = (
    "INSERT INTO steps (node, step, version, source, metrics, checkpoint, at) VALUES (?, ?, ?, ?,"
    " ?, ?, ?)"
)


class Value(Message):
    """An answer of numbers, text, and lists and maps of them."""

    value: Any


class LedgerCall(Message, Generic[T]):
    """One call of a ledger, all or nothing."""

    writes: ClassVar[bool] = False
    travels_as: ClassVar[type[Any]] = Value
    """The form in which its answer travels."""
    doing: ClassVar[str]
    """Text for an error; its fields stand in braces."""

    @property
    def said(self) -> str:
        """Text for an error."""
        return self.doing.format_map(msgspec.structs.asdict(self))

    def run(self, db: sqlite3.Connection, now: float) -> T:
        """Do it, in a transaction that the caller has begun. now: seconds since 1970. Errors:
        LedgerError.
        """
        raise NotImplementedError


class Write(LedgerCall[None]):
    """A call that changes the ledger; its answer says only that it is done."""

    writes = True


class Issue(Write):
    """As `BaseLedger.issue`."""

    source: str
    prompts: Sequence[tuple[int, str]]

    doing = "issue groups"

    def run(self, db: sqlite3.Connection, now: float) -> None:
        """Insert groups that follow the last one; known ones must be of the same prompt."""
        following = next_group_id(db, self.source)
        new: list[tuple[str, int, str]] = []
        for group, prompt in self.prompts:
            if group < following:
                check_same_prompt(db, self.source, group, prompt)
            elif group == following + len(new):
                new.append((self.source, group, prompt))
            else:
                raise LedgerError(
                    f"source '{self.source}' issued group {group} where {following + len(new)} is"
                    " the next; number groups from next_group_id() on, in order and without gaps"
                )
        db.executemany("INSERT INTO groups VALUES (?, ?, ?, 'issued', 1)", new)


class Advance(Write):
    """As `BaseLedger.advance`."""

    source: str
    group_ids: Sequence[int]
    state: str

    doing = "advance groups to {state}"

    def run(self, db: sqlite3.Connection, now: float) -> None:
        if self.state not in _ADVANCE:
            raise LedgerError(
                f"groups cannot advance to '{self.state}'; use one of {list(_ADVANCE)}, reissue()"
                " or an outcome"
            )
        update_groups(db, _ADVANCE[self.state], self.source, self.group_ids)


class CommitStep(Write):
    """As `BaseLedger.commit_step`; metrics are JSON."""

    node: str
    step: int
    version: int
    source: str
    trained: Sequence[int]
    dropped: Mapping[int, str]
    metrics: str
    checkpoint: str | None

    doing = "commit step {step} of '{node}'"

    def run(self, db: sqlite3.Connection, now: float) -> None:
        """Insert the step, the next one of its node, and what became of its groups."""
        last = last_step(db, self.node)
        if self.step != last + 1:
            raise LedgerError(
                f"'{self.node}' committed step {self.step} but its last one is {last}; commit step"
                f" {last + 1}, or roll_back_to() an earlier one first"
            )
        outcomes = _ended(self.node, self.source, "trained", self.trained, self.step)
        outcomes += _dropped(self.node, self.source, self.dropped, self.step)
        db.execute(
            _STEP,
            (self.node, self.step, self.version, self.source, self.metrics, self.checkpoint, now),
        )
        _end(db, self.node, self.source, outcomes)


class Drop(Write):
    """As `BaseLedger.drop`."""

    node: str
    source: str
    reasons: Mapping[int, str]
    step: int | None

    doing = "drop groups of '{node}'"

    def run(self, db: sqlite3.Connection, now: float) -> None:
        _end(db, self.node, self.source, _dropped(self.node, self.source, self.reasons, self.step))


class CommitRound(Write):
    """As `BaseLedger.commit_round`."""

    node: str
    step: int
    groups: Mapping[str, Sequence[int]]

    doing = "record the evaluation at step {step}"

    def run(self, db: sqlite3.Connection, now: float) -> None:
        for source, group_ids in self.groups.items():
            _end(
                db, self.node, source, _ended(self.node, source, "evaluated", group_ids, self.step)
            )


def next_group_id(db: sqlite3.Connection, source: str) -> int:
    """One above the last group of `source`; 0 before the first."""
    row = db.execute("SELECT max(group_id) + 1 FROM groups WHERE source = ?", (source,)).fetchone()
    return int(row[0] or 0)


def last_step(db: sqlite3.Connection, node: str) -> int:
    """The last committed step of `node`; 0 before the first."""
    row = db.execute("SELECT coalesce(max(step), 0) FROM steps WHERE node = ?", (node,)).fetchone()
    return int(row[0])


def register(db: sqlite3.Connection, node: str, source: str) -> None:
    """Note that `node` consumes the groups of `source`."""
    db.execute("INSERT OR IGNORE INTO consumers VALUES (?, ?)", (node, source))


def _ended(
    node: str, source: str, outcome: str, group_ids: Iterable[int], step: int
) -> list[Outcome]:
    """Rows of groups that were trained or evaluated at a step."""
    return [(source, int(group), node, outcome, step, None) for group in group_ids]


def _dropped(node: str, source: str, reasons: Mapping[int, str], step: int | None) -> list[Outcome]:
    """Rows of groups that were given up."""
    return [
        (source, int(group), node, "dropped", step, str(reason))
        for group, reason in reasons.items()
    ]


def _end(db: sqlite3.Connection, node: str, source: str, outcomes: list[Outcome]) -> None:
    """Insert outcomes; a group that has one has been scored, whatever message about it is still
    under way.
    """
    register(db, node, source)
    try:
        db.executemany(_OUTCOME, outcomes)
    except sqlite3.IntegrityError as error:
        db.execute("ROLLBACK")
        raise LedgerError(
            conflict(db, node, source, [row[1] for row in outcomes], error)
        ) from error
    db.executemany(_ADVANCE["scored"], [row[:2] for row in outcomes])


def update_groups(
    db: sqlite3.Connection, statement: str, source: str, group_ids: Iterable[int]
) -> None:
    """Change groups by a statement, which names source and group. LedgerError where one was never
    issued.
    """
    ids = [int(group) for group in group_ids]
    if db.executemany(statement, [(source, group) for group in ids]).rowcount == len(ids):
        return
    following = next_group_id(db, source)
    if unknown := [group for group in ids if not 0 <= group < following]:
        raise LedgerError(
            f"groups {some(unknown)} of '{source}' were never issued (the next one is {following});"
            " issue() them first"
        )
