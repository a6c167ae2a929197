"""A rollout's tokens, one array per column: from the engine, over wire and disk, to the trainer;
and the training rows that they are: sequences that the policy has seen as they stand.

What an array more asks for is in CONTRIBUTING.md ("Add a column per token").
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dataflow.errors import RecordError
from dataflow.records import LOGPROBS, MASK, ROLLOUT_ID, SAMPLING_MASK, TOKENS, VERSIONS, AnyArray
from dataflow.tokens.ragged import check_lengths, flat, gather, list_lengths, one_chunk, per_token

# The ids that truncation left where tokens were drawn: a rollout's sampling mask, which few runs
# record.


@dataclass(frozen=True, slots=True, eq=False)
class SamplingMask:
    """Which ids truncation (top_k, top_p, min_p) left where some tokens were drawn, token after
    token.

    It belongs to a token of a rollout, not to a text: equal texts may differ in it, because they
    were drawn from other versions of the weights or with other knobs. A token without ids was drawn
    from the whole vocabulary, or not drawn.
    """

    ids: AnyArray
    """int32 [K], the ids of one token after the other."""
    offsets: AnyArray
    """int64 [tokens + 1] into `ids`."""

    @staticmethod
    def of(lists: Sequence[AnyArray], *, before: int = 0) -> SamplingMask:
        """From the ids of each token, behind so many from which nothing was left out."""
        return SamplingMask(
            np.concatenate([np.zeros(0, np.int32), *lists]),
            np.concatenate(
                [
                    np.zeros(before + 1, np.int64),
                    np.cumsum([len(ids) for ids in lists], dtype=np.int64),
                ]
            ),
        )

    @staticmethod
    def of_lists(column: pa.ListArray) -> SamplingMask:
        """From a list of ids for each token; null, like an empty one: all were left."""
        offsets = np.concatenate(
            [[0], np.cumsum(pc.list_value_length(column).fill_null(0).to_numpy())]
        )
        return SamplingMask(flat(column), offsets.astype(np.int64))

    @staticmethod
    def of_rows(rows: pa.Table, ids: AnyArray, offsets: AnyArray) -> SamplingMask | None:
        """That of all rows end to end, from their column; None where no token was drawn from less
        than the vocabulary.

        ids, offsets: as in `RolloutTokens.of_rows`. Raises RecordError where it leaves out the
        token drawn.
        """
        column, tokens = one_chunk(rows, SAMPLING_MASK), np.diff(offsets)
        has = column.is_valid().to_numpy(zero_copy_only=False)
        lengths = np.where(has, pc.list_value_length(column).fill_null(0), tokens)
        check_lengths(lengths, SAMPLING_MASK, rows, offsets)
        lists = column.flatten()
        ids_left = flat(lists)
        if not len(ids_left):
            return None
        counts = np.zeros(len(ids), np.int64)
        counts[np.repeat(has, tokens)] = (
            pc.list_value_length(lists).fill_null(0).to_numpy(zero_copy_only=False)
        )
        drawn = np.bincount(
            np.repeat(np.arange(len(ids)), counts)[ids_left == np.repeat(ids, counts)],
            minlength=len(ids),
        )
        wrong = np.flatnonzero((counts > 0) & (drawn == 0))
        if len(wrong):
            row = int(np.searchsorted(offsets, wrong[0], side="right")) - 1
            raise RecordError(
                f"column '{SAMPLING_MASK}' of rollout {rows.column(ROLLOUT_ID)[row].as_py()} leaves"
                f" out token {ids[wrong[0]]} at {wrong[0] - offsets[row]}, which was drawn there;"
                " give the ids that truncation left, the drawn one among them, or null"
            )
        return SamplingMask(ids_left, np.r_[0, np.cumsum(counts)])

    @staticmethod
    def none(tokens: int) -> SamplingMask:
        """The mask of tokens from which nothing was left out."""
        return SamplingMask(np.zeros(0, np.int32), np.zeros(tokens + 1, np.int64))

    @staticmethod
    def joined(parts: Sequence[SamplingMask]) -> SamplingMask:
        """Several, end to end."""
        counts = np.concatenate([np.diff(part.offsets) for part in parts])
        return SamplingMask(
            np.concatenate([part.ids for part in parts]),
            np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        )

    def lists(self) -> list[AnyArray]:
        """The ids of each token."""
        return [self.ids[first:end] for first, end in itertools.pairwise(self.offsets.tolist())]

    def __getitem__(self, cut: slice) -> SamplingMask:
        """The mask of neighbouring tokens; views."""
        first, end, _ = cut.indices(len(self.offsets) - 1)
        offsets = self.offsets[first : max(first, end) + 1]
        return SamplingMask(self.ids[offsets[0] : offsets[-1]], offsets - offsets[0])

    def take(self, tokens: AnyArray) -> SamplingMask | None:
        """Those of some tokens, in their order; None where truncation left out nothing of any."""
        at, offsets = gather(self.offsets, tokens)
        return SamplingMask(self.ids[at], offsets) if len(at) else None

    def column(self, offsets: AnyArray) -> pa.ListArray:
        """A list per rollout, and in it a list per token: null where nothing was left out.

        offsets: int32 [rollouts + 1], where each rollout begins.
        """
        inner = pa.ListArray.from_arrays(
            self.offsets.astype(np.int32),
            pa.array(self.ids, pa.int32()),
            mask=pa.array(np.diff(self.offsets) == 0),
        )
        return pa.ListArray.from_arrays(offsets, inner)


# The tokens themselves.

NO_VERSION = -1
"""The version of a token that no policy drew."""


@dataclass(frozen=True, slots=True, eq=False)
class RolloutTokens:
    """Neighbouring tokens of a rollout, or those of several rollouts end to end; all arrays
    [tokens].
    """

    ids: AnyArray
    """int32."""
    mask: AnyArray
    """bool; true where the policy chose the token."""
    logprobs: AnyArray
    """float32, of the distribution really sampled from; 0 where the mask is false."""
    versions: AnyArray
    """int32, which weights produced the token; NO_VERSION where the mask is false."""
    sampling_mask: SamplingMask | None = None
    """The sampling masks of these tokens; None where they are not recorded."""

    @staticmethod
    def given(ids: AnyArray, *, mask: bool = False) -> RolloutTokens:
        """Tokens that no policy drew: a prompt's, what the world said. mask: to be trained all the
        same.
        """
        count = len(ids)
        return RolloutTokens(
            np.asarray(ids, np.int32),
            np.full(count, mask),
            np.zeros(count, np.float32),
            np.full(count, NO_VERSION, np.int32),
        )

    @staticmethod
    def drawn(
        ids: AnyArray,
        logprobs: AnyArray,
        versions: AnyArray,
        sampling_mask: SamplingMask | None = None,
    ) -> RolloutTokens:
        """Tokens that a policy drew."""
        return RolloutTokens(
            np.asarray(ids, np.int32),
            np.ones(len(ids), bool),
            np.asarray(logprobs, np.float32),
            np.asarray(versions, np.int32),
            sampling_mask,
        )

    @staticmethod
    def joined(parts: Sequence[RolloutTokens]) -> RolloutTokens:
        """Several, end to end. Where one of them has a sampling mask, nothing was left out from the
        others.
        """
        if len(parts) == 1:
            return parts[0]
        ids, mask, logprobs, versions = (
            np.concatenate([np.zeros(0, kind), *(getattr(part, name) for part in parts)])
            for name, kind in KINDS.items()
        )
        sampling_mask = None
        if any(part.sampling_mask is not None for part in parts):
            sampling_mask = SamplingMask.joined(
                [part.sampling_mask or SamplingMask.none(len(part)) for part in parts]
            )
        return RolloutTokens(ids, mask, logprobs, versions, sampling_mask)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, cut: slice) -> RolloutTokens:
        """Neighbouring tokens; views."""
        mask = self.sampling_mask
        return RolloutTokens(
            self.ids[cut],
            self.mask[cut],
            self.logprobs[cut],
            self.versions[cut],
            None if mask is None else mask[cut],
        )

    def take(self, tokens: AnyArray) -> RolloutTokens:
        """Some tokens, in their order."""
        mask = self.sampling_mask
        return RolloutTokens(
            self.ids[tokens],
            self.mask[tokens],
            self.logprobs[tokens],
            self.versions[tokens],
            None if mask is None else mask.take(tokens),
        )

    def columns(self, offsets: AnyArray, *, sampling_mask: bool = False) -> dict[str, pa.Array]:
        """A list per rollout of each of `COLUMNS`, and of `sampling_mask` where asked for: null
        where it left out none.

        offsets: int [rollouts + 1], where each rollout begins.
        """
        offsets = offsets.astype(np.int32, copy=False)
        columns = {
            name: pa.ListArray.from_arrays(offsets, pa.array(getattr(self, at)))
            for at, name in COLUMNS.items()
        }
        if not sampling_mask:
            return columns
        mask = self.sampling_mask or SamplingMask.none(len(self))
        return columns | {SAMPLING_MASK: mask.column(offsets)}

    @staticmethod
    def of_rows(rows: pa.Table) -> tuple[RolloutTokens, AnyArray]:
        """The tokens of all rows end to end, and where each row begins, int64 [rows + 1].

        Raises RecordError for lists of unequal length, and for a sampling mask that leaves out the
        token drawn.
        """
        lists = one_chunk(rows, TOKENS)
        offsets = np.r_[0, np.cumsum(list_lengths(lists))]
        ids = flat(lists).astype(np.int32, copy=False)
        mask, logprobs, versions = (
            per_token(rows, name, offsets) for name in (MASK, LOGPROBS, VERSIONS)
        )
        return RolloutTokens(
            ids,
            mask.astype(bool, copy=False),
            logprobs.astype(np.float32, copy=False),
            versions.astype(np.int32, copy=False),
            SamplingMask.of_rows(rows, ids, offsets)
            if SAMPLING_MASK in rows.column_names
            else None,
        ), offsets


COLUMNS = {"ids": TOKENS, "mask": MASK, "logprobs": LOGPROBS, "versions": VERSIONS}
"""The column of each array."""
KINDS = {"ids": np.int32, "mask": np.bool_, "logprobs": np.float32, "versions": np.int32}
"""And its type."""


# The training rows of one rollout: sequences that the policy has seen as they stand, and what it
# said in them.


NO_TURN = -1
"""The turn of a token that the policy did not choose."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainingRow:
    """A context, and what the policy said in it."""

    tokens: RolloutTokens
    turns: AnyArray
    """Which turn of the policy's sampled the token, counted from 0 over the whole rollout; else
    NO_TURN: int32."""

    @staticmethod
    def of(parts: Sequence[tuple[RolloutTokens, int]]) -> TrainingRow:
        """Made of parts in their order, each with its turn."""
        turns = [np.full(len(tokens), turn, np.int32) for tokens, turn in parts]
        return TrainingRow(
            RolloutTokens.joined([tokens for tokens, _ in parts]),
            np.concatenate([np.zeros(0, np.int32), *turns]),
        )


