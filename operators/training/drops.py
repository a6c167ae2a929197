"""Groups that the trainer gives up: why, which of them the ledger knows, and when they are too
many.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pyarrow as pa

from dataflow.errors import OperatorError, Unusable
from dataflow.records import ERROR, VERSIONS
from dataflow.rules.reorder_buffer import QueuedGroup
from dataflow.runtime import Context
from dataflow.scoring.failure import TOO_LONG, RolloutFailure, counted
from dataflow.staleness import Bound, newest_versions, oldest_versions, sweep
from operators.training.journal import TOO_FEW, Journal
from operators.training.learner.rows import drop_reason, usable
from operators.training.metrics import Outcomes
from operators.training.signal import example, silent_scores

ABANDONED = "abandoned"
"""Why groups are dropped with tokens of a version that is not there yet: its weights were those of
a line of steps that was taken back."""
LATE = ("stale", ABANDONED)
OWN_REASONS = ("failed", "skipped", *LATE, "non-finite", TOO_FEW)
"""Why the trainer drops groups by itself; any other reason is the name of a filter."""
MOST_DROPPED_STEPS = 8
"""Steps' worth of groups in a row that may be dropped with none trained."""
MOST_ALIKE_GROUPS, MOST_ALIKE_ROLLOUTS = 16, 64
"""Groups in a row, of so many rollouts at least, that may fail by one cause of one node, as where a
world is dead or a reward always raises: whoever began the run still waits."""


class Drops:
    """The drops of the step under way.

    They are recorded with the step, in its transaction; but of many, as soon as they are as many
    groups as a step has: an edge holds no more than two steps' groups that were not acknowledged,
    and a filter may want to drop more.
    """

    def __init__(
        self,
        context: Context,
        journal: Journal,
        columns: Collection[str],
        bound: Bound | None,
        step_prompts: int,
    ) -> None:
        """columns: that the loss reads. bound: of the rows' age, if any."""
        self._node, self._journal, self._step_prompts = context.node, journal, step_prompts
        self._columns, self.bound = columns, bound
        self.reasons: dict[int, str] = {}
        """By group, of those that the ledger does not know yet."""
        self.recorded: Counter[str] = Counter()
        """Of those that it knows, by reason."""
        self.total = 0
        """Since the start of the run."""
        self.outcomes = Outcomes()
        """Of their rollouts, since the last step."""
        self._groups: list[QueuedGroup] = []
        self._in_a_row: Counter[str] = Counter()
        """By reason, since the last group that could be trained."""
        self._last_failure = "none"
        self._failures: Counter[str] = Counter()
        """Rollouts of groups that failed, by node and cause, since the last group that could be
        trained."""
        self._scores = context.scores
        self._silent: Mapping[str, str] = context.scores
        """Scorers that told no rollout from its siblings, since the last group that could be
        trained."""
        self._example = ""

    @property
    def counts(self) -> Counter[str]:
        """How many, by reason."""
        return self.recorded + Counter(self.reasons.values())

    @property
    def figures(self) -> dict[str, Any]:
        """What `step_metrics` takes of them."""
        return {"dropped": self.counts, "dropped_outcomes": self.outcomes}

    def reason(self, records: pa.RecordBatch, step: int) -> str | None:
        """Why a group is not to be trained on weights that `step` steps are behind; None where it
        is.
        """
        if (marked := drop_reason(records)) is not None:
            return marked
        good = usable(records, self._columns)
        if not good.any():
            errors = [error for error in records.column(ERROR).to_pylist() if error]
            self._last_failure = self._attributed(errors[0]) if errors else self._valueless(records)
            self._failures.update(
                counted(error for error in errors if RolloutFailure.read(error).cause != TOO_LONG)
            )
            return "failed" if errors else "skipped"
        if self.bound is not None:
            if newest_versions(records.column(VERSIONS)).max() > step:
                return ABANDONED
            oldest = oldest_versions(records.column(VERSIONS))[good]
            if sweep(oldest, step, self.bound.max_staleness).any():
                return "stale"
        self._in_a_row.clear()
        self._failures.clear()
        self._silent = self._scores
        return None

    def add(self, groups: Sequence[QueuedGroup], reason: str, step: int | None) -> None:
        """Give groups up while step number `step` is under way; None: outside any step."""
        self._groups += groups
        self.reasons |= {group.group_id: reason for group in groups}
        self.total += len(groups)
        self.outcomes.add((group.records for group in groups), self._scores)
        self._in_a_row[reason] += len(groups)
        if groups and (silent := silent_scores([group.records for group in groups], self._silent)):
            self._silent, self._example = silent, example(groups[-1].records, silent)
        elif groups:
            self._silent = {}
        if len(self._groups) >= self._step_prompts:
            self.record(step)

    def record(self, step: int | None) -> None:
        """Record in the ledger the drops that it does not know, and forget them here. step: the
        current one; None: between steps.
        """
        self._journal.drop(self.reasons, step)
        self.recorded.update(self.reasons.values())
        self._release()

    def committed(self) -> None:
        """Let go of all, as their step is in the ledger."""
        self.recorded.clear()
        self.outcomes = Outcomes()
        self._release()

    def check(self) -> None:
        """Raise when nothing could be trained for long, or all that came failed alike: Unusable, or
        OperatorError where rows came too late.
        """
        is_long = self._in_a_row.total() > MOST_DROPPED_STEPS * max(8, self._step_prompts)
        fails_alike = (
            len(self._failures) == 1
            and self._in_a_row.total() == self._in_a_row["failed"] >= MOST_ALIKE_GROUPS
            and self._failures.total() >= MOST_ALIKE_ROLLOUTS
        )
        if is_long or fails_alike:
            (most, _), *_ = self._in_a_row.most_common(1)
            do = "mend the operator that it names"
            if most not in OWN_REASONS:
                do = (
                    f"loosen the filter '{most}', or give it prompts and a policy that it lets"
                    " through"
                )
                if self._silent:
                    do = f"mend what is asked or how it is scored, or loosen the filter '{most}'"
            findings = [f"found {dict(self._in_a_row)}"]
            if fails_alike:
                findings.append(f"rollouts that failed alike: {dict(self._failures)}")
            if self._last_failure != "none":
                findings.append(f"the last failure: {self._last_failure}")
            if self._silent:
                names = ", ".join(f"'{name}' ({where})" for name, where in self._silent.items())
                findings.append(
                    f"in each of them {names} gave all rollouts the same, such as {self._example}"
                )
            kind = OperatorError if most in LATE else Unusable
            raise kind(
                f"'{self._node}' dropped {self._in_a_row.total()} groups in a row and trained none;"
                f" {', '.join(findings)}; {do}"
            )

    def _attributed(self, error: str) -> str:
        """A row's error, with the place where its scorer is defined unless the text has it."""
        where = self._scores.get(error.partition(":")[0], "")
        return error if where in error else f"{error} ({where})"

    def _valueless(self, records: pa.RecordBatch) -> str:
        """That rows have no value, and the scorers that do not apply to any of them."""
        names = {name for name in self._scores if name in records.schema.names}
        silent = [name for name in names if records.column(name).null_count == records.num_rows]
        reasons = [
            f"'{name}' ({self._scores[name]}) returned None, that it does not apply"
            for name in sorted(silent)
        ]
        return "; ".join(["no value in a column that the loss reads", *reasons])

    def _release(self) -> None:
        groups, self._groups, self.reasons = self._groups, [], {}
        for group in groups:
            group.release()
