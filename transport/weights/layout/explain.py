"""A plan in lines of text: totals, who sends and receives how much, kinds of copies, pairs of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from transport.weights.costs.links import KINDS, Cost
from transport.weights.layout.amounts import amount
from transport.weights.layout.shards import Ints

PAIRS_SHOWN = 8
"""Ranks of either side up to which the bytes of each pair are listed."""
KINDS_SHOWN = 12


@dataclass(frozen=True)
class Summary:
    """What is told of a plan."""

    pair_bytes: Ints
    """[source ranks, destination ranks]"""
    pair_copies: Ints
    """[source ranks, destination ranks]"""
    kinds: Sequence[tuple[str, int, int]]
    """For tensors that are dealt out alike: their first, how many they are, copies of each."""
    cost: Cost | None
    executors: Mapping[str, int]
    """Pairs of ranks that each serves."""


def table(plan: Summary) -> str:
    """The lines."""
    nbytes, copies = plan.pair_bytes, plan.pair_copies
    sources, destinations = nbytes.shape
    pairs = np.count_nonzero(nbytes)
    lines = [
        f"{amount(int(nbytes.sum()))} from {sources} to {destinations} ranks, "
        f"{copies.sum():,} copies between {pairs:,} of {nbytes.size:,} pairs",
        _spread("each source rank sends", nbytes.sum(axis=1), copies.sum(axis=1), (nbytes > 0).sum(axis=1)),
        _spread("each destination rank receives", nbytes.sum(axis=0), copies.sum(axis=0), (nbytes > 0).sum(axis=0)),
    ]
    if plan.executors:
        lines.append("executors: " + ", ".join(f"{name} for {n:,} pairs" for name, n in plan.executors.items()))
    if plan.cost is not None:
        by_link = ", ".join(f"{amount(plan.cost.link_bytes[kind])} {kind}" for kind in KINDS)
        lines.append(f"at least {plan.cost.seconds:.3g} s by the model: {plan.cost.busiest} ({by_link})")
    lines += ["", "tensors dealt out alike"]
    for first, tensors, each in plan.kinds[:KINDS_SHOWN]:
        others = f" and {tensors - 1:,} like it" if tensors > 1 else ""
        lines.append(f"  {first}{others}: {each:,} {'copy' if each == 1 else 'copies'} each")
    if len(plan.kinds) > KINDS_SHOWN:
        lines.append(f"  and {len(plan.kinds) - KINDS_SHOWN:,} more kinds")
    if max(sources, destinations) <= PAIRS_SHOWN:
        lines += ["", *_matrix(nbytes)]
    return "\n".join(lines)


def _spread(what: str, nbytes: Ints, copies: Ints, peers: Ints) -> str:
    def of(values: Ints, text: str = "{:,.0f}") -> str:
        least, middle, most = int(np.min(values)), float(np.median(values)), int(np.max(values))
        show = amount if text == "bytes" else text.format
        return show(most) if least == most else f"{show(least)} | {show(middle)} | {show(most)}"

    return f"{what} {of(nbytes, 'bytes')} in {of(copies)} copies, with {of(peers)} peers"


def _matrix(nbytes: Ints) -> list[str]:
    """Bytes of each pair: a line per source rank, a column per destination rank."""
    rows = [["from \\ to", *map(str, range(nbytes.shape[1]))]]
    rows += [[str(rank), *(amount(n) if n else "." for n in line)] for rank, line in enumerate(nbytes.tolist())]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
