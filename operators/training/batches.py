"""Which groups make the next step, which are dropped and why, and the numbers of a step that was
made."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dataflow.errors import OperatorError, Unusable
from dataflow.records import (
    ADVANTAGE,
    COMPLETION,
    DROP_REASON,
    ERROR,
    GROUP_ID,
    PROMPT,
    VERSIONS,
    version_column,
)
from dataflow.rules import QueuedGroup
from dataflow.runtime import Context
from dataflow.scoring.failure import TOO_LONG, RolloutFailure, counted
from dataflow.staleness import NO_TOKEN, Bound, newest_versions, oldest_versions, sweep
from operators.credit import ROUNDING
from operators.training.journal import TOO_FEW, Journal
from operators.training.learner.learner import StepOutcome
from operators.training.learner.rows import StepRows, drop_reason, mean_of, usable
from operators.training.steps import StepPace

_SHOWN = 60


def silent_scores(groups: Sequence[pa.RecordBatch], scores: Mapping[str, str]) -> dict[str, str]:
    """Those of these columns with values that are equal within each group of rows; none without
    groups.
    """
    return {
        name: where
        for name, where in scores.items()
        if groups and all(_is_silent(rows, name) for rows in groups)
    }


def no_signal(groups: Sequence[pa.RecordBatch], scores: Mapping[str, str]) -> dict[str, Any] | None:
    """The silent scorers of a step, as "'reward' (file:line)", and a row with what they gave; None
    where there are none.
    """
    silent = silent_scores(groups, scores)
    if not silent:
        return None
    return {
        "scorers": [f"'{name}' ({where})" for name, where in silent.items()],
        "example": example(groups[0], silent),
    }


def example(rows: pa.RecordBatch, names: Mapping[str, str]) -> str:
    """A row for people: `reward 0.0 for the completion 'blue' of 'What is 2 + 3?'`."""
    row = rows.slice(0, 1).to_pylist()[0]
    figures = ", ".join(f"{name} {row[name]}" for name in names)
    return f"{figures} for the completion {_short(row[COMPLETION])} of {_short(row[PROMPT])}"


def _is_silent(rows: pa.RecordBatch, name: str) -> bool:
    if (
        name not in rows.schema.names
        or len(pc.unique(rows.column(GROUP_ID))) != 1
        or rows.num_rows < 2
    ):
        return False
    values = rows.column(name).drop_null()
    plain_values = values.to_pylist()
    return bool(plain_values) and all(_alike(plain_values[0], value) for value in plain_values)


def _alike(first: Any, value: Any) -> bool:
    if first == value:
        return True
    if isinstance(first, list) and isinstance(value, list):
        return len(first) == len(value) and all(map(_alike, first, value))
    return (
        isinstance(first, float)
        and isinstance(value, float)
        and math.isclose(first, value, rel_tol=ROUNDING)
    )


def _short(text: Any) -> str:
    shown = repr(text)
    return shown if len(shown) <= _SHOWN else f"{shown[: _SHOWN - 1]}…"


@dataclass
class Outcomes:
    """Counts of rollouts without all scores: failed ones, by cause, and those that a scorer does
    not apply to.
    """

    failed: Counter[str] = field(default_factory=Counter)
    """By node and cause, as `judge: hung`."""
    does_not_apply: Counter[str] = field(default_factory=Counter)
    """By scorer."""

    def add(self, groups: Iterable[pa.RecordBatch], scores: Iterable[str]) -> None:
        """Count the rows of some groups. scores: the columns of scorers; what a filter dropped was
        not scored.
        """
        for rows in groups:
            names = rows.schema.names
            good = np.ones(rows.num_rows, bool)
            if ERROR in names and rows.column(ERROR).null_count < rows.num_rows:
                good &= rows.column(ERROR).is_null().to_numpy(zero_copy_only=False)
                self.failed.update(counted(rows.column(ERROR).to_pylist()))
            if DROP_REASON in names and rows.column(DROP_REASON).null_count < rows.num_rows:
                continue
            for name in scores:
                if name in names and rows.column(name).null_count:
                    missing = rows.column(name).is_null().to_numpy(zero_copy_only=False)
                    self.does_not_apply[name] += int((missing & good).sum())

    def __add__(self, other: Outcomes) -> Outcomes:
        """Those of both."""
        return Outcomes(self.failed + other.failed, self.does_not_apply + other.does_not_apply)

    def figures(self) -> dict[str, dict[str, int]]:
        """For metrics.jsonl, the most frequent first."""
        return {
            "failed": dict(self.failed.most_common()),
            "does_not_apply": dict((+self.does_not_apply).most_common()),
        }


def step_metrics(
    *,
    node: str,
    step: int,
    now: float,
    started: float,
    version: int,
    lr: float,
    rows: StepRows,
    trained: Sequence[pa.RecordBatch],
    outcome: StepOutcome,
    pace: StepPace,
    dropped: Mapping[str, int],
    dropped_outcomes: Outcomes,
    skipped_steps: int,
    scores: Mapping[str, str],
    forwards: Sequence[str] = (),
) -> dict[str, Any]:
    """Every figure of one step, under its plain name.

    Units: seconds; versions for staleness; shares from 0 to 1; for measures see
    `Diagnostics.measures`, which leave out rollouts of advantage 0 where the trainer skips them,
    and for by_staleness the function of that name. dropped: groups given up since the step before,
    by reason; dropped_outcomes: of their rollouts. failed, does_not_apply: of all rollouts since
    the step before, by cause and by scorer. rollouts: trained. scores, forwards: as `Context` has
    them. after_update_share: of trained tokens, those that newer weights drew than the first of
    their turn. forward_versions: the newest version behind each column of `forwards`. no_signal:
    see the function of that name; null where some group had one, or advantages are not asked for.
    """
    wall = max(now - pace.began, 1e-9)
    tokens = rows.trained_R
    reward = mean_of(trained, "reward")
    advantage = rows.columns_R.get(ADVANTAGE)
    if advantage is None and ADVANTAGE in rows.columns_S:
        advantage = rows.columns_S[ADVANTAGE][rows.chosen_S]
    starts = (
        np.flatnonzero(np.diff(rows.groups_R, prepend=-1))
        if rows.rollouts
        else np.zeros(0, np.int64)
    )
    outcomes = Outcomes()
    outcomes.add(trained, scores)
    signal = np.logical_or.reduceat(rows.signal_R, starts) if len(starts) else np.zeros(0)
    return {
        "step": step,
        "node": node,
        "version": version,
        "seconds": now - started,
        "loss": outcome.loss,
        "reward_mean": reward,
        "advantage_std": float(advantage.std())
        if advantage is not None and len(advantage)
        else None,
        "signal_share": float(signal.mean()) if len(signal) else None,
        "no_signal": no_signal(trained, scores) if len(signal) and not signal.any() else None,
        **staleness_figures(version - 1, rows),
        "after_update_share": float(rows.after_update_S[rows.chosen_S].mean())
        if tokens.sum()
        else 0.0,
        "by_staleness": by_staleness(version - 1, rows),
        **outcome.measures,
        **({"forward_versions": _newest(trained, forwards)} if forwards else {}),
        "grad_norm": outcome.grad_norm,
        "lr": lr,
        "completion_tokens_mean": float(tokens.mean()) if len(tokens) else 0.0,
        "rollouts": rows.rollouts,
        "groups": len(trained),
        "generated_tokens_per_s": pace.arrived_tokens / wall,
        "trained_tokens_per_s": float(tokens.sum()) / wall,
        "computed_tokens": outcome.nodes,
        "seconds_step": wall,
        **{f"seconds_{stage}": seconds for stage, seconds in pace.seconds.items()},
        "seconds_settle": outcome.settle_s,
        "dropped": dict(dropped),
        **(outcomes + dropped_outcomes).figures(),
        "skipped_steps": skipped_steps,
    }


def staleness_figures(version: int, rows: StepRows) -> dict[str, float | int]:
    """Mean and maximum of the versions that rollouts are behind `version`, the one that is trained,
    and of both parts of it: versions that were made while a rollout was generated (from its oldest
    token to its newest), and while it waited (from there to the step). Of each rollout the parts
    add up to the whole, so their means do, too.
    """
    drawn = rows.oldest_R != NO_TOKEN
    oldest_R, newest_R = rows.oldest_R[drawn], rows.newest_R[drawn]
    ages = {
        "staleness": version - oldest_R,
        "staleness_generating": newest_R - oldest_R,
        "staleness_waiting": version - newest_R,
    }
    figures: dict[str, float | int] = {}
    for name, versions_R in ages.items():
        figures[f"{name}_mean"] = float(versions_R.mean()) if len(versions_R) else 0.0
        figures[f"{name}_max"] = int(versions_R.max()) if len(versions_R) else 0
    return figures


def _newest(trained: Sequence[pa.RecordBatch], forwards: Sequence[str]) -> dict[str, int]:
    """Without the columns that are null in all rows."""
    newest = {
        name: [pc.max(rows.column(version_column(name))).as_py() for rows in trained]
        for name in forwards
    }
    versions = {
        name: [version for version in column if version is not None]
        for name, column in newest.items()
    }
    return {name: max(column) for name, column in versions.items() if column}


def by_staleness(version: int, rows: StepRows) -> dict[str, dict[str, float | int]]:
    """By staleness of their oldest token, as text: how many rollouts, and their advantage's mean
    and mean size.

    version: of the weights that were trained. The advantage is left out where it is no number per
    rollout.
    """
    by_age: dict[str, dict[str, float | int]] = {}
    has_tokens = rows.oldest_R != NO_TOKEN
    ages_R = version - rows.oldest_R
    advantage_R = rows.columns_R.get(ADVANTAGE)
    for age in np.unique(ages_R[has_tokens]).tolist():
        chosen = has_tokens & (ages_R == age)
        by_age[str(age)] = {"rollouts": int(chosen.sum())}
        if advantage_R is not None:
            of = advantage_R[chosen]
            by_age[str(age)] |= {
                "advantage_mean": float(of.mean()),
                "advantage_size": float(np.abs(of).mean()),
            }
    return by_age


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
        self._scores = context.graph.scores
        self._silent: Mapping[str, str] = context.graph.scores
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
