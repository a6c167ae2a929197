"""What live rollouts have drawn since it was last asked: read from the rows, without changing them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import numpy as np

from dataflow.folder.partial_rollouts import Stretch
from operators.engine.results import Row
from operators.engine.rows import Rows


def grown(
    rows: Rows, parked: Iterable[Row], behind: int, since: Callable[[int], int], least: int
) -> list[tuple[int, Stretch]]:
    """By ticket, the tokens beyond the first `since(ticket)` of a completion, where they are `least` or more.

    behind: newest tokens of each row in the batch that may come after its end, and are left out.
    """
    counts = rows.lengths - rows.starts - behind
    at = np.nonzero(counts >= least)[0]
    known = np.array([since(ticket) for ticket in rows.ticket[at].tolist()], np.int64)
    due = counts[at] - known >= least
    at, known = at[due], known[due]
    found = [piece for row in parked if (piece := _of_parked(row, since(row.ticket), least)) is not None]
    if not len(at):
        return found
    starts = rows.starts[at]
    tokens, logprobs, versions = rows.between(at, starts + known, starts + counts[at])
    bounds = np.concatenate([[0], np.cumsum(counts[at] - known)]).tolist()
    for row, begin, (first, end) in zip(at.tolist(), known.tolist(), itertools.pairwise(bounds), strict=True):
        masks, cut = rows.kept[row], slice(first, end)
        stretch = Stretch(
            begin=begin, tokens=tokens[cut], logprobs=logprobs[cut], versions=versions[cut],
            masks=None if masks is None else masks[begin : begin + end - first],
        )  # fmt: skip
        found.append((int(rows.ticket[row]), stretch))
    return found


def _of_parked(row: Row, begin: int, least: int) -> tuple[int, Stretch] | None:
    if len(row.tokens) - row.start - begin < least:
        return None
    new = slice(row.start + begin, None)
    stretch = Stretch(
        begin=begin, tokens=row.tokens[new], logprobs=row.logprobs[new], versions=row.versions[new],
        masks=None if row.kept is None else row.kept[begin:],
    )  # fmt: skip
    return row.ticket, stretch
