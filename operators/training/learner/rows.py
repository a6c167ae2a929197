"""The rollouts of a step as flat arrays: from Arrow batches to what packing and losses take."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dataflow import records
from dataflow.records import AnyArray
from dataflow.staleness import newest_versions, oldest_versions
from dataflow.tokens.ragged import gather, one_chunk, per_token
from dataflow.tokens.rollout_tokens import COLUMNS, RolloutTokens
from dataflow.tokens.training_rows import cuts, unfolded
from operators.credit.groups import ROUNDING, are_equal


@dataclass(frozen=True, kw_only=True)
class StepRows:
    """The rollouts that one step trains; axis suffixes as in
    `operators.training.learner.packing`.
    """

    tokens: RolloutTokens
    """Of all rollouts, end to end: [S]."""
    offsets: AnyArray
    """[R + 1] into S."""
    cuts_S: AnyArray
    """Whether a training row begins at the token that is not the rollout's first; bool."""
    groups_R: AnyArray
    """group_id of each."""
    rollout_ids_R: AnyArray
    """rollout_id of each."""
    oldest_R: AnyArray
    """Version behind its oldest token; staleness.NO_TOKEN where the policy chose none."""
    columns_R: dict[str, AnyArray]
    """Columns of the loss with one number per rollout, and the temperature of each where rows say
    it."""
    columns_S: dict[str, AnyArray]
    """Columns of the loss with one number per token, but those of `tokens`."""

    @property
    def per_token(self) -> dict[str, AnyArray]:
        """By column, all numbers per token, each [S]."""
        return {
            name: getattr(self.tokens, array) for array, name in COLUMNS.items()
        } | self.columns_S

    @property
    def rollouts(self) -> int:
        """How many."""
        return len(self.rollout_ids_R)

    @cached_property
    def chosen_S(self) -> AnyArray:
        """Whether a token is trained: the policy chose it, and it is no row's first; bool."""
        chosen = self.tokens.mask.copy()
        chosen[self.offsets[:-1][np.diff(self.offsets) > 0]] = False
        chosen[self.cuts_S] = False
        return chosen

    @cached_property
    def newest_R(self) -> AnyArray:
        """Version behind the newest token of each, with which it was finished; -1 where the policy
        chose none.
        """
        offsets = pa.array(self.offsets, pa.int32())
        return newest_versions(pa.ListArray.from_arrays(offsets, pa.array(self.tokens.versions)))

    @cached_property
    def after_update_S(self) -> AnyArray:
        """Whether a token was drawn by newer weights than the first token of its turn, a stretch of
        tokens that the policy chose; bool.
        """
        mask, versions = self.tokens.mask, self.tokens.versions
        begins_S = mask & np.diff(mask, prepend=False)
        begins_S |= mask & np.isin(np.arange(len(mask)), self.offsets)
        turns_S = np.cumsum(begins_S) - 1
        return np.asarray(mask & (versions > np.r_[versions[begins_S], -1][turns_S]))

    @cached_property
    def longest_R(self) -> AnyArray:
        """Tokens of the longest training row of each."""
        begins, rollouts = unfolded(self.offsets, self.cuts_S)
        longest = np.zeros(self.rollouts, np.int64)
        np.maximum.at(longest, rollouts, np.diff(begins))
        return longest

    def sequences(self, rollouts: AnyArray) -> tuple[AnyArray, AnyArray, AnyArray]:
        """Of some of them: where their tokens are in S, where each training row begins among these,
        [rows + 1], and which of the chosen rollouts it is of, [rows].
        """
        positions, offsets = gather(self.offsets, rollouts)
        return positions, *unfolded(offsets, self.cuts_S[positions])

    @cached_property
    def trained_R(self) -> AnyArray:
        """Trained tokens of each."""
        return self._per_row(self.chosen_S)

    @cached_property
    def signal_R(self) -> AnyArray:
        """Whether a rollout's advantage is anything but zero; all true without such a column."""
        if records.ADVANTAGE in self.columns_R:
            return np.asarray(self.columns_R[records.ADVANTAGE] != 0)
        if records.ADVANTAGE in self.columns_S:
            return self._per_row(self.columns_S[records.ADVANTAGE] != 0) > 0
        return np.ones(self.rollouts, bool)

    def _per_row(self, counted_S: AnyArray) -> AnyArray:
        counts = np.r_[0, np.cumsum(counted_S)]
        return np.asarray(counts[self.offsets[1:]] - counts[self.offsets[:-1]])


def usable(batch: pa.RecordBatch, columns: Iterable[str]) -> AnyArray:
    """Which rows can be trained: no error, and a value in every column that the loss reads; bool
    [rows].
    """
    good = np.ones(batch.num_rows, bool)
    if batch.schema.get_field_index(records.ERROR) >= 0:
        errors = batch.column(records.ERROR)
        if errors.null_count < len(errors):
            good &= errors.is_null().to_numpy(zero_copy_only=False)
    for name in (records.TOKENS, records.MASK, *columns):
        column = batch.column(name)
        if column.null_count:
            good &= column.is_valid().to_numpy(zero_copy_only=False)
    return good


