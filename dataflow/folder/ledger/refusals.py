"""Why a ledger refuses what would break one of its laws, in words."""

import sqlite3
from collections.abc import Iterable
from typing import Any

from dataflow.folder.ledger.schema import LedgerError


def some(groups: Iterable[Any]) -> str:
    """The first few of a list, for a message."""
    listed = sorted(groups)
    return f"{listed[:5]}{f' and {len(listed) - 5} more' if len(listed) > 5 else ''}"


def check_same_prompt(db: sqlite3.Connection, source: str, group: int, prompt: str) -> None:
    """LedgerError unless a known group was issued for this prompt."""
    key = (source, int(group))
    row = db.execute(
        "SELECT prompt_id FROM groups WHERE source = ? AND group_id = ?", key
    ).fetchone()
    if row is None or row[0] != str(prompt):
        raise LedgerError(
            f"group {group} of '{source}' was issued for prompt {row and row[0]!r}, "
            f"and now for {prompt!r}; give every group a number of its own, from next_group_id() on"
        )


def conflict(
    db: sqlite3.Connection, node: str, source: str, groups: list[int], error: sqlite3.IntegrityError
) -> str:
    """Why outcomes were refused."""
    if double := {group for group in groups if groups.count(group) > 1}:
        return (
            f"'{node}' gave groups {some(double)} of '{source}' two outcomes in one call; give"
            " each one"
        )
    for group in groups:
        key = (source, group)
        if not db.execute("SELECT 1 FROM groups WHERE source = ? AND group_id = ?", key).fetchone():
            return (
                f"'{node}' ended group {group} of '{source}', which was never issued; issue() it"
                " first"
            )
        row = db.execute(
            "SELECT outcome, step, reason FROM outcomes WHERE source = ? AND group_id = ? AND"
            " node = ?",
            (*key, node),
        ).fetchone()
        if row:
            outcome, step, reason = row
            at = f" at step {step}" if step is not None else ""
            because = f" ({reason})" if reason else ""
            return (
                f"'{node}' would end group {group} of '{source}' twice: it was"
                f" {outcome}{at}{because}; leave out groups that have an outcome"
            )
    return (
        f"'{node}' gave outcomes of '{source}' that break a rule: {error}; look at the groups given"
    )
