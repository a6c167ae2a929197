"""The calls of a ledger, whoever answers them: the process itself, or the one that has the file
open for all.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

from dataflow.folder.ledger import calls, questions, upkeep
from dataflow.folder.ledger.reads import Fate, InFlight, MadeStep, OutcomeCounts, PlannedStep
from dataflow.folder.ledger.schema import LedgerError
from dataflow.folder.placing import Placing
from dataflow.system.files import to_json

# The calls of a ledger by which a group goes from its issue to its outcome, whoever answers them.

T = TypeVar("T")


class GroupLedger(ABC):
    """What becomes of prompt groups.

    A group is (source, group_id). It goes issued -> generating -> generated -> scored, and then has
    one outcome for each sink that consumes its source: trained at a step, evaluated at a step, or
    dropped for a reason. For each sink, at any moment:

        issued = trained + evaluated + dropped (by reason) + in flight
        no group has two outcomes for one sink

    Each call is one transaction. Errors of all: LedgerError.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        """Where the file is."""
        self._owner = os.getpid()

    @abstractmethod
    def do(self, call: calls.LedgerCall[T]) -> T:
        """Have it done, all or nothing."""

    def _post(self, call: calls.Write) -> None:
        """Post a call: it is done before any later call, and its error may come with that."""
        self.do(call)

    def issue(self, source: str, prompts: Iterable[tuple[int, str]]) -> None:
        """Record new groups as (group_id, prompt_id), numbered on from the last; known ones stay as
        they are.

        Errors: LedgerError when a number is skipped, or was issued for another prompt.
        """
        self.do(calls.Issue(source, [(int(group), str(prompt)) for group, prompt in prompts]))

    def advance(self, source: str, group_ids: Iterable[int], state: str) -> None:
        """Move groups forward to `state`; those that are there or further stay: a redelivery
        changes nothing.

        Errors: LedgerError for groups that were never issued; where a service has the ledger, with
        a later call.
        """
        self._post(calls.Advance(source, numbers_of(group_ids), state))

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
        """Record an optimiser step and the outcome of every group it consumed or gave up: all or
        nothing.

        version: of the weights after the step. Errors: LedgerError when the step is not the next
        one of `node`, or a group has an outcome for `node` already or was never issued; then
        nothing is recorded.
        """
        self.do(
            calls.CommitStep(
                node,
                int(step),
                int(version),
                source,
                numbers_of(trained),
                _reasons(dropped or {}),
                to_json(metrics or {}),
                checkpoint,
            )
        )

    def drop(
        self, node: str, source: str, reasons: Mapping[int, str], *, step: int | None = None
    ) -> None:
        """Give groups up, each for a reason; with `step` None they stay dropped through any roll
        back.

        step: that they would have been trained at; it may be the next one, which is not committed
        yet. Errors: LedgerError when a group has an outcome for `node` already or was never issued.
        """
        self.do(calls.Drop(node, source, _reasons(reasons), step))

    def evaluated(self, node: str, source: str, group_ids: Iterable[int], step: int) -> None:
        """Record that an evaluation read these groups under the weights of `step`. Errors: as
        drop().
        """
        self.commit_round(node, step, {source: group_ids})

    def commit_round(self, node: str, step: int, groups: Mapping[str, Iterable[int]]) -> None:
        """Record a round: the groups that it read of each source, under the weights of `step`.
        Errors: as drop().
        """
        self.do(
            calls.CommitRound(
                node, int(step), {source: numbers_of(ids) for source, ids in groups.items()}
            )
        )


def numbers_of(groups: Iterable[int]) -> list[int]:
    """As plain numbers, which travel."""
    return [int(group) for group in groups]


def _reasons(reasons: Mapping[int, str]) -> dict[int, str]:
    return {int(group): str(reason) for group, reason in reasons.items()}


