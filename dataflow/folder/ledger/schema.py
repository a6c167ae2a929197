"""Tables of the ledger, and connections to them that wait with a deadline and fail with reasons."""

import contextlib
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path

import xxhash

from dataflow.errors import RunError

SCHEMA_VERSION = 3
UNSUMMED = 2
"""The version of earlier ledgers, whose rows have no sums; they are read and written all the
same."""
BUSY_TIMEOUT_S = 30.0
WAL_PAGES = 4000  # 16 MB; each time it is full, one call waits for the disk
WAL_BYTES = WAL_PAGES * 4096
"""The size to which the log is cut after a long read made it grow."""
STATES = ("issued", "generating", "generated", "scored")

_STATES_SQL = ", ".join(f"'{state}'" for state in STATES)
SUM = "sum"
"""The column of each row that SQLite fills in: the sum of the others."""
_SUM_FUNCTION = "row_sum"


def summed(columns: Sequence[str]) -> str:
    """The sum of these columns, in SQL."""
    return f"{_SUM_FUNCTION}({', '.join(columns)})"


def table(name: str, columns: str, laws: str) -> str:
    """The statement that makes a table whose rows are summed. columns: one a line."""
    names = [line.split()[0] for line in columns.strip().splitlines()]
    return (
        f"CREATE TABLE IF NOT EXISTS {name} ({columns}\n    , {SUM} INTEGER AS ({summed(names)})"
        f" STORED, {laws}"
    )


_OUTCOME_COLUMNS = """
    source   TEXT NOT NULL,
    group_id INTEGER NOT NULL,
    node     TEXT NOT NULL,     -- the sink: a trainer, or an evaluation
    outcome  TEXT NOT NULL CHECK (outcome IN ('trained', 'dropped', 'evaluated')),
    step     INTEGER,           -- of that sink; null for a drop outside any step
    reason   TEXT               -- of a drop"""
_OUTCOME_LAWS = """CHECK ((outcome = 'dropped') = (reason IS NOT NULL)),
    CHECK (outcome = 'dropped' OR step IS NOT NULL)"""
_STEP_COLUMNS = """
    node       TEXT NOT NULL,
    step       INTEGER NOT NULL CHECK (step >= 1),
    version    INTEGER NOT NULL,
    source     TEXT NOT NULL,
    metrics    TEXT NOT NULL,   -- JSON, as in metrics.jsonl
    at         REAL NOT NULL,   -- seconds since 1970
    checkpoint TEXT"""
_OF_LINE = "\n    line INTEGER NOT NULL,"
_GROUP_COLUMNS = f"""
    source    TEXT NOT NULL,
    group_id  INTEGER NOT NULL CHECK (group_id >= 0),
    prompt_id TEXT NOT NULL,
    state     TEXT NOT NULL CHECK (state IN ({_STATES_SQL})),
    issues    INTEGER NOT NULL  -- 1"""
_LINE_COLUMNS = """
    line      INTEGER PRIMARY KEY,
    node      TEXT NOT NULL,
    to_step   INTEGER NOT NULL,
    from_step INTEGER NOT NULL,
    at        REAL NOT NULL"""

TABLES = (
    "CREATE TABLE schema (version INTEGER NOT NULL)",
    # What a run says of itself, as JSON: copies for people stand in the run folder.
    table(
        "facts", "\n    name TEXT,\n    value TEXT NOT NULL", "PRIMARY KEY (name)) WITHOUT ROWID"
    ),
    table(
        "consumers",
        "\n    node TEXT,\n    source TEXT",
        "PRIMARY KEY (node, source)) WITHOUT ROWID",
    ),
    table("groups", _GROUP_COLUMNS, "PRIMARY KEY (source, group_id)) WITHOUT ROWID"),
    table(
        "outcomes",
        _OUTCOME_COLUMNS,
        f"""{_OUTCOME_LAWS},
    PRIMARY KEY (source, group_id, node),
    FOREIGN KEY (source, group_id) REFERENCES groups (source, group_id)) WITHOUT ROWID""",
    ),
    table("steps", _STEP_COLUMNS, "PRIMARY KEY (node, step)) WITHOUT ROWID"),
    # One row per return to a checkpoint; what it took back stays readable in the two tables after
    # it.
    table("lines", _LINE_COLUMNS, "CHECK (line > 0))"),
    table(
        "abandoned_outcomes",
        _OF_LINE + _OUTCOME_COLUMNS,
        f"""{_OUTCOME_LAWS},
    PRIMARY KEY (line, node, step, source, group_id)) WITHOUT ROWID""",
    ),
    table(
        "abandoned_steps", _OF_LINE + _STEP_COLUMNS, "PRIMARY KEY (node, step, line)) WITHOUT ROWID"
    ),
)

