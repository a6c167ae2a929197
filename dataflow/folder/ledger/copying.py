"""A copy of a ledger that others go on writing to: of one moment, packed; and a ledger out of such
a copy.
"""

import contextlib
import secrets
import shutil
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from dataflow.folder.ledger.schema import check_schema, connect, explained
from dataflow.system.files import disk

_CODEC = "zstd"


class _Kept:
    """A file that stays open when its writer is closed."""

    closed = False

    def __init__(self, file: IO[bytes]) -> None:
        self.write, self.flush = file.write, file.flush

    def close(self) -> None:
        """Does nothing; the owner closes the file."""


def pack(path: Path, into: IO[bytes]) -> None:
    """Write what was committed to the ledger at `path`, compressed; nobody is held up. From any
    thread of any process of its host, beside its own connections. Errors: LedgerError;
    RunFolderError.
    """
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.copy")
    try:
        with (
            explained("be copied", path),
            contextlib.closing(connect(path, mode="ro")) as db,
            contextlib.closing(connect(aside, mode="rwc")) as copy,
        ):
            db.backup(copy)
            copy.execute("PRAGMA journal_mode = DELETE")
        with disk("packing", path), aside.open("rb") as plain:
            with pa.CompressedOutputStream(pa.PythonFile(_Kept(into), "w"), _CODEC) as packed:
                shutil.copyfileobj(plain, packed, 1 << 20)
            into.flush()
    finally:
        for name in (aside.name, f"{aside.name}-journal", f"{aside.name}-wal", f"{aside.name}-shm"):
            with contextlib.suppress(OSError):
                aside.with_name(name).unlink(missing_ok=True)


def unpack(packed: Path, path: Path) -> int:
    """Make a ledger out of such a copy, for a run that goes on from it: nobody writes there yet.

    Returns how many steps were ever committed there: of two copies of one run the one with more is
    the later one. Errors: LedgerError; RunFolderError.
    """
    with disk("unpacking", packed):
        try:
            with pa.CompressedInputStream(str(packed), _CODEC) as source, path.open("wb") as plain:
                shutil.copyfileobj(source, plain, 1 << 20)
        except pa.ArrowException as error:
            raise OSError(str(error)) from error
    with explained("be unpacked", path), contextlib.closing(connect(path, mode="rw")) as db:
        check_schema(db, path)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("DROP TABLE IF EXISTS writers")
        counted: Any = db.execute(
            "SELECT (SELECT count(*) FROM steps) + (SELECT count(*) FROM abandoned_steps)"
        ).fetchone()
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return int(counted[0])
