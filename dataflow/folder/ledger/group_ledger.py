"""The calls of a ledger by which a group goes from its issue to its outcome, whoever answers
them."""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from dataflow.folder.ledger import calls
from dataflow.system.files import to_json

T = TypeVar("T")


class GroupLedger(ABC):
    """What becomes of prompt groups.

    A group is (source, group_id). It goes issued -> generating -> generated -> scored, and then has
    one outcome for each sink that consumes its source: trained at a step, evaluated at a step, or
    dropped for a reason. For each sink, at any moment:

        issued = trained + evaluated + dropped (by reason) + in flight     no group has two outcomes for one sink

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
        """Have it done in its turn, before whatever is asked next; its error may come with that."""
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
        a later call."""
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
        nothing is recorded."""
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
        drop()."""
        self.commit_round(node, step, {source: group_ids})

    def commit_round(self, node: str, step: int, groups: Mapping[str, Iterable[int]]) -> None:
        """Record a round: the groups that it read of each source, under the weights of `step`.
        Errors: as drop()."""
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