def drop_reason(batch: pa.RecordBatch) -> str | None:
    """Why an operator before the trainer gave the group up; None where none did."""
    if batch.schema.get_field_index(records.DROP_REASON) < 0:
        return None
    reasons = batch.column(records.DROP_REASON).drop_null()
    return str(reasons[0].as_py()) if len(reasons) else None


def step_rows(batches: Sequence[pa.RecordBatch], columns: Iterable[str]) -> StepRows:
    """Flatten the usable rows of some groups, in their order.

    Raises RecordError for lists of unequal length, and for a sampling mask that leaves out the
    token drawn.
    """
    columns = tuple(columns)
    table = pa.Table.from_batches(batches).combine_chunks()
    whole = table.to_batches()[0] if table.num_rows else batches[0]
    good = usable(whole, columns)
    if not good.all():
        table = table.filter(pa.array(good)).combine_chunks()
    tokens, offsets = RolloutTokens.of_rows(table)
    columns_R: dict[str, AnyArray] = {}
    columns_S: dict[str, AnyArray] = {}
    for name in dict.fromkeys(columns):
        if name in COLUMNS.values():
            continue
        column = one_chunk(table, name)
        if pa.types.is_list(column.type):
            columns_S[name] = per_token(table, name, offsets)
        else:
            columns_R[name] = column.to_numpy(zero_copy_only=False)
    groups_R = one_chunk(table, records.GROUP_ID).to_numpy()
    if (
        "reward" in table.column_names
        and pa.types.is_floating(table.schema.field("reward").type)
        and len(tokens)
    ):
        rewards_R = one_chunk(table, "reward").to_numpy(zero_copy_only=False)
        _silence(rewards_R, groups_R, offsets, columns_R, columns_S)
    if records.TEMPERATURE in table.column_names:
        columns_R[records.TEMPERATURE] = one_chunk(table, records.TEMPERATURE).to_numpy(
            zero_copy_only=False
        )
    rows_S = np.zeros(len(tokens), np.int32)
    if records.TRAINING_ROW in table.column_names:
        rows_S = per_token(table, records.TRAINING_ROW, offsets)
    return StepRows(
        tokens=tokens,
        offsets=offsets,
        cuts_S=cuts(rows_S, offsets),
        groups_R=groups_R,
        rollout_ids_R=one_chunk(table, records.ROLLOUT_ID).to_numpy(),
        oldest_R=oldest_versions(one_chunk(table, records.VERSIONS)),
        columns_R=columns_R,
        columns_S=columns_S,
    )


def _silence(
    rewards_R: AnyArray,
    groups_R: AnyArray,
    offsets: AnyArray,
    columns_R: dict[str, AnyArray],
    columns_S: dict[str, AnyArray],
) -> None:
    """In groups of equal rewards, advantages that are rounding beside these become 0."""
    groups = np.split(rewards_R, np.flatnonzero(np.diff(groups_R)) + 1)
    sizes = [np.max(np.abs(rewards)) if are_equal(rewards) else 0.0 for rewards in groups]
    least_R = ROUNDING * np.repeat(sizes, list(map(len, groups)))
    for columns, least in ((columns_R, least_R), (columns_S, np.repeat(least_R, np.diff(offsets)))):
        if records.ADVANTAGE in columns:
            values = columns[records.ADVANTAGE]
            columns[records.ADVANTAGE] = np.where(
                np.abs(values) <= least, np.zeros_like(values), values
            )


def by_temperature(rows: StepRows, rollouts: AnyArray) -> list[AnyArray]:
    """The rollouts grouped by sampling temperature: micro-batches never mix temperatures."""
    values = rows.columns_R.get(records.TEMPERATURE)
    if values is None or not len(rollouts):
        return [rollouts]
    kinds, at = np.unique(values[rollouts], return_inverse=True)
    return [rollouts[at == kind] for kind in range(len(kinds))]


def whitened(rows: StepRows) -> StepRows:
    """The same rows, their advantages shifted and scaled to mean 0 and deviation 1 over the trained
    tokens.
    """
    per_token = records.ADVANTAGE in rows.columns_S
    columns = rows.columns_S if per_token else rows.columns_R
    if records.ADVANTAGE not in columns:
        return rows
    values = np.asarray(columns[records.ADVANTAGE], np.float64)
    weights = rows.chosen_S.astype(np.float64) if per_token else rows.trained_R.astype(np.float64)
    total = max(1.0, float(weights.sum()))
    mean = float((values * weights).sum()) / total
    deviation = float(np.sqrt((weights * (values - mean) ** 2).sum() / total))
    scaled = (
        0.0 * values
        if are_equal(values[weights > 0])
        else (values - mean) / (deviation + 1e-8) * (weights > 0)
    )
    changed = columns | {records.ADVANTAGE: scaled}
    return replace(rows, columns_S=changed) if per_token else replace(rows, columns_R=changed)


def mean_of(batches: Sequence[pa.RecordBatch], name: str) -> float | None:
    """Mean of a column over the rows that have it; None where there is no such column, or no value
    in it.
    """
    if not batches or batches[0].schema.get_field_index(name) < 0:
        return None
    return pc.mean(pa.Table.from_batches(batches).column(name)).as_py()  # type: ignore[no-any-return]
