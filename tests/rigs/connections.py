"""SQLite connections that nobody closes are told of on every Python, with their file; 3.13 does it
by itself.
"""

import sqlite3
import warnings
from typing import Any


class Watched(sqlite3.Connection):
    """Warns, where it is deleted and was not closed."""

    def __init__(self, database: Any, *values: Any, **named: Any) -> None:
        self._database = database
        super().__init__(database, *values, **named)

    def __del__(self) -> None:
        if _is_open(self):
            warnings.warn(
                f"nobody closed the connection to {self._database}",
                ResourceWarning,
                source=self,
                stacklevel=1,
            )


def _is_open(db: sqlite3.Connection) -> bool:
    try:
        return db.total_changes >= 0
    except sqlite3.ProgrammingError:
        return False


_connect = sqlite3.connect


def connect(*values: Any, **named: Any) -> sqlite3.Connection:
    """In the place of sqlite3.connect."""
    return _connect(*values, **{"factory": Watched, **named})