@dataclass(frozen=True, slots=True, eq=False)
class SampledCall:
    """One call of the policy: what it saw, and what was sampled behind it."""

    prompt: AnyArray
    """Token ids."""
    sampled: RolloutTokens


def training_rows(calls: Iterable[SampledCall]) -> list[TrainingRow]:
    """The rows of one rollout, whatever its caller did to the conversation between two calls.

    A call whose prompt begins with a row as it stands, prompt and all that was sampled in it, goes
    on with that row (the longest such); any other begins one: the past was cut, summed up or
    stripped, another agent speaks, or the call goes another way from where an earlier one began. So
    each sampled token is chosen in one row, and what of it stands in a later row is context there.
    Turns are numbered as the calls are; calls without tokens leave none.

    >>> import numpy as np
    >>> def call(prompt, *ids):
    ...     drawn = RolloutTokens.drawn(np.array(ids), np.full(len(ids), -1.0), np.zeros(len(ids)))
    ...     return SampledCall(np.array(prompt), drawn)
    >>> rows = training_rows([call([1], 2, 3), call([1, 2, 3, 4], 5), call([1, 9, 5, 4], 6)])
    >>> [(row.tokens.ids.tolist(), row.turns.tolist()) for row in rows]
    [([1, 2, 3, 4, 5], [-1, 0, 0, -1, 1]), ([1, 9, 5, 4, 6], [-1, -1, -1, -1, 2])]
    """
    rows: list[tuple[AnyArray, list[tuple[RolloutTokens, int]]]] = []
    for number, call in enumerate(calls):
        if not len(call.sampled):
            continue
        longest, parts = -1, list[tuple[RolloutTokens, int]]()
        for at, (ids, _) in enumerate(rows):
            is_longer = longest < 0 or len(ids) > len(rows[longest][0])
            if (
                is_longer
                and len(ids) <= len(call.prompt)
                and np.array_equal(call.prompt[: len(ids)], ids)
            ):
                longest = at
        if longest >= 0:
            ids_known, parts = rows[longest]
            parts.append((RolloutTokens.given(call.prompt[len(ids_known) :]), NO_TURN))
        else:
            parts.append((RolloutTokens.given(call.prompt), NO_TURN))
            rows.append((call.prompt, parts))
        parts.append((call.sampled, number))
        rows[longest] = np.concatenate([call.prompt, call.sampled.ids]), parts
    return [TrainingRow.of(parts) for _, parts in rows]


