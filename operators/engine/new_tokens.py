"""What live rollouts have drawn since it was last asked: read from the rows, without changing them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import numpy as np

from dataflow.folder.partial_rollouts import PartialRollout
from dataflow.rollout_tokens import RolloutTokens, SamplingMask
from operators.engine.results import Row
from operators.engine.rows import Rows


def new_tokens(
    rows: Rows, parked: Iterable[Row], behind: int, since: Callable[[int], int], least: int
) -> list[tuple[int, PartialRollout]]:
    """By ticket, the tokens beyond the first `since(ticket)` of a completion, where they are `least` or more.

    behind: newest tokens of each row in the batch that may come after its end, and are left out.
    """
    counts = rows.lengths - rows.starts - behind
    at = np.nonzero(counts >= least)[0]
    known = np.array([since(ticket) for ticket in rows.ticket[at].tolist()], np.int64)
    due = counts[at] - known >= least
    at, known = at[due], known[due]
    found = [new for row in parked if (new := _of_parked(row, since(row.ticket), least)) is not None]
    if not len(at):
        return found
    starts = rows.starts[at]
    tokens, logprobs, versions = rows.between(at, starts + known, starts + counts[at])
    bounds = np.concatenate([[0], np.cumsum(counts[at] - known)]).tolist()
    for row, begin, (first, end) in zip(at.tolist(), known.tolist(), itertools.pairwise(bounds), strict=True):
        masks, cut = rows.masks[row], slice(first, end)
        mask = None if masks is None else SamplingMask.of(masks[begin : begin + end - first])
        drawn = RolloutTokens.drawn(tokens[cut], logprobs[cut], versions[cut], mask)
        found.append((int(rows.ticket[row]), PartialRollout(begin=begin, tokens=drawn)))
    return found


def _of_parked(row: Row, begin: int, least: int) -> tuple[int, PartialRollout] | None:
    if len(row.tokens) - row.start - begin < least:
        return None
    return row.ticket, PartialRollout(begin=begin, tokens=row.tokens[row.start + begin :])
