"""The rollouts of a step as flat arrays: from Arrow batches to what packing and losses take.

A causal model's state at a token depends on the tokens up to it and on nothing else. So the
rollouts of a micro-batch form a tree: the prompt of a group is one path, and rollouts share a path
until they first differ. Only the nodes of that tree go through the model, without any padding;
attention alone sees rows, and gathers them from the nodes by index.

A rollout that is cut into several training rows has as many rows here: each attends to its own
tokens alone.

Axis suffixes: R rollouts (in `pack` their training rows), S all their tokens end to end, T trained
tokens (mask), N nodes, U nodes that some trained token is predicted from, L positions of a row, B
rows of a bucket, K ids that truncation left, of one token after the other.
"""

from __future__ import annotations

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
from dataflow.tokens.rollout_tokens import COLUMNS, RolloutTokens, cuts, unfolded
from operators.credit import ROUNDING, are_equal


@dataclass(frozen=True, kw_only=True)
class StepRows:
    """The rollouts that one step trains; axis suffixes as in
    `operators.training.learner.rows`.
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

    @staticmethod
    def joined(parts: Sequence[StepRows]) -> StepRows:
        """Several that have the same columns, one after the other."""
        ends = np.cumsum([0, *(len(part.tokens) for part in parts)])
        offsets = [part.offsets[:-1] + end for part, end in zip(parts, ends, strict=False)]

        def end_to_end(arrays: Iterable[AnyArray]) -> AnyArray:
            return np.concatenate(list(arrays))

        return StepRows(
            tokens=RolloutTokens.joined([part.tokens for part in parts]),
            offsets=np.concatenate([*offsets, ends[-1:]]),
            cuts_S=end_to_end(part.cuts_S for part in parts),
            groups_R=end_to_end(part.groups_R for part in parts),
            rollout_ids_R=end_to_end(part.rollout_ids_R for part in parts),
            oldest_R=end_to_end(part.oldest_R for part in parts),
            columns_R={
                name: end_to_end(part.columns_R[name] for part in parts)
                for name in parts[0].columns_R
            },
            columns_S={
                name: end_to_end(part.columns_S[name] for part in parts)
                for name in parts[0].columns_S
            },
        )

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


BUCKET_MIN_TOKENS = 64
"""Rows up to this length share one bucket: for short rows a second call costs more than the
padding."""
BUCKET_GROWTH = 1.25
"""The longest row of a bucket is at most this much longer than its shortest."""


@dataclass(frozen=True, kw_only=True)
class TokenTree:
    """A micro-batch as a tree of tokens; all arrays int64."""

    tokens_N: AnyArray
    """Token of each node."""
    positions_N: AnyArray
    """Its position in every rollout that passes through it."""
    buckets: tuple[AnyArray, ...]
    """[B, L] each: rows of nodes that attend to one another, padded at the right with node 0."""
    back_N: AnyArray
    """Where each node stands in the buckets, flattened and laid end to end."""
    heads_U: AnyArray
    """Nodes that trained tokens are predicted from."""
    head_T: AnyArray
    """Index into U for each trained token."""
    targets_T: AnyArray
    """The trained tokens."""
    flat_T: AnyArray
    """Where they stand in S."""
    row_T: AnyArray
    """The row they belong to."""

    @property
    def nodes(self) -> int:
        """Tokens that go through the model."""
        return len(self.tokens_N)


def pack(
    tokens_S: AnyArray, mask_S: AnyArray, offsets: AnyArray, *, share: bool = True
) -> TokenTree:
    """Pack rows for one pass through the model.

    tokens_S: integer [S]. mask_S: bool [S], true where the policy chose the token; a first token is
    never trained, because nothing predicts it. offsets: [R + 1], where each row starts in S.
    share: compute common prefixes once; without it each row is a branch of its own.
    """
    rollouts = len(offsets) - 1
    row_S = np.repeat(np.arange(rollouts), np.diff(offsets))
    at_S = np.arange(len(tokens_S)) - offsets[row_S]
    flat_T = np.flatnonzero(mask_S & (at_S > 0))
    row_T, at_T = row_S[flat_T], at_S[flat_T]
    lengths_R = np.zeros(rollouts, np.int64)
    lengths_R[row_T] = at_T  # the last trained token of each row stays, and is not itself an input
    longest = int(np.max(lengths_R, initial=0))
    used_S = at_S < lengths_R[row_S]
    table_R_L = np.full((rollouts, longest), -1, np.int32)
    table_R_L[row_S[used_S], at_S[used_S]] = tokens_S[used_S]

    order_R = _sorted(table_R_L) if share else np.arange(rollouts)
    sorted_R_L, sorted_lengths_R = table_R_L[order_R], lengths_R[order_R]
    valid_R_L = np.arange(longest) < sorted_lengths_R[:, None]
    shared_R = _common_with_previous(sorted_R_L) if share else np.zeros(rollouts, np.int64)
    new_R_L = valid_R_L & (np.arange(longest) >= shared_R[:, None])
    number_R_L = (np.cumsum(new_R_L.ravel()) - 1).reshape(new_R_L.shape)
    owner_R_L = np.maximum.accumulate(np.where(new_R_L, np.arange(rollouts)[:, None], 0), axis=0)
    node_R_L = np.where(valid_R_L, number_R_L[owner_R_L, np.arange(longest)], 0)

    is_prefix_R = np.zeros(rollouts, bool)
    is_prefix_R[:-1] = shared_R[1:] >= sorted_lengths_R[:-1]
    leaves = np.flatnonzero(
        (~is_prefix_R if share else np.ones(rollouts, bool)) & (sorted_lengths_R > 0)
    )
    buckets, back_N = _buckets(node_R_L[leaves], sorted_lengths_R[leaves], int(new_R_L.sum()))

    place_R = np.empty(rollouts, np.int64)
    place_R[order_R] = np.arange(rollouts)
    heads_U, head_T = np.unique(node_R_L[place_R[row_T], at_T - 1], return_inverse=True)
    return TokenTree(
        tokens_N=sorted_R_L[new_R_L].astype(np.int64),
        positions_N=np.nonzero(new_R_L)[1],
        buckets=buckets,
        back_N=back_N,
        heads_U=heads_U,
        head_T=head_T,
        targets_T=tokens_S[flat_T].astype(np.int64),
        flat_T=flat_T,
        row_T=row_T,
    )


def split(
    tokens_S: AnyArray, offsets: AnyArray, groups_R: AnyArray, limit: int, *, whole: bool = False
) -> list[AnyArray]:
    """Cut the rollouts of a step into micro-batches: index arrays into R, in order.

    Groups stay whole, so that their common prompt is computed once, unless one alone is over the
    limit. groups_R: [R], equal within a group, rows of a group side by side. limit: tokens, each
    group's common prefix counted once; a single rollout longer than that is a micro-batch of its
    own. whole: groups are never cut.
    """
    lengths_R = np.diff(offsets)
    rollouts = len(lengths_R)
    if not rollouts:
        return []
    starts = np.flatnonzero(np.r_[True, groups_R[1:] != groups_R[:-1]])
    units: list[tuple[int, int, int]] = []
    for first, last in zip(starts.tolist(), [*starts[1:].tolist(), rollouts], strict=True):
        size = cost(tokens_S, offsets, first, last)
        if whole or size <= limit:
            units.append((first, last, size))
        else:
            units += _cut(lengths_R, first, last, limit)
    total = sum(size for *_, size in units)
    target = total / max(1, -(-total // limit))
    batches: list[AnyArray] = []
    begin, micro_tokens = 0, 0
    for first, last, size in units:
        if micro_tokens and micro_tokens + size > limit:
            batches.append(np.arange(begin, first))
            begin, micro_tokens = first, 0
        micro_tokens += size
        if micro_tokens >= target:
            batches.append(np.arange(begin, last))
            begin, micro_tokens = last, 0
    if begin < rollouts:
        batches.append(np.arange(begin, rollouts))
    return batches


def _sorted(table_R_L: AnyArray) -> AnyArray:
    """An order in which equal prefixes are neighbours, and a row stands before those it is a prefix
    of.
    """
    if table_R_L.size == 0:
        return np.arange(len(table_R_L))
    keys = np.ascontiguousarray(table_R_L + 1)
    return np.argsort(
        keys.view(np.dtype((np.void, keys.itemsize * keys.shape[1]))).ravel(), kind="stable"
    )


def _common_with_previous(table_R_L: AnyArray) -> AnyArray:
    """How many leading tokens each row has in common with the row before it; 0 for the first."""
    differs = table_R_L[1:] != table_R_L[:-1]
    common = (
        np.where(differs.any(axis=1), differs.argmax(axis=1), table_R_L.shape[1])
        if differs.size
        else differs.sum(1)
    )
    return np.asarray(np.r_[0, common].astype(np.int64)[: len(table_R_L)])


def _buckets(
    node_B_L: AnyArray, lengths_B: AnyArray, nodes: int
) -> tuple[tuple[AnyArray, ...], AnyArray]:
    """Rows cut into buckets of like length, shortest first, and where each node stands in them."""
    order = np.argsort(lengths_B, kind="stable")
    buckets: list[AnyArray] = []
    back_N = np.zeros(nodes, np.int64)
    begin, base = 0, 0
    while begin < len(order):
        most = max(BUCKET_MIN_TOKENS, int(lengths_B[order[begin]] * BUCKET_GROWTH))
        end = begin + int(np.searchsorted(lengths_B[order[begin:]], most, side="right"))
        rows = order[begin:end]
        bucket = np.ascontiguousarray(node_B_L[rows, : int(lengths_B[rows[-1]])])
        valid = np.arange(bucket.shape[1]) < lengths_B[rows][:, None]
        back_N[bucket[valid]] = base + np.flatnonzero(valid.ravel())
        buckets.append(bucket)
        begin, base = end, base + bucket.size
    return tuple(buckets), back_N


def cost(tokens_S: AnyArray, offsets: AnyArray, first: int, last: int) -> int:
    """Tokens of the rollouts [first, last), the prefix that all of them have in common counted
    once.
    """
    lengths = np.diff(offsets[first : last + 1])
    shortest = int(lengths.min())
    rows = tokens_S[offsets[first:last, None] + np.arange(shortest)]
    same = (rows == rows[0]).all(axis=0)
    common = shortest if same.all() else int(same.argmin())
    return int(lengths.sum()) - common * (last - first - 1)


def _cut(lengths_R: AnyArray, first: int, last: int, limit: int) -> list[tuple[int, int, int]]:
    """A group that is over the limit, in pieces of whole rollouts."""
    pieces, begin, total = [], first, 0
    for row in range(first, last):
        if row > begin and total + int(lengths_R[row]) > limit:
            pieces.append((begin, row, total))
            begin, total = row, 0
        total += int(lengths_R[row])
    return [*pieces, (begin, last, total)]
