"""What the ledger does inside one transaction, and the reasons it gives when a law would break."""

import sqlite3
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from dataflow.folder.ledger.schema import STATES, LedgerError

Outcome: TypeAlias = tuple[str, int, str, str, int | None, str | None]
"""source, group_id, node, outcome, step, reason."""

ADVANCE = {
    state: f"UPDATE groups SET state = '{state}' WHERE source = ? AND group_id = ? AND state IN "
    f"({', '.join(repr(earlier) for earlier in STATES[:rank])})"
    for rank, state in enumerate(STATES)
    if rank > 0
}
"""How groups move forward to a state; those that are there or further are left alone."""
_REISSUE = "UPDATE groups SET state = 'issued', issues = issues + 1 WHERE source = ? AND group_id = ?"
_OUTCOME = "INSERT INTO outcomes (source, group_id, node, outcome, step, reason) VALUES (?, ?, ?, ?, ?, ?)"
_STEP_KEYS = "node, step, version, source, metrics, checkpoint, at"
_OUTCOME_KEYS = "source, group_id, node, outcome, step, reason"


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


def set_facts(db: sqlite3.Connection, facts: Mapping[str, str]) -> None:
    """Put down what a run says of itself, in place of what it said before under these names."""
    db.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", facts.items())


def issue(db: sqlite3.Connection, source: str, prompts: Iterable[tuple[int, str]]) -> None:
    """Insert groups that follow the last one; known ones must be of the same prompt."""
    following = next_group_id(db, source)
    new: list[tuple[str, int, str]] = []
    for group, prompt in prompts:
        if group < following:
            _check_same_prompt(db, source, group, prompt)
        elif group == following + len(new):
            new.append((source, int(group), str(prompt)))
        else:
            raise LedgerError(
                f"source '{source}' issued group {group} where {following + len(new)} is the next; "
                f"number groups from next_group_id() on, in order and without gaps"
            )
    db.executemany("INSERT INTO groups VALUES (?, ?, ?, 'issued', 1)", new)


def advance(db: sqlite3.Connection, source: str, group_ids: Iterable[int], state: str) -> None:
    """Move groups forward to `state`."""
    if state not in ADVANCE:
        raise LedgerError(f"groups cannot advance to '{state}'; use one of {list(ADVANCE)}, reissue() or an outcome")
    _update(db, ADVANCE[state], source, group_ids)


def reissue(db: sqlite3.Connection, source: str, group_ids: Iterable[int]) -> None:
    """Set groups back to issued and count it."""
    _update(db, _REISSUE, source, group_ids)


def add_step(db: sqlite3.Connection, row: tuple[str, int, int, str, str, str | None, float]) -> None:
    """Insert a step (node, step, version, source, metrics, checkpoint, at): the next one of its node."""
    node, step = row[:2]
    last = last_step(db, node)
    if step != last + 1:
        raise LedgerError(
            f"'{node}' committed step {step} but its last one is {last}; commit step {last + 1}, "
            f"or roll_back_to() an earlier one first"
        )
    db.execute(f"INSERT INTO steps ({_STEP_KEYS}) VALUES (?, ?, ?, ?, ?, ?, ?)", row)


def record_checkpoint(db: sqlite3.Connection, node: str, step: int, checkpoint: str) -> None:
    """Note where the checkpoint of a committed step stands."""
    key = (checkpoint, node, step)
    if db.execute("UPDATE steps SET checkpoint = ? WHERE node = ? AND step = ?", key).rowcount != 1:
        raise LedgerError(f"'{node}' has a checkpoint of step {step}, which it did not commit; commit the step first")


def end(db: sqlite3.Connection, node: str, source: str, outcomes: list[Outcome]) -> None:
    """Insert outcomes; a group that has one has been scored, whatever message about it is still under way."""
    register(db, node, source)
    try:
        db.executemany(_OUTCOME, outcomes)
    except sqlite3.IntegrityError as error:
        db.execute("ROLLBACK")
        raise LedgerError(_conflict(db, node, source, [row[1] for row in outcomes], error)) from error
    db.executemany(ADVANCE["scored"], [row[:2] for row in outcomes])