def end_to_end(rows: Sequence[TrainingRow]) -> tuple[RolloutTokens, AnyArray, AnyArray]:
    """All tokens of a rollout, with the columns `turn` and `training_row` of them, int32."""
    lengths = [len(row.tokens) for row in rows]
    return (
        RolloutTokens.joined([row.tokens for row in rows]),
        np.concatenate([np.zeros(0, np.int32), *(row.turns for row in rows)]),
        np.repeat(np.arange(len(rows), dtype=np.int32), lengths),
    )


def cuts(rows_S: AnyArray, offsets: AnyArray) -> AnyArray:
    """Where a training row begins that is not the rollout's first; bool [tokens].

    rows_S: the column `training_row` of some rollouts, end to end. offsets: [rollouts + 1], where
    each begins.
    """
    is_cut = np.zeros(len(rows_S), bool)
    is_cut[1:] = rows_S[1:] != rows_S[:-1]
    is_cut[offsets[:-1][np.diff(offsets) > 0]] = False
    return is_cut


def unfolded(offsets: AnyArray, cuts_S: AnyArray) -> tuple[AnyArray, AnyArray]:
    """Where each training row of some rollouts begins, [rows + 1], and which of the rollouts it is
    of, [rows].

    offsets: [rollouts + 1]. cuts_S: as `cuts` gives them. A rollout without tokens has one row.

    >>> import numpy as np
    >>> [found.tolist() for found in unfolded(np.array([0, 3, 5]), np.array([0, 0, 1, 0, 0], bool))]
    [[0, 2, 3, 5], [0, 0, 1]]
    """
    rollouts = np.arange(len(offsets) - 1)
    places = np.flatnonzero(cuts_S)
    if not len(places):
        return offsets, rollouts
    starts = np.r_[offsets[:-1], places]
    order = np.argsort(starts, kind="stable")
    owners = np.r_[rollouts, np.searchsorted(offsets, places, side="right") - 1]
    return np.r_[starts[order], offsets[-1]], owners[order]
