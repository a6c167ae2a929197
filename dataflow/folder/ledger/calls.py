"""What can be done to a ledger, a class each: done here in a transaction, or sent to the process that has it open."""

import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

from dataflow.folder.ledger import places, writes

T = TypeVar("T")


@dataclass(frozen=True)
class Value:
    """An answer of numbers, text, and lists and maps of them."""

    value: Any


class Call(ABC, Generic[T]):
    """One call of a ledger, all or nothing."""

    writes: ClassVar[bool] = False
    travels_as: ClassVar[type[Any]] = Value
    """How its answer travels."""
    doing: str
    """For an error."""

    @abstractmethod
    def run(self, db: sqlite3.Connection, now: float) -> T:
        """Do it, in a transaction that the caller has begun. now: seconds since 1970. Errors: LedgerError."""


class Write(Call[None]):
    """One that changes the ledger, and has no answer but that it is done."""

    writes = True


@dataclass(frozen=True)
class SetFacts(Write):
    """As `BaseLedger.set_facts`; the values are JSON."""

    facts: Mapping[str, str]

    doing = "put down what the run is"

    def run(self, db: sqlite3.Connection, now: float) -> None:
        """Do it."""
        writes.set_facts(db, self.facts)


@dataclass(frozen=True)
class Issue(Write):
    """As `BaseLedger.issue`."""

    source: str
    prompts: Sequence[tuple[int, str]]

    doing = "issue groups"

    def run(self, db: sqlite3.Connection, now: float) -> None:
        """Do it."""
        writes.issue(db, self.source, self.prompts)


@dataclass(frozen=True)
class Advance(Write):
    """As `BaseLedger.advance`."""

    source: str
    group_ids: Sequence[int]
    state: str

    @property
    def doing(self) -> str:  # type: ignore[override]
        """For an error."""
        return f"advance groups to {self.state}"

    def run(self, db: sqlite3.Connection, now: float) -> None:
        """Do it."""
        writes.advance(db, self.source, self.group_ids, self.state)


@dataclass(frozen=True)
class Reissue(Write):
    """As `BaseLedger.reissue`."""

    source: str
    group_ids: Sequence[int]

    doing = "issue groups again"

    def run(self, db: sqlite3.Connection, now: float) -> None:
        """Do it."""
        writes.reissue(db, self.source, self.group_ids)


@dataclass(frozen=True)
class CommitStep(Write):
    """As `BaseLedger.commit_step`; metrics are JSON."""

    node: str
    step: int
    version: int
    source: str
    trained: Sequence[int]
    dropped: Mapping[int, str]
    metrics: str
    checkpoint: str | None

    @property
    def doing(self) -> str:  # type: ignore[override]
        """For an error."""
        return f"commit step {self.step} of '{self.node}'"

    def run(self, db: sqlite3.Connection, now: float) -> None:
        """Do it."""
        row = (self.node, self.step, self.version, self.source, self.metrics, self.checkpoint, now)
        outcomes = writes.ended(self.node, self.source, "trained", self.trained, self.step)
        outcomes += writes.dropped(self.node, self.source, self.dropped, self.step)
        writes.add_step(db, row)
        writes.end(db, self.node, self.source, outcomes)


@dataclass(frozen=True)
class Drop(Write):
    """As `BaseLedger.drop`."""

    node: str
    source: str
    reasons: Mapping[int, str]
    step: int | None

    @property
    def doing(self) -> str:  # type: ignore[override]
        """For an error."""
        return f"drop groups of '{self.node}'"

    def run(self, db: sqlite3.Connection, now: float) -> None:
        """Do it."""
        writes.end(db, self.node, self.source, writes.dropped(self.node, self.source, self.reasons, self.step))


@dataclass(frozen=True)
class CommitRound(Write):
    """As `BaseLedger.commit_round`."""

    node: str
    step: int
    groups: Mapping[str, Sequence[int]]

    @property
    def doing(self) -> str:  # type: ignore[override]
        """For an error."""
        return f"record the evaluation at step {self.step}"

    def run(self, db: sqlite3.Connection, now: float) -> None:
        """Do it."""
        for source, group_ids in self.groups.items():
            writes.end(db, self.node, source, writes.ended(self.node, source, "evaluated", group_ids, self.step))


@dataclass(frozen=True)
class RecordCheckpoint(Write):
    """As `BaseLedger.record_checkpoint`."""

    node: str
    step: int
    checkpoint: str

    @property
    def doing(self) -> str:  # type: ignore[override]
        """For an error."""
        return f"record the checkpoint of step {self.step}"

    def run(self, db: sqlite3.Connection, now: float) -> None:
        """Do it."""
        writes.record_checkpoint(db, self.node, self.step, self.checkpoint)


@dataclass(frozen=True)
class RollBack(Write):
    """As `BaseLedger.roll_back_to`, without its answer."""

    step: int
    node: str

    @property
    def doing(self) -> str:  # type: ignore[override]
        """For an error."""
        return f"roll '{self.node}' back to step {self.step}"

    def run(self, db: sqlite3.Connection, now: float) -> None:
        """Do it."""
        writes.roll_back(db, self.node, self.step, now)
        places.forget_after(db, self.node, self.step)


@dataclass(frozen=True)
class SetPlace(Write):
    """As `places.set_place`."""

    path: str
    host: str

    @property
    def doing(self) -> str:  # type: ignore[override]
        """For an error."""
        return f"note where '{self.path}' lies"

    def run(self, db: sqlite3.Connection, now: float) -> None:
        """Do it."""
        places.set_place(db, self.path, self.host)


@dataclass(frozen=True)
class AddPlace(Write):
    """As `places.add_place`."""

    path: str
    host: str

    @property
    def doing(self) -> str:  # type: ignore[override]
        """For an error."""
        return f"note a copy of '{self.path}'"

    def run(self, db: sqlite3.Connection, now: float) -> None:
        """Do it."""
        places.add_place(db, self.path, self.host)


AnyWrite: TypeAlias = (
    SetFacts | Issue | Advance | Reissue | CommitStep | Drop | CommitRound | RecordCheckpoint | RollBack
    | AddPlace
)  # fmt: skip
