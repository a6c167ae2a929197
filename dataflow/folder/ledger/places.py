"""On which host a file of a run counts whose hosts have no folder in common: rows of the ledger, so
that they are written in their turn, by the newest attempt alone, and taken back with the steps that
they belong to.

A path without a row is in the scheduler's folder, or nowhere.
"""

import re
import sqlite3

from dataflow.folder.ledger.schema import table

HOME = ""
"""Stands for a host: the scheduler's folder, and all hosts that see it."""
_COLUMNS = """
    path TEXT NOT NULL,   -- in the run folder: a file of rollouts, or the folder of a checkpoint
    host TEXT NOT NULL"""
TABLE = table("places", _COLUMNS, "PRIMARY KEY (path, host)) WITHOUT ROWID")
_IS_THERE = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'places'"
_OF_STEP = re.compile(
    r"(?:checkpoints|rollouts)/(?:(?P<node>[^/]+)/)?step-(?P<step>\d+)(?:\.arrow)?"
)


def prepare(db: sqlite3.Connection) -> None:
    """Make the table for places."""
    db.execute(TABLE)


def set_place(db: sqlite3.Connection, path: str, host: str) -> None:
    """What stands at a path counts on this host, and on no other."""
    prepare(db)
    db.execute("DELETE FROM places WHERE path = ?", (path,))
    db.execute("INSERT INTO places VALUES (?, ?)", (path, host))


def places(db: sqlite3.Connection, prefix: str = "") -> dict[str, str]:
    """By path that begins so, the host that has it; what nothing is noted of is not among them."""
    if not db.execute(_IS_THERE).fetchone():
        return {}
    return dict(
        db.execute(
            "SELECT path, host FROM places WHERE substr(path, 1, ?) = ? ORDER BY path",
            (len(prefix), prefix),
        )
    )


def forget_after(db: sqlite3.Connection, node: str, step: int) -> None:
    """A node's steps after this one were taken back: forget who has their files."""
    for path in places(db):
        match = _OF_STEP.fullmatch(path)
        if match and match["node"] in (None, node) and int(match["step"]) > step:
            db.execute("DELETE FROM places WHERE path = ?", (path,))


def least_return(db: sqlite3.Connection) -> int | None:
    """The earliest step that a trainer ever went back to, giving up later steps; None: none did."""
    row = db.execute("SELECT min(to_step) FROM lines WHERE from_step > to_step").fetchone()
    return None if row[0] is None else int(row[0])
