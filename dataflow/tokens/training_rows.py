"""The training rows of one rollout: sequences that the policy has seen as they stand, and what it
said in them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from dataflow.records import AnyArray
from dataflow.tokens.rollout_tokens import RolloutTokens

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
