"""Which of some rows have ended, why, and what they wrote: read from the rows, without changing them."""

from __future__ import annotations

import numpy as np

from dataflow.records import AnyArray
from operators.engine.finish_reasons import BROKEN, STOPPED, TOO_LONG
from operators.engine.results import FinishedRow
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
