"""Puts a ledger in a new file under its name: a process that has the old one open, and must not
write, writes in vain.
"""

import contextlib
import secrets
import shutil
from pathlib import Path

from dataflow.folder.ledger.proof import prove
from dataflow.folder.ledger.schema import check_schema, connect, explained
from dataflow.system.files import disk, flush_to_disk

_MADE = ".renewed"
"""After the name: a whole copy, which only has to be put in place."""


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
