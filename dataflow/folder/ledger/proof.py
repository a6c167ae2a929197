"""Checks that a ledger is as it was written: its pages, its rows, and the log of the last
commits."""

import contextlib
import functools
import sqlite3
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from dataflow.folder.ledger.schema import (
    PLACES,
    SUM,
    TABLES,
    UNSUMMED,
    WRITERS,
    LedgerError,
    summed,
)

_HEADER_BYTES, _FRAME_BYTES = 32, 24
"""Of a log, and of each page in it: https://www.sqlite.org/fileformat2.html#the_write_ahead_log."""
_MAGIC = {0x377F0682: "<u4", 0x377F0683: ">u4"}
"""The first bytes of a log, and the byte order in which its words are summed."""
_MOST = 3
_KNOWN = {
    statement.replace("IF NOT EXISTS ", ""): statement.partition(" (")[0].rpartition(" ")[2]
    for statement in (*TABLES, PLACES, WRITERS)
}
"""By how SQLite keeps the statement that makes a table, its name."""

Words: TypeAlias = npt.NDArray[np.uint32]


def prove(path: Path, db: sqlite3.Connection) -> None:
    """Errors: LedgerError where a ledger, of which `db` is a connection, is not as it was
    written.
    """
    if damage := damages(path, db):
        raise LedgerError(
            f"ledger '{path}' is damaged: {'; '.join(damage[:_MOST])}; take it from a backup, go on"
            " from copies at an address (dataflow resume --from), or begin a new run from a"
            " checkpoint's folder: Model('FOLDER')"
        )


def damages(path: Path, db: sqlite3.Connection) -> list[str]:
    """What is wrong with a ledger; within a transaction that reads. What the log lost can be told
    only as long as nobody has written: SQLite then begins behind what it could read.
    """
    damage = _log_damage(path.with_name(f"{path.name}-wal"))
    if db.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
        damage.append("its first page says that it has no log")
    damage += [line for (line,) in db.execute(f"PRAGMA quick_check({_MOST})") if line != "ok"]
    if damage:
        return damage
    version = db.execute("SELECT version FROM schema").fetchone()[0]
    for name, statement in db.execute("SELECT name, sql FROM sqlite_master").fetchall():
        if version != UNSUMMED and not name.startswith("sqlite_") and statement not in _KNOWN:
            damage.append(f"{name} is no table that a run makes")
    for name in [] if damage else _KNOWN.values():
        of_table = list(db.execute(f"PRAGMA table_xinfo({name})"))
        columns = [column for _, column, *_, hidden in of_table if not hidden]
        query = f"SELECT count(*) FROM {name} WHERE {SUM} IS NOT {summed(columns)}"
        if len(columns) < len(of_table) and (count := db.execute(query).fetchone()[0]):
            damage.append(
                f"{count} row{'s' if count > 1 else ''} of its table {name} are not as they were"
                " written"
            )
    return damage


def _log_damage(log: Path) -> list[str]:
    """What cannot be read of a log that was committed; none where a crash cut it off, which commits
    nothing.
    """
    while True:
        content = b""
        with contextlib.suppress(FileNotFoundError):
            content = log.read_bytes()
        lost = _lost_in(content)
        if not lost or _head(log) == content[:_HEADER_BYTES]:
            return lost
        # somebody has begun it anew meanwhile


def _head(log: Path) -> bytes:
    with contextlib.suppress(FileNotFoundError), log.open("rb") as file:
        return file.read(_HEADER_BYTES)
    return b""


def _lost_in(content: bytes) -> list[str]:
    """SQLite reads a log up to the first page whose sum is not right. A page behind that follows on
    from the one before it, and ends a transaction, was committed; so was a last one that ends a
    transaction, and the file.
    """
    if len(content) < _HEADER_BYTES:
        return []
    head = np.frombuffer(content, ">u4", 8)
    order, page = _MAGIC.get(int(head[0])), int(head[2])
    words = np.frombuffer(content, order or ">u4", 6).astype(np.uint32)
    if (
        order is None
        or page < 512
        or tuple(_sums(words[None], np.zeros((1, 2), np.uint32))[0]) != tuple(head[6:])
    ):
        return ["the first bytes of its log, ledger.db-wal, are not as they were written"]
    count = (len(content) - _HEADER_BYTES) // (_FRAME_BYTES + page)
    frames = np.frombuffer(content, np.uint8, count * (_FRAME_BYTES + page), _HEADER_BYTES).reshape(
        count, -1
    )
    heads = np.ascontiguousarray(frames[:, :_FRAME_BYTES]).view(">u4")
    body = (
        np.concatenate([frames[:, :8], frames[:, _FRAME_BYTES:]], axis=1)
        .view(order)
        .astype(np.uint32)
    )
    before = np.concatenate([head[None, 6:], heads[:-1, 4:]]).astype(np.uint32)
    is_own = (heads[:, 2:4] == head[4:6]).all(axis=1)
    is_next = is_own & (_sums(body, before) == heads[:, 4:]).all(axis=1)
    broken = np.flatnonzero(~is_next)
    is_next[-1:] |= is_own[-1:]
    lost = broken.size and (is_next & (heads[:, 1] != 0))[broken[0] :].any()
    return (
        [f"its log, ledger.db-wal, cannot be read behind page {broken[0]} of {count}"]
        if lost
        else []
    )


def _sums(words: Words, before: Words) -> Words:
    """The sums of rows of words, each going on from its two sums before; uint32 [rows, 2], modulo
    2**32.
    """
    weights, start = _weights(words.shape[1] // 2)
    sums: Words = words @ weights + before @ start
    return sums


@functools.cache
def _weights(pairs: int) -> tuple[Words, Words]:
    """What each word, and each of the two sums before, adds to the two sums: of a pair, s0 += first
    + s1, and then s1 += second + s0.
    """
    step, own = np.array([[1, 1], [1, 2]], np.uint32), np.array([[1, 0], [1, 1]], np.uint32)
    of_pair, power = [], np.eye(2, dtype=np.uint32)
    for _ in range(pairs):
        of_pair.append((power @ own).T)
        power = power @ step
    return np.concatenate(of_pair[::-1]), power.T
