"""Copies of a ledger: one of a moment, packed, while others go on writing; a ledger out of such a
copy; and a copy in the file's place, so that a process that has the old one open, and must not
write, writes in vain.
"""

import contextlib
import secrets
import shutil
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from dataflow.folder.ledger.proof import prove
from dataflow.folder.ledger.schema import check_schema, connect, explained
from dataflow.system.files import disk, flush_to_disk

_CODEC = "zstd"
_MADE = ".renewed"
"""After the name: a whole copy, which only has to be put in place."""


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


def renew(path: Path) -> None:
    """Copy what was committed, and put the copy in the place of the file. No lock is waited for:
    who holds one may be stopped, or on a host that is cut off.

    A crash on the way leaves the old file, or a copy that the next call puts in place; nobody else
    may have the ledger open meanwhile but who writes for nobody. Nothing is done where there is no
    ledger. Errors: LedgerError; RunFolderError.
    """
    renewed = path.with_name(f"{path.name}{_MADE}")
    if renewed.exists():
        _put(renewed, path)
    if not path.exists():
        return
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with disk("copying", path):
        try:
            aside.mkdir()
            for file in (path, _log(path)):  # the log last: it has all that the file lacks
                with contextlib.suppress(FileNotFoundError):
                    shutil.copyfile(file, aside / file.name)
            copy = aside / path.name
            with explained("copy", path), contextlib.closing(connect(copy, mode="rw")) as db:
                check_schema(db, path)
                prove(copy, db)
                db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            flush_to_disk(copy)
            copy.replace(renewed)
            flush_to_disk(path.parent)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    _put(renewed, path)


def _put(renewed: Path, path: Path) -> None:
    with disk("putting in place", path):
        for file in (_log(path), path.with_name(f"{path.name}-shm")):
            file.unlink(missing_ok=True)
        renewed.replace(path)
        flush_to_disk(path.parent)


def _log(path: Path) -> Path:
    return path.with_name(f"{path.name}-wal")
