"""A plan in lines of text: totals, who sends and receives how much, kinds of copies, pairs of
ranks.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from transport.weights.costs.amounts import amount
from transport.weights.costs.interconnect import KINDS, Interconnect, cost
from transport.weights.layout.plan import CopyPlan, smaller
from transport.weights.layout.shards import Ints

PAIRS_SHOWN = 8
"""Ranks of either side up to which the bytes of each pair are listed."""
KINDS_SHOWN = 12


def explain(
    plan: CopyPlan, links: Interconnect | None = None, executors: Mapping[str, int] | None = None
) -> str:
    """Who sends how much to whom, in lines of text.

    links: tells the seconds as well. executors: pairs of ranks that each executor serves.
    """
    nbytes, copies = plan.pair_bytes, plan.pair_copies
    sources, destinations = nbytes.shape
    pairs = np.count_nonzero(nbytes)
    lines = [
        f"{amount(int(nbytes.sum()))} from {sources} to {destinations} ranks, "
        f"{copies.sum():,} copies between {pairs:,} of {nbytes.size:,} pairs",
        _spread(
            "each source rank sends",
            nbytes.sum(axis=1),
            copies.sum(axis=1),
            (nbytes > 0).sum(axis=1),
        ),
        _spread(
            "each destination rank receives",
            nbytes.sum(axis=0),
            copies.sum(axis=0),
            (nbytes > 0).sum(axis=0),
        ),
    ]
    if executors:
        lines.append(
            "executors: " + ", ".join(f"{name} for {n:,} pairs" for name, n in executors.items())
        )
    if links is not None:
        estimate = cost(nbytes, links)
        by_link = ", ".join(f"{amount(estimate.link_bytes[kind])} {kind}" for kind in KINDS)
        lines.append(
            f"at least {estimate.seconds:.3g} s by the model: {estimate.busiest} ({by_link})"
        )
    lines += ["", "tensors dealt out alike"]
    for kind, tensors in plan.kinds[:KINDS_SHOWN]:
        (origin, target), per_tensor = tensors[0], len(kind.to)
        first = f"{target.name} {list(target.shape)} {smaller(origin.dtype, target.dtype)}"
        suffix = f" and {len(tensors) - 1:,} like it" if len(tensors) > 1 else ""
        lines.append(
            f"  {first}{suffix}: {per_tensor:,} {'copy' if per_tensor == 1 else 'copies'} each"
        )
    if len(plan.kinds) > KINDS_SHOWN:
        lines.append(f"  and {len(plan.kinds) - KINDS_SHOWN:,} more kinds")
    if max(sources, destinations) <= PAIRS_SHOWN:
        lines += ["", *_matrix(nbytes)]
    return "\n".join(lines)


def _spread(label: str, nbytes: Ints, copies: Ints, peers: Ints) -> str:
    def of(values: Ints, text: str = "{:,.0f}") -> str:
        least, middle, most = int(np.min(values)), float(np.median(values)), int(np.max(values))
        show = amount if text == "bytes" else text.format
        return show(most) if least == most else f"{show(least)} | {show(middle)} | {show(most)}"

    return f"{label} {of(nbytes, 'bytes')} in {of(copies)} copies, with {of(peers)} peers"


def _matrix(nbytes: Ints) -> list[str]:
    """Bytes of each pair: a line per source rank, a column per destination rank."""
    rows = [["from \\ to", *map(str, range(nbytes.shape[1]))]]
    rows += [
        [str(rank), *(amount(n) if n else "." for n in line)]
        for rank, line in enumerate(nbytes.tolist())
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
