"""The ledger in a file: SQLite, so that a crash at any point leaves it right."""

import contextlib
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dataflow.folder.ledger.base import BaseLedger
from dataflow.folder.ledger.copying import pack
from dataflow.folder.ledger.methods import Method
from dataflow.folder.ledger.proof import prove
from dataflow.folder.ledger.schema import (
    LedgerError,
    build,
    check_schema,
    closed_on_error,
    connect,
    transaction,
)
from dataflow.system.files import disk, flush_to_disk


class Ledger(BaseLedger):
    """One connection to the ledger of a run; several processes of one machine may have the same one
    open.
    """

    def __init__(self, db: sqlite3.Connection, path: Path, clock: Callable[[], float]) -> None:
        super().__init__(path)
        self._db, self._clock = db, clock

    @classmethod
    def create(
        cls,
        path: str | Path,
        consumers: Mapping[str, Iterable[str]] | None = None,
        *,
        clock: Callable[[], float] = time.time,
    ) -> "Ledger":
        """A new ledger; `consumers` names, for each sink, the sources that it consumes.

        A sink not named there becomes known with its first outcome.
        Errors: LedgerError when something stands at `path` already, or the disk refuses.
        """
        path = Path(path)
        if path.exists():
            raise LedgerError(f"ledger '{path}' exists already; open it, or make a new run folder")
        db = connect(path, mode="rwc")
        with closed_on_error(db):
            build(db, path)
            ledger = cls(db, path, clock)
            with ledger.transaction("register the sinks"):
                for node, sources in (consumers or {}).items():
                    for source in sources:
                        ledger._register(node, source)
        return ledger

    @classmethod
    def open(
        cls, path: str | Path, *, readonly: bool = False, clock: Callable[[], float] = time.time
    ) -> "Ledger":
        """The ledger that stands at `path`. Errors: LedgerError when there is none, or of another
        release.
        """
        path = Path(path)
        db = connect(path, mode="ro" if readonly else "rw")
        with closed_on_error(db):
            check_schema(db, path)
        return cls(db, path, clock)

    def do(self, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call in a transaction; one that another call makes is part of that one's."""
        self._check_owner()
        if self._db.in_transaction:
            return method.function(self, *args, **kwargs)
        with self.transaction(method.describe(args, kwargs), writes=method.writes):
            return method.function(self, *args, **kwargs)

    @contextlib.contextmanager
    def transaction(self, doing: str, *, writes: bool = True) -> Iterator[sqlite3.Connection]:
        """All or nothing: what the block writes is committed when it ends well, undone when it
        raises. Where nothing writes, all that it reads is of one moment.
        """
        with transaction(self._db, self.path, doing, writes=writes):
            yield self._db

    @classmethod
    def prove(cls, path: Path) -> None:
        """Read the whole database. Errors: LedgerError when it is not as it was written.

        Before anybody opens it to write: what its log cannot give back is gone then, and nothing
        tells of it.
        """
        with (
            cls.open(path, readonly=True) as ledger,
            ledger.transaction("be read", writes=False) as db,
        ):
            prove(path, db)

    def flush(self) -> None:
        """As the base has it: what was committed is in the log of the database, or was moved from
        there into it and flushed by SQLite. The database itself is not opened here: closing it
        would end the locks that SQLite has on it in this process.
        """
        self.flush_log()
        with disk("flushing", self.path.parent):
            flush_to_disk(self.path.parent)

    def flush_log(self) -> None:
        """The same for one who has flushed since the ledger was opened: the log is where it was.
        Errors: as flush().
        """
        self._check_owner()
        with disk("flushing", self._wal), contextlib.suppress(FileNotFoundError):
            flush_to_disk(self._wal)

    def pack(self, into: Path) -> None:
        self._check_owner()
        with into.open("wb") as file:
            pack(self.path, file)

    @property
    def wal_bytes(self) -> int:
        return self._wal.stat().st_size if self._wal.exists() else 0

    def close(self) -> None:
        """End the connection; what was committed stays."""
        self._db.close()

    @property
    def _wal(self) -> Path:
        return self.path.with_name(f"{self.path.name}-wal")
