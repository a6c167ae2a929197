"""Seconds of what ranks exchange, at the full rates of their links."""

from __future__ import annotations

from dataflow.foresight.catalogue import DeviceKind
from dataflow.foresight.counts import Counts

PER_LAYER = 2
"""All-reduces of tensor parallelism: behind attention and behind the MLP (Shoeybi et al., arXiv
1909.08053)."""

PER_LEARNT_LAYER = 3
"""Exchanges of ranks that each hold a part of the weights: gathered for the forward and for the
backward pass, gradients reduced and dealt out (Zhao et al., arXiv 2304.11277)."""


def all_reduces(model: Counts, kind: DeviceKind, ranks: int, tokens: float) -> float:
    """Of the hidden states of so many tokens, in all layers.

    By rings: 2 (n - 1) / n of the bytes leave each rank (Patarasuk and Yuan, 2009); over nodes, all
    links of a node work at once.
    """
    if ranks == 1:
        return 0.0
    nbytes = PER_LAYER * model.layers * 2 * (ranks - 1) / ranks * tokens * model.width * 2
    return nbytes / (
        kind.between_bytes_per_s * kind.per_node
        if ranks > kind.per_node
        else kind.within_bytes_per_s
    )
