"""A rollout's tokens, one array per column: from the engine, over wire and disk, to the trainer.

What an array more asks for is in CONTRIBUTING.md ("Add a column per token").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from dataflow.records import LOGPROBS, MASK, SAMPLING_MASK, TOKENS, VERSIONS, AnyArray
from dataflow.tokens.ragged import flat, list_lengths, one_chunk, per_token
from dataflow.tokens.sampling_mask import SamplingMask

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
