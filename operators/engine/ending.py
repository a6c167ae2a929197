"""Which of some rows have ended, why, and what they wrote: read from the rows, without changing them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dataflow.records import AnyArray
from operators.engine.reasons import BROKEN, STOPPED, TOO_LONG
from operators.engine.results import Finished
from operators.engine.rows import Rows


@dataclass(frozen=True)
class Ended:
    """Rows that ended."""

    which: AnyArray
    """Whether each of the rows asked about is among them, bool."""
    finished: Finished


def ended_of(rows: Rows, at: AnyArray, ends: AnyArray, behind: int = 0) -> Ended | None:
    """Those of the rows `at` that have ended; rows that only might have hit a stop string have not.

    ends: tokens that end a row, bool [V]. behind: tokens that these rows have drawn since, which are cut off.
    """
    lengths, starts = rows.lengths[at] - behind, rows.starts[at].copy()
    tickets = rows.ticket[at]
    tokens, logprobs, versions = rows.drawn(at)
    last = np.arange(len(at)), lengths - 1
    broken = ~np.isfinite(logprobs[last])
    stopped = ends[tokens[last]] & ~broken
    too_long = lengths >= rows.limits[at]
    texts: dict[int, str] = {}
    for i in np.nonzero(~broken & ~stopped)[0]:
        stop = rows.stop[at[i]]
        text = stop.find(tokens[i, starts[i] : lengths[i]]) if stop is not None else None
        if text is not None:
            texts[int(tickets[i])] = text
            stopped[i] = True
    which = broken | stopped | too_long
    if not which.any():
        return None
    kept = {int(tickets[i]): rows.kept[at[i]] for i in np.nonzero(which)[0]}
    return Ended(
        which,
        Finished(
            tickets=tickets[which],
            tokens=tokens[which],
            logprobs=logprobs[which],
            versions=versions[which],
            starts=starts[which],
            lengths=(lengths - broken)[which],
            reasons=np.where(broken, BROKEN, np.where(stopped, STOPPED, TOO_LONG))[which],
            texts=texts,
            kept={ticket: masks for ticket, masks in kept.items() if masks is not None},
        ),
    )