class BaseLedger(GroupLedger):
    """What became of every prompt group; for the process that opened it alone, and there for one
    thread, but `flush`, `pack` and `wal_bytes`.
    """

    @property
    def placing(self) -> Placing:
        """How what the process that opened it writes in the run folder gets its name."""
        return Placing()

    def set_facts(self, facts: Mapping[str, Any]) -> None:
        """Put down what the run says of itself, by name, in place of what it said before under
        these names.
        """
        self.do(upkeep.SetFacts({name: to_json(value) for name, value in facts.items()}))

    def facts(self) -> dict[str, Any]:
        """What the run says of itself, by name."""
        return self.do(questions.ReadFacts())

    def reissue(self, source: str, group_ids: Iterable[int]) -> None:
        """Set groups back to issued: the work on them was lost. Errors: LedgerError for unknown
        ones.
        """
        self.do(upkeep.Reissue(source, numbers_of(group_ids)))

    def record_checkpoint(self, node: str, step: int, checkpoint: str | None) -> None:
        """Note where the checkpoint of a committed step stands; None: nowhere any more. Errors:
        LedgerError without such a step.
        """
        self.do(upkeep.RecordCheckpoint(node, int(step), checkpoint))

    def roll_back_to(self, step: int, node: str) -> list[PlannedStep]:
        """Take back every step of `node` after `step`: its groups are scored, and in flight again.

        The abandoned line stays readable. Returns replay_plan(): what to train again, in order.
        A roll back to the last step takes nothing back, and records that the run went on from
        there. Errors: LedgerError when `node` never came to `step`.
        """
        self.do(upkeep.RollBack(int(step), node))
        return self.replay_plan(node)

    def replay_plan(self, node: str) -> list[PlannedStep]:
        """What abandoned lines made after the last step of `node`: groups and drops per step, to
        repeat.
        """
        return self.do(questions.ReplayPlan(node))

    def next_group_id(self, source: str) -> int:
        """The number that `source` gives to its next group."""
        return self.do(questions.NextGroupId(source))

    def last_step(self, node: str) -> int:
        """The last committed step of `node`; 0 before the first."""
        return self.do(questions.LastStep(node))

    def furthest_step(self, node: str) -> int:
        """The last step that `node` ever committed, taken back or not; 0 before the first."""
        return self.do(questions.LastStep(node, ever=True))

    def steps(self, node: str, after: int = 0, upto: int | None = None) -> list[MadeStep]:
        """The committed steps of `node` above `after` and not above `upto`, with what each
        consumed, ascending.
        """
        return self.do(questions.ListSteps(node, after, upto))

    def step_times(self, node: str, after: int = 0) -> list[tuple[int, float]]:
        """The committed steps of `node` above `after`, and when each was, in seconds since 1970;
        ascending.
        """
        return [(int(step), float(at)) for step, at in self.do(questions.StepTimes(node, after))]

    def drops_at(self, node: str, step: int) -> dict[int, str]:
        """Groups that `node` gave up for a step, and why; drops of the next one may be known before
        it is made.
        """
        return self.do(questions.DropsAt(node, step))

    def last_round(self, node: str) -> int | None:
        """Step of the last round that evaluation `node` has recorded; None before the first."""
        return self.do(questions.LastRound(node))

    def is_judged(self, source: str, step: int) -> bool:
        """Whether every sink of `source` has recorded its round of this step, or a later one."""
        return self.do(questions.IsJudged(source, step))

    def sources(self, node: str | None = None) -> list[str]:
        """The sources whose groups `node` consumes; those of all sinks for None."""
        return self.do(questions.Sources(node))

    def fates(self, source: str, group_id: int) -> list[Fate]:
        """What each sink did with a group; none while it is in flight."""
        return self.do(questions.ListFates(source, int(group_id)))

    def in_flight(
        self, source: str, node: str | None = None, among: Iterable[int] | None = None
    ) -> list[InFlight]:
        """Groups of `source` that some sink still waits for, or that `node` does, in issue order.

        among: look at these alone, which takes no longer in a long run; None: at all that were ever
        issued.
        """
        return self.do(
            questions.ListInFlight(source, node, None if among is None else numbers_of(among))
        )

    def counts(self, node: str) -> OutcomeCounts:
        """What became of the groups of the sources that `node` consumes, counted from the rows."""
        return self.do(questions.Count(node))

    def verdict(self, node: str) -> str:
        """The law of the ledger in figures, for one sink."""
        counts = self.counts(node)
        return f"{'clean' if counts.missing == 0 else 'BROKEN'}: {counts}"

    @abstractmethod
    def flush(self) -> None:
        """Bring all that was committed to the disk itself; from any thread, and whoever reads
        meanwhile.

        Called before a checkpoint is marked, so that no power cut leaves one whose step the ledger
        forgot. Errors: RunFolderError when the disk refuses.
        """

    @abstractmethod
    def pack(self, into: Path) -> None:
        """Write all that was committed, of one moment, into a file (`copying`); from any thread,
        and whoever writes meanwhile. Errors: LedgerError; RunFolderError; DeadlineError.
        """

    @property
    @abstractmethod
    def wal_bytes(self) -> int:
        """Size of the database's log: bounded, unless somebody reads in a transaction that does not
        end.
        """

    @abstractmethod
    def close(self) -> None:
        """End the connection; what was committed stays."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_owner(self) -> None:
        if os.getpid() != self._owner:
            raise LedgerError(
                f"ledger '{self.path}' was opened by process {self._owner} and is used by"
                f" {os.getpid()}; open it anew in each process"
            )
