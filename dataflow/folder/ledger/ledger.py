"""The ledger: what became of every prompt group, kept in SQLite so that a crash at any point leaves it right.

A group is (source, group_id). It goes issued -> generating -> generated -> scored, and then has one outcome
for each sink that consumes its source: trained at a step, evaluated at a step, or dropped for a reason.
For each sink, at any moment:

    issued = trained + evaluated + dropped (by reason) + in flight     no group has two outcomes for one sink

Each call is one transaction; several processes of one machine may hold the same ledger open and write to it.
"""

import contextlib
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dataflow.folder.ledger import reads, writes
from dataflow.folder.ledger.reads import Counts, Fate, InFlight, MadeStep, PlannedStep
from dataflow.folder.ledger.schema import (
    LedgerError,
    build,
    check_schema,
    closed_on_error,
    connect,
    snapshot,
    transaction,
)
from dataflow.system.files import disk, flush_to_disk, to_json

__all__ = ["Counts", "Fate", "InFlight", "Ledger", "LedgerError", "MadeStep", "PlannedStep"]


class Ledger:
    """One connection to the ledger of a run, for the process that opened it alone."""

    def __init__(self, db: sqlite3.Connection, path: Path, clock: Callable[[], float]) -> None:
        self.path = path
        self._db = db
        self._clock = clock
        self._owner = os.getpid()

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
            with transaction(db, path, "register the sinks"):
                for node, sources in (consumers or {}).items():
                    for source in sources:
                        writes.register(db, node, source)
        return cls(db, path, clock)

    @classmethod
    def open(cls, path: str | Path, *, readonly: bool = False, clock: Callable[[], float] = time.time) -> "Ledger":
        """The ledger that stands at `path`. Errors: LedgerError when there is none, or of another release."""
        path = Path(path)
        db = connect(path, mode="ro" if readonly else "rw")
        with closed_on_error(db):
            check_schema(db, path)
        return cls(db, path, clock)

    def set_facts(self, facts: Mapping[str, Any]) -> None:
        """Put down what the run says of itself, by name, in place of what it said before under these names."""
        with self._transaction("put down what the run is"):
            writes.set_facts(self._db, {name: to_json(value) for name, value in facts.items()})

    def facts(self) -> dict[str, Any]:
        """What the run says of itself, by name."""
        with self._snapshot("read what the run is"):
            return reads.facts(self._db)

    def issue(self, source: str, prompts: Iterable[tuple[int, str]]) -> None:
        """Record new groups as (group_id, prompt_id), numbered on from the last; known ones stay as they are.

        Errors: LedgerError when a number is skipped, or was issued for another prompt.
        """
        with self._transaction("issue groups"):
            writes.issue(self._db, source, prompts)

    def advance(self, source: str, group_ids: Iterable[int], state: str) -> None:
        """Move groups forward to `state`; those that are there or further stay: a redelivery changes nothing.

        Errors: LedgerError for groups that were never issued.
        """
        with self._transaction(f"advance groups to {state}"):
            writes.advance(self._db, source, group_ids, state)

    def reissue(self, source: str, group_ids: Iterable[int]) -> None:
        """Set groups back to issued: the work on them was lost. Errors: LedgerError for unknown ones."""
        with self._transaction("issue groups again"):
            writes.reissue(self._db, source, group_ids)

    def commit_step(
        self,
        node: str,
        step: int,
        *,
        version: int,
        source: str,
        trained: Iterable[int],
        dropped: Mapping[int, str] | None = None,
        metrics: Mapping[str, Any] | None = None,
        checkpoint: str | None = None,
    ) -> None:
        """Record an optimiser step and the outcome of every group it consumed or gave up: all or nothing.

        version: of the weights after the step. Errors: LedgerError when the step is not the next one of
        `node`, or a group has an outcome for `node` already or was never issued; then nothing is recorded.
        """
        row = (node, step, version, source, to_json(metrics or {}), checkpoint, self._clock())
        outcomes = writes.ended(node, source, "trained", trained, step)
        outcomes += writes.dropped(node, source, dropped or {}, step)
        with self._transaction(f"commit step {step} of '{node}'"):
            writes.add_step(self._db, row)
            writes.end(self._db, node, source, outcomes)

    def drop(self, node: str, source: str, reasons: Mapping[int, str], *, step: int | None = None) -> None:
        """Give groups up, each for a reason; with `step` None they stay dropped through any roll back.

        step: that they would have been trained at; it may be the next one, which is not committed yet.
        Errors: LedgerError when a group has an outcome for `node` already or was never issued.
        """
        with self._transaction(f"drop groups of '{node}'"):
            writes.end(self._db, node, source, writes.dropped(node, source, reasons, step))

    def evaluated(self, node: str, source: str, group_ids: Iterable[int], step: int) -> None:
        """Record that an evaluation read these groups under the weights of `step`. Errors: as drop()."""
        self.commit_round(node, step, {source: group_ids})

    def commit_round(self, node: str, step: int, groups: Mapping[str, Iterable[int]]) -> None:
        """Record a round: the groups that it read of each source, under the weights of `step`. Errors: as drop()."""
        with self._transaction(f"record the evaluation at step {step}"):
            for source, group_ids in groups.items():
                writes.end(self._db, node, source, writes.ended(node, source, "evaluated", group_ids, step))

    def record_checkpoint(self, node: str, step: int, checkpoint: str) -> None:
        """Note where the checkpoint of a committed step stands. Errors: LedgerError without such a step."""
        with self._transaction(f"record the checkpoint of step {step}"):
            writes.record_checkpoint(self._db, node, step, checkpoint)

    def roll_back_to(self, step: int, node: str) -> list[PlannedStep]:
        """Take back every step of `node` after `step`: its groups are scored, and in flight again.

        The abandoned line stays readable. Returns replay_plan(): what to train again, in order.
        A roll back to the last step takes nothing back, and records that the run went on from there.
        Errors: LedgerError when `node` never came to `step`.
        """
        with self._transaction(f"roll '{node}' back to step {step}"):
            writes.roll_back(self._db, node, step, self._clock())
        return self.replay_plan(node)

    def replay_plan(self, node: str) -> list[PlannedStep]:
        """What abandoned lines made after the last step of `node`: groups and drops per step, to repeat."""
        with self._snapshot("plan the replay"):
            return reads.replay_plan(self._db, node)

    def next_group_id(self, source: str) -> int:
        """The number that `source` gives to its next group."""
        with self._snapshot("read the next group id"):
            return writes.next_group_id(self._db, source)

    def last_step(self, node: str) -> int:
        """The last committed step of `node`; 0 before the first."""
        with self._snapshot("read the last step"):
            return writes.last_step(self._db, node)

    def steps(self, node: str, after: int = 0, upto: int | None = None) -> list[MadeStep]:
        """The committed steps of `node` above `after` and not above `upto`, with what each consumed, ascending."""
        with self._snapshot("list the steps"):
            return reads.steps(self._db, node, after, upto)

    def drops_at(self, node: str, step: int) -> dict[int, str]:
        """Groups that `node` gave up for a step, and why; drops of the next one may be known before it is made."""
        with self._snapshot("read the drops of a step"):
            return reads.drops_at(self._db, node, step)

    def last_round(self, node: str) -> int | None:
        """Step of the last round that evaluation `node` has recorded; None before the first."""
        with self._snapshot("read the last round"):
            return reads.last_round(self._db, node)

    def is_judged(self, source: str, step: int) -> bool:
        """Whether every sink of `source` has recorded its round of this step, or a later one."""
        with self._snapshot("look a round up"):
            return reads.is_judged(self._db, source, step)

    def sources(self, node: str | None = None) -> list[str]:
        """The sources whose groups `node` consumes; those of all sinks for None."""
        with self._snapshot("list the sources"):
            return reads.sources(self._db, node)

    def fates(self, source: str, group_id: int) -> list[Fate]:
        """What each sink did with a group; none while it is in flight."""
        with self._snapshot("look a group up"):
            return reads.fates(self._db, source, group_id)

    def check(self) -> None:
        """Read the whole database. Errors: LedgerError when it is damaged."""
        with self._snapshot("be read"):
            found = [said for (said,) in self._db.execute("PRAGMA quick_check(3)") if said != "ok"]
        if found:
            raise LedgerError(f"ledger '{self.path}' is damaged: {'; '.join(found)}; take it from a backup")

    def in_flight(self, source: str, node: str | None = None, among: Iterable[int] | None = None) -> list[InFlight]:
        """Groups of `source` that some sink still waits for, or that `node` does, in issue order.

        among: look at these alone, which takes no longer in a long run; None: at all that were ever issued.
        """
        with self._snapshot("list groups in flight"):
            return reads.in_flight(self._db, source, node, among)

    def counts(self, node: str) -> Counts:
        """What became of the groups of the sources that `node` consumes, counted from the rows."""
        with self._snapshot("count groups"):
            return reads.counts(self._db, node)

    def verdict(self, node: str) -> str:
        """The law of the ledger in figures, for one sink."""
        found = self.counts(node)
        return f"{'clean' if found.missing == 0 else 'BROKEN'}: {found}"

    def flush(self) -> None:
        """Bring all that was committed to the disk itself; from any thread, and whoever reads meanwhile.

        Called before a checkpoint is marked, so that no power cut leaves one whose step the ledger forgot. What was
        committed is in the log of the database, or was moved from there into it and flushed by SQLite. The database
        itself is not opened here: closing it would end the locks that SQLite has on it in this process.
        Errors: RunFolderError when the disk refuses.
        """
        self._check_owner()
        with disk("flushing", self._wal):
            with contextlib.suppress(FileNotFoundError):
                flush_to_disk(self._wal)
            flush_to_disk(self.path.parent)

    @property
    def wal_bytes(self) -> int:
        """Size of the database's log: bounded, unless somebody reads in a transaction that does not end."""
        return self._wal.stat().st_size if self._wal.exists() else 0

    @property
    def _wal(self) -> Path:
        return self.path.with_name(f"{self.path.name}-wal")

    def close(self) -> None:
        """End the connection; what was committed stays."""
        self._db.close()

    def __enter__(self) -> "Ledger":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _transaction(self, doing: str) -> Iterator[None]:
        self._check_owner()
        with transaction(self._db, self.path, doing):
            yield

    @contextlib.contextmanager
    def _snapshot(self, doing: str) -> Iterator[None]:
        self._check_owner()
        with snapshot(self._db, self.path, doing):
            yield

    def _check_owner(self) -> None:
        if os.getpid() != self._owner:
            raise LedgerError(
                f"ledger '{self.path}' was opened by process {self._owner} and is used by {os.getpid()}; "
                f"open it anew in each process"
            )