PLACES = table(
    "places",
    """
    path TEXT NOT NULL,   -- in the run folder: a file of rollouts, or the folder of a checkpoint
    host TEXT NOT NULL""",
    "PRIMARY KEY (path, host)) WITHOUT ROWID",
)
"""On which host a file counts, in a run whose hosts have no folder in common."""
HOME = ""
"""Stands for a host: the scheduler's folder, and all hosts that see it."""
WRITERS = table(
    "writers",
    """
    worker  TEXT NOT NULL,
    holder  INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    session INTEGER NOT NULL,
    number  INTEGER NOT NULL,   -- of its last write
    refusal TEXT                -- why that was not made; null where it was""",
    "PRIMARY KEY (worker)) WITHOUT ROWID",
)
"""Who may write, where one process has the ledger open for all."""


class LedgerError(RunError):
    """The ledger cannot be opened, or was asked for something that would break one of its laws."""


def connect(path: Path, *, mode: str, busy_timeout_s: float = BUSY_TIMEOUT_S) -> sqlite3.Connection:
    """Open the database; mode is SQLite's: ro, rw or rwc. Errors: LedgerError."""
    with explained("open", path):
        db = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode={mode}",
            uri=True,
            timeout=busy_timeout_s,
            isolation_level=None,
        )
        with closed_on_error(db):
            db.create_function(_SUM_FUNCTION, -1, _row_sum, deterministic=True)
            db.execute("PRAGMA synchronous = NORMAL")
            db.execute(f"PRAGMA wal_autocheckpoint = {WAL_PAGES}")
            db.execute(f"PRAGMA journal_size_limit = {WAL_BYTES}")
            db.execute("PRAGMA foreign_keys = ON")
    return db


@contextlib.contextmanager
def closed_on_error(db: sqlite3.Connection) -> Iterator[None]:
    """Close the connection if the block raises."""
    try:
        yield
    except BaseException:
        db.close()
        raise


def build(db: sqlite3.Connection, path: Path) -> None:
    """Make the tables in an empty database, in one transaction. Errors: LedgerError."""
    with explained("create", path):
        db.execute("PRAGMA journal_mode = WAL")
    with transaction(db, path, "create"):
        for statement in TABLES:
            db.execute(statement)
        db.execute("INSERT INTO schema VALUES (?)", (SCHEMA_VERSION,))


def check_schema(db: sqlite3.Connection, path: Path) -> None:
    """Refuse a database that this code does not know. Errors: LedgerError."""
    with explained("open", path):
        row = db.execute("SELECT version FROM schema").fetchone()
    if row is None or row[0] not in (SCHEMA_VERSION, UNSUMMED):
        release = "no version" if row is None else f"version {row[0]}"
        raise LedgerError(
            f"ledger '{path}' has a schema of another release: found {release}, "
            f"this code reads {SCHEMA_VERSION}; use the release that wrote it"
        )


def _row_sum(*values: object) -> int:
    # 4 bytes of SQLite's
    return xxhash.xxh32_intdigest(repr(values).encode("utf-8", "surrogateescape")) >> 1


@contextlib.contextmanager
def transaction(
    db: sqlite3.Connection, path: Path, doing: str, *, writes: bool = True
) -> Iterator[None]:
    """All or nothing: what the block writes is committed when it ends well, undone when it
    raises. Where nothing writes, all that it reads is of one moment, whatever others write
    meanwhile.
    """
    with explained(doing, path):
        db.execute("BEGIN IMMEDIATE" if writes else "BEGIN")
        try:
            yield
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise


@contextlib.contextmanager
def explained(doing: str, path: Path) -> Iterator[None]:
    """Turn SQLite's errors into LedgerErrors with three parts."""
    try:
        yield
    except sqlite3.Error as error:
        raise LedgerError(
            f"ledger '{path}' could not {doing}: {error}; {_advice(str(error))}"
        ) from error
    except ValueError as error:
        if isinstance(error, RunError):
            raise
        raise LedgerError(
            f"ledger '{path}' could not {doing}: {error}; {_advice('malformed')}"
        ) from error


def _advice(release: str) -> str:
    for sign, advice in (
        (
            "locked",
            (
                "another process writes to it: look for a stopped worker of this run, or a program"
                " that edits it"
            ),
        ),
        ("full", "make room on that disk, then resume: what was committed is whole"),
        ("readonly", "give this user write permission on the run folder"),
        (
            "unable to open",
            "check that the run folder exists and that this user may read and write it",
        ),
        (
            "no such table",
            (
                "this is not the ledger of a run, or its log, ledger.db-wal, is not there any more:"
                " put both back as they were; where its creation was cut short, start a new run"
            ),
        ),
        (
            "not a database",
            "this is not the ledger of a run, or it was overwritten: take it from a backup",
        ),
        ("malformed", "it was damaged from outside: take it from a backup"),
    ):
        if sign in release:
            return advice
    return "look at the run's logs"
