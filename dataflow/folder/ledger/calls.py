"""What can be asked of a ledger, a class each: done here in a transaction, or sent to the process that has it open."""

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

from dataflow.folder.ledger import reads, writes
from dataflow.folder.ledger.reads import Counts, Fate, InFlight, MadeStep, PlannedStep

T = TypeVar("T")


@dataclass(frozen=True)
class Said:
    """An answer of numbers, text, and lists and maps of them."""

    value: Any


@dataclass(frozen=True)
class Groups:
    """An answer: groups in flight."""

    value: list[InFlight]


@dataclass(frozen=True)
class Planned:
    """An answer: steps to make again."""

    value: list[PlannedStep]


@dataclass(frozen=True)
class Made:
    """An answer: steps that were made."""

    value: list[MadeStep]


@dataclass(frozen=True)
class Fates:
    """An answer: what became of a group."""

    value: list[Fate]


@dataclass(frozen=True)
class Counted:
    """An answer: what became of a sink's groups."""

    value: Counts


Result: TypeAlias = Said | Groups | Planned | Made | Fates | Counted


class Call(Generic[T]):
    """One call of a ledger, all or nothing."""

    writes: ClassVar[bool] = False
    travels_as: ClassVar[type[Any]] = Said
    """How its answer travels."""
    doing: str
    """For an error."""

    def run(self, db: sqlite3.Connection, now: float) -> T:
        """Do it, in a transaction that the caller has begun. now: seconds since 1970. Errors: LedgerError."""
        raise NotImplementedError


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


@dataclass(frozen=True)
class ReadFacts(Call[dict[str, Any]]):
    """As `BaseLedger.facts`."""

    doing = "read what the run is"

    def run(self, db: sqlite3.Connection, now: float) -> dict[str, Any]:
        """Do it."""
        return reads.facts(db)


@dataclass(frozen=True)
class ReplayPlan(Call[list[PlannedStep]]):
    """As `BaseLedger.replay_plan`."""

    node: str

    travels_as = Planned
    doing = "plan the replay"

    def run(self, db: sqlite3.Connection, now: float) -> list[PlannedStep]:
        """Do it."""
        return reads.replay_plan(db, self.node)


@dataclass(frozen=True)
class NextGroupId(Call[int]):
    """As `BaseLedger.next_group_id`."""

    source: str

    doing = "read the next group id"

    def run(self, db: sqlite3.Connection, now: float) -> int:
        """Do it."""
        return writes.next_group_id(db, self.source)


@dataclass(frozen=True)
class LastStep(Call[int]):
    """As `BaseLedger.last_step`."""

    node: str

    doing = "read the last step"

    def run(self, db: sqlite3.Connection, now: float) -> int:
        """Do it."""
        return writes.last_step(db, self.node)


@dataclass(frozen=True)
class Steps(Call[list[MadeStep]]):
    """As `BaseLedger.steps`."""

    node: str
    after: int
    upto: int | None

    travels_as = Made
    doing = "list the steps"

    def run(self, db: sqlite3.Connection, now: float) -> list[MadeStep]:
        """Do it."""
        return reads.steps(db, self.node, self.after, self.upto)


@dataclass(frozen=True)
class DropsAt(Call[dict[int, str]]):
    """As `BaseLedger.drops_at`."""

    node: str
    step: int

    doing = "read the drops of a step"

    def run(self, db: sqlite3.Connection, now: float) -> dict[int, str]:
        """Do it."""
        return reads.drops_at(db, self.node, self.step)


@dataclass(frozen=True)
class LastRound(Call[int | None]):
    """As `BaseLedger.last_round`."""

    node: str

    doing = "read the last round"

    def run(self, db: sqlite3.Connection, now: float) -> int | None:
        """Do it."""
        return reads.last_round(db, self.node)


@dataclass(frozen=True)
class IsJudged(Call[bool]):
    """As `BaseLedger.is_judged`."""

    source: str
    step: int

    doing = "look a round up"

    def run(self, db: sqlite3.Connection, now: float) -> bool:
        """Do it."""
        return reads.is_judged(db, self.source, self.step)


@dataclass(frozen=True)
class Sources(Call[list[str]]):
    """As `BaseLedger.sources`."""

    node: str | None

    doing = "list the sources"

    def run(self, db: sqlite3.Connection, now: float) -> list[str]:
        """Do it."""
        return reads.sources(db, self.node)


@dataclass(frozen=True)
class ListFates(Call[list[Fate]]):
    """As `BaseLedger.fates`."""

    source: str
    group_id: int

    travels_as = Fates
    doing = "look a group up"

    def run(self, db: sqlite3.Connection, now: float) -> list[Fate]:
        """Do it."""
        return reads.fates(db, self.source, self.group_id)


@dataclass(frozen=True)
class Check(Call[list[str]]):
    """What SQLite finds wrong with the whole database."""

    doing = "be read"

    def run(self, db: sqlite3.Connection, now: float) -> list[str]:
        """Do it."""
        return [said for (said,) in db.execute("PRAGMA quick_check(3)") if said != "ok"]


@dataclass(frozen=True)
class ListInFlight(Call[list[InFlight]]):
    """As `BaseLedger.in_flight`."""

    source: str
    node: str | None
    among: Sequence[int] | None

    travels_as = Groups
    doing = "list groups in flight"

    def run(self, db: sqlite3.Connection, now: float) -> list[InFlight]:
        """Do it."""
        return reads.in_flight(db, self.source, self.node, self.among)


@dataclass(frozen=True)
class Count(Call[Counts]):
    """As `BaseLedger.counts`."""

    node: str

    travels_as = Counted
    doing = "count groups"

    def run(self, db: sqlite3.Connection, now: float) -> Counts:
        """Do it."""
        return reads.counts(db, self.node)


AnyWrite: TypeAlias = (
    SetFacts | Issue | Advance | Reissue | CommitStep | Drop | CommitRound | RecordCheckpoint | RollBack
)  # fmt: skip
AnyRead: TypeAlias = (
    ReadFacts | ReplayPlan | NextGroupId | LastStep | Steps | DropsAt | LastRound | IsJudged | Sources | ListFates
    | Check | ListInFlight | Count
)  # fmt: skip
