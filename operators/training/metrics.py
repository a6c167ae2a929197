"""The line of metrics.jsonl that a step writes."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dataflow.records import ADVANTAGE, DROP_REASON, ERROR, version_column
from dataflow.scoring.failure import counted
from dataflow.staleness import NO_TOKEN
from operators.training.learner.learner import StepOutcome
from operators.training.learner.rows import StepRows, mean_of
from operators.training.pace import StepPace
from operators.training.signal import no_signal


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

    def __add__(self, other: "Outcomes") -> "Outcomes":
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