def ended(node: str, source: str, outcome: str, group_ids: Iterable[int], step: int) -> list[Outcome]:
    """Rows of groups that were trained or evaluated at a step."""
    return [(source, int(group), node, outcome, step, None) for group in group_ids]


def dropped(node: str, source: str, reasons: Mapping[int, str], step: int | None) -> list[Outcome]:
    """Rows of groups that were given up."""
    return [(source, int(group), node, "dropped", step, str(reason)) for group, reason in reasons.items()]


def roll_back(db: sqlite3.Connection, node: str, step: int, at: float) -> None:
    """Move the steps of `node` after `step`, and their outcomes, to a new abandoned line."""
    last = last_step(db, node)
    if not 0 <= step <= last:
        raise LedgerError(f"'{node}' cannot go back to step {step}: its last one is {last}; use an older checkpoint")
    line = db.execute(
        "INSERT INTO lines (node, to_step, from_step, at) VALUES (?, ?, ?, ?)", (node, step, last, at)
    ).lastrowid
    for table, keys in (("outcomes", _OUTCOME_KEYS), ("steps", _STEP_KEYS)):
        later = f"FROM {table} WHERE node = ? AND step > ?"
        copied = f"INSERT INTO abandoned_{table} (line, {keys}) SELECT ?, {keys} {later}"
        db.execute(copied, (line, node, step))
        db.execute(f"DELETE {later}", (node, step))


def some(groups: Iterable[Any]) -> str:
    """The first few of a list, for a message."""
    listed = sorted(groups)
    return f"{listed[:5]}{f' and {len(listed) - 5} more' if len(listed) > 5 else ''}"


def _update(db: sqlite3.Connection, statement: str, source: str, group_ids: Iterable[int]) -> None:
    ids = [int(group) for group in group_ids]
    if db.executemany(statement, [(source, group) for group in ids]).rowcount == len(ids):
        return
    following = next_group_id(db, source)
    if unknown := [group for group in ids if not 0 <= group < following]:
        raise LedgerError(
            f"groups {some(unknown)} of '{source}' were never issued (the next one is {following}); issue() them first"
        )


def _check_same_prompt(db: sqlite3.Connection, source: str, group: int, prompt: str) -> None:
    key = (source, int(group))
    found = db.execute("SELECT prompt_id FROM groups WHERE source = ? AND group_id = ?", key).fetchone()
    if found is None or found[0] != str(prompt):
        raise LedgerError(
            f"group {group} of '{source}' was issued for prompt {found and found[0]!r}, "
            f"and now for {prompt!r}; give every group a number of its own, from next_group_id() on"
        )


def _conflict(db: sqlite3.Connection, node: str, source: str, groups: list[int], error: sqlite3.IntegrityError) -> str:
    """Why outcomes were refused."""
    if double := {group for group in groups if groups.count(group) > 1}:
        return f"'{node}' gave groups {some(double)} of '{source}' two outcomes in one call; give each one"
    for group in groups:
        key = (source, group)
        if not db.execute("SELECT 1 FROM groups WHERE source = ? AND group_id = ?", key).fetchone():
            return f"'{node}' ended group {group} of '{source}', which was never issued; issue() it first"
        found = db.execute(
            "SELECT outcome, step, reason FROM outcomes WHERE source = ? AND group_id = ? AND node = ?",
            (*key, node),
        ).fetchone()
        if found:
            outcome, step, reason = found
            at = f" at step {step}" if step is not None else ""
            because = f" ({reason})" if reason else ""
            return (
                f"'{node}' would end group {group} of '{source}' twice: it was {outcome}{at}{because}; "
                f"leave out groups that have an outcome"
            )
    return f"'{node}' gave outcomes of '{source}' that break a rule: {error}; look at the groups given"
