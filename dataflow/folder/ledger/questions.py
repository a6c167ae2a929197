"""What can be asked of a ledger, a class each, and how the answers travel."""

import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from dataflow.folder.ledger import places, reads
from dataflow.folder.ledger.calls import LedgerCall, Value, last_step, next_group_id
from dataflow.folder.ledger.reads import Fate, InFlight, MadeStep, OutcomeCounts, PlannedStep
from dataflow.system.messages import Message


class Groups(Message):
    """An answer: groups in flight."""

    value: list[InFlight]


class Planned(Message):
    """An answer: steps to make again."""

    value: list[PlannedStep]


class StepsMade(Message):
    """An answer: steps that were made."""

    value: list[MadeStep]


class Fates(Message):
    """An answer: what became of a group."""

    value: list[Fate]


class Counted(Message):
    """An answer: what became of a sink's groups."""

    value: OutcomeCounts


Result: TypeAlias = Value | Groups | Planned | StepsMade | Fates | Counted


class ReadFacts(LedgerCall[dict[str, Any]]):
    """As `BaseLedger.facts`."""

    doing = "read what the run is"

    def run(self, db: sqlite3.Connection, now: float) -> dict[str, Any]:
        return reads.facts(db)


class ReplayPlan(LedgerCall[list[PlannedStep]]):
    """As `BaseLedger.replay_plan`."""

    node: str

    travels_as = Planned
    doing = "plan the replay"

    def run(self, db: sqlite3.Connection, now: float) -> list[PlannedStep]:
        return reads.replay_plan(db, self.node)


class NextGroupId(LedgerCall[int]):
    """As `BaseLedger.next_group_id`."""

    source: str

    doing = "read the next group id"

    def run(self, db: sqlite3.Connection, now: float) -> int:
        return next_group_id(db, self.source)


class LastStep(LedgerCall[int]):
    """As `BaseLedger.last_step`, or `BaseLedger.furthest_step`."""

    node: str
    ever: bool = False

    doing = "read the last step"

    def run(self, db: sqlite3.Connection, now: float) -> int:
        return max(
            last_step(db, self.node), reads.furthest_return(db, self.node) if self.ever else 0
        )


class ListSteps(LedgerCall[list[MadeStep]]):
    """As `BaseLedger.steps`."""

    node: str
    after: int
    upto: int | None

    travels_as = StepsMade
    doing = "list the steps"

    def run(self, db: sqlite3.Connection, now: float) -> list[MadeStep]:
        return reads.steps(db, self.node, self.after, self.upto)


class StepTimes(LedgerCall[Sequence[tuple[int, float]]]):
    """As `BaseLedger.step_times`."""

    node: str
    after: int

    doing = "list when steps of '{node}' were made"

    def run(self, db: sqlite3.Connection, now: float) -> Sequence[tuple[int, float]]:
        return reads.step_times(db, self.node, self.after)


class DropsAt(LedgerCall[dict[int, str]]):
    """As `BaseLedger.drops_at`."""

    node: str
    step: int

    doing = "read the drops of a step"

    def run(self, db: sqlite3.Connection, now: float) -> dict[int, str]:
        return reads.drops_at(db, self.node, self.step)


class LastRound(LedgerCall[int | None]):
    """As `BaseLedger.last_round`."""

    node: str

    doing = "read the last round"

    def run(self, db: sqlite3.Connection, now: float) -> int | None:
        return reads.last_round(db, self.node)


class IsJudged(LedgerCall[bool]):
    """As `BaseLedger.is_judged`."""

    source: str
    step: int

    doing = "look a round up"

    def run(self, db: sqlite3.Connection, now: float) -> bool:
        return reads.is_judged(db, self.source, self.step)


class Sources(LedgerCall[list[str]]):
    """As `BaseLedger.sources`."""

    node: str | None

    doing = "list the sources"

    def run(self, db: sqlite3.Connection, now: float) -> list[str]:
        return reads.sources(db, self.node)


class ListFates(LedgerCall[list[Fate]]):
    """As `BaseLedger.fates`."""

    source: str
    group_id: int

    travels_as = Fates
    doing = "look a group up"

    def run(self, db: sqlite3.Connection, now: float) -> list[Fate]:
        return reads.fates(db, self.source, self.group_id)


class ListInFlight(LedgerCall[list[InFlight]]):
    """As `BaseLedger.in_flight`."""

    source: str
    node: str | None
    among: Sequence[int] | None

    travels_as = Groups
    doing = "list groups in flight"

    def run(self, db: sqlite3.Connection, now: float) -> list[InFlight]:
        return reads.in_flight(db, self.source, self.node, self.among)


class Count(LedgerCall[OutcomeCounts]):
    """As `BaseLedger.counts`."""

    node: str

    travels_as = Counted
    doing = "count groups"

    def run(self, db: sqlite3.Connection, now: float) -> OutcomeCounts:
        return reads.counts(db, self.node)


class ListPlaces(LedgerCall[Mapping[str, str]]):
    """As `places.places`."""

    prefix: str

    doing = "list where files lie"

    def run(self, db: sqlite3.Connection, now: float) -> Mapping[str, str]:
        return places.places(db, self.prefix)


class LeastReturn(LedgerCall[int | None]):
    """As `places.least_return`."""

    doing = "look for returns"

    def run(self, db: sqlite3.Connection, now: float) -> int | None:
        return places.least_return(db)


AnyRead: TypeAlias = (
    ReadFacts
    | ReplayPlan
    | NextGroupId
    | LastStep
    | ListSteps
    | StepTimes
    | DropsAt
    | LastRound
    | IsJudged
    | Sources
    | ListFates
    | ListInFlight
    | Count
    | ListPlaces
    | LeastReturn
)
