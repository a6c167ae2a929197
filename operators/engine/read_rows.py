"""What is read from the rows, without changing them: which have ended, why, and what live ones have drawn since."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import numpy as np

from dataflow.folder.partial_rollouts import PartialRollout
from dataflow.records import AnyArray
from dataflow.rollout_tokens import RolloutTokens, SamplingMask
from operators.engine.finish_reasons import BROKEN, STOPPED, TOO_LONG
from operators.engine.results import FinishedRow, Row
from operators.engine.rows import Rows


def finished_rows(rows: Rows, at: AnyArray, ends: AnyArray, behind: int = 0) -> tuple[AnyArray, list[FinishedRow]]:
    """Which of the rows `at` have ended, and what they wrote; rows that only might have hit a stop string have not.

    ends: tokens that end a row, bool [V]. behind: tokens that these rows have drawn since, which are cut off.
    """
    lengths, starts = rows.lengths[at] - behind, rows.starts[at].copy()
    tickets = rows.ticket[at]
    drawn = rows.drawn(at)
    tokens, logprobs, _ = drawn
    last = np.arange(len(at)), lengths - 1
    broken = ~np.isfinite(logprobs[last])
    stopped = ends[tokens[last]] & ~broken
    too_long = lengths >= rows.limits[at]
    texts: dict[int, str] = {}
    for i in np.nonzero(~broken & ~stopped)[0]:
        stop = rows.stop[at[i]]
        text = stop.find(tokens[i, starts[i] : lengths[i]]) if stop is not None else None
        if text is not None:
            texts[int(i)] = text
            stopped[i] = True
    which = np.nonzero(broken | stopped | too_long)[0]
    reasons = np.where(broken, BROKEN, np.where(stopped, STOPPED, TOO_LONG))
    written = rows.rollouts(at[which], drawn, which, behind + broken[which])
    return at[which], [
        FinishedRow(
            ticket=int(tickets[i]), tokens=tokens, start=int(starts[i]), reason=int(reasons[i]), text=texts.get(i)
        )
        for i, tokens in zip(which.tolist(), written, strict=True)
    ]  # fmt: skip


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
