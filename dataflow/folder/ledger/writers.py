"""Who may write where one process has the ledger open for all: the newest attempt of each worker,
each write once.
"""

import sqlite3
from dataclasses import dataclass

from dataflow.folder.ledger.calls import LedgerCall, Write
from dataflow.folder.ledger.schema import table
from dataflow.folder.ledger.upkeep import AnyWrite

FLOOR = ""
"""Stands for a worker's name: the least number of a scheduler whose workers may write."""
_COLUMNS = """
    worker  TEXT NOT NULL,
    holder  INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    session INTEGER NOT NULL,
    number  INTEGER NOT NULL,   -- of its last write
    refusal TEXT                -- why that was not made; null where it was"""
TABLE = table("writers", _COLUMNS, "PRIMARY KEY (worker)) WITHOUT ROWID")
_ADMIT = "INSERT OR REPLACE INTO writers VALUES (?, ?, ?, ?, 0, NULL)"
_ANSWERED = "UPDATE writers SET number = ?, refusal = ? WHERE worker = ?"


@dataclass(frozen=True)
class Token:
    """A process that writes."""

    worker: str
    holder: int
    """Number of the scheduler that has started it."""
    attempt: int
    """How often that worker was started before by it, and by those whose run it took over."""
    session: int
    """A random number of the process: it tells two processes apart that are otherwise alike."""

    @property
    def age(self) -> tuple[int, int]:
        """Grows with each process that is started in place of another."""
        return self.holder, self.attempt


@dataclass(frozen=True)
class Writer:
    """The newest process of a worker, and its progress."""

    token: Token
    number: int = 0
    """Number of its last write that has an answer: 1, 2, ..."""
    refusal: str | None = None
    """Why that write was not made."""


class PrepareWriters(Write):
    """Make the table for writers."""

    floor: int | None
    """Processes of schedulers before this number may not write any more; None: no change."""

    doing = "prepare for several hosts"

    def run(self, db: sqlite3.Connection, now: float) -> None:
        db.execute(TABLE)
        if self.floor is not None:
            db.execute(_ADMIT, (FLOOR, self.floor, 0, 0))


class ListWriters(LedgerCall[dict[str, Writer]]):
    """The newest process of each worker."""

    doing = "list who writes"

    def run(self, db: sqlite3.Connection, now: float) -> dict[str, Writer]:
        rows = db.execute("SELECT worker, holder, attempt, session, number, refusal FROM writers")
        return {row[0]: Writer(Token(*row[:4]), *row[4:]) for row in rows}


class Admit(Write):
    """Let this process write for its worker from now on."""

    token: Token

    doing = "let a worker write"

    def run(self, db: sqlite3.Connection, now: float) -> None:
        token = self.token
        row = (token.worker, token.holder, token.attempt, token.session)
        db.execute(_ADMIT, row)


class NumberedWrite(Write):
    """A write, and that it was made: so that one who did not hear of it can ask for it again."""

    worker: str
    number: int
    call: AnyWrite

    doing = "write"

    @property
    def said(self) -> str:
        """Text for an error."""
        return self.call.said

    def run(self, db: sqlite3.Connection, now: float) -> None:
        self.call.run(db, now)
        db.execute(_ANSWERED, (self.number, None, self.worker))


class NotMade(Write):
    """Record that a write was refused: a repeated request is refused again, whatever has happened
    since.
    """

    worker: str
    number: int
    why: str

    doing = "note a refusal"

    def run(self, db: sqlite3.Connection, now: float) -> None:
        db.execute(_ANSWERED, (self.number, self.why, self.worker))
