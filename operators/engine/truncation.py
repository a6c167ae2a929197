"""Which tokens top-k, top-p and min-p leave out of a draw, each seeing what the one before left.

Axes: n rows, V vocabulary, B blocks of it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from operators.engine.sampling_params import RowSampling

NUCLEI = (64, 1024)
"""Numbers of likeliest tokens among which a CPU looks for the nucleus of top-p before it sorts the
vocabulary."""
SORTED_WHOLE = 1024
"""A CPU sorts rows up to this size rather than search them for their largest: numpy's sort is
vectorised."""
SORTED_SHARE = 16
"""And larger ones where more than one number in this many is wanted."""


def left_out(scores: Tensor, shares: Tensor, knobs: RowSampling) -> Tensor | None:
    """Which tokens truncation leaves out, bool [n, V]; None where no row truncates. shares: softmax
    of the scores."""
    found = None
    if knobs.top_k is not None:
        widest = min(knobs.widest, scores.shape[-1])
        likeliest = _largest(scores, widest)
        last = (knobs.top_k.clamp(1, widest) - 1).expand(len(scores), 1)
        found = (scores < likeliest.gather(-1, last)) & (knobs.top_k > 0)
    if knobs.top_p is not None:
        rest = shares if found is None else shares.masked_fill(found, 0)
        outside = rest < _least_of_nucleus(rest, knobs.top_p)
        found = outside if found is None else found | outside
    if knobs.min_p is not None:
        unlikely = shares < shares.amax(dim=-1, keepdim=True) * knobs.min_p
        found = unlikely if found is None else found | unlikely
    return found


def _least_of_nucleus(shares: Tensor, top_p: Tensor) -> Tensor:
    """The smallest share that top-p keeps, float32 [n, 1]; 0 where it is off. shares need not add
    up to 1."""
    width = shares.shape[-1]
    wanted = top_p * block_sums(shares).sum(dim=-1, keepdim=True, dtype=torch.float64)
    few = [count for count in NUCLEI if shares.is_cpu and not _sorts(count, width)]
    for count in (*few, width):
        ordered = _largest(shares, count)
        reached = ordered.cumsum(-1, dtype=torch.float64)
        if count == width or bool(((reached[:, -1:] >= wanted) | top_p.isinf()).all()):
            break
    last = torch.searchsorted(reached, wanted).clamp_(max=ordered.shape[-1] - 1)
    return ordered.gather(-1, last).masked_fill(top_p.isinf(), 0)


def _largest(values: Tensor, count: int) -> Tensor:
    """The largest of each row of [n, V], the first first, [n, count]; not a number counts as the
    largest."""
    width = values.shape[-1]
    if values.is_cpu and _sorts(count, width):
        return torch.from_numpy(np.sort(values.detach().numpy(), axis=-1)[:, width - count :]).flip(
            -1
        )
    if count == width:
        return torch.sort(values, dim=-1, descending=True).values
    return torch.topk(values, count, dim=-1).values


def _sorts(count: int, width: int) -> bool:
    """Whether a CPU is quicker when it sorts the whole row."""
    return width <= SORTED_WHOLE or SORTED_SHARE * count > width


def block_width(vocabulary: int) -> int:
    """Tokens that are first looked at as one: about the root of their number."""
    return 1 << (vocabulary.bit_length() // 2)


def block_sums(shares: Tensor) -> Tensor:
    """Sums over blocks of neighbouring tokens, the last one maybe shorter, float32 [n, B]."""
    width = block_width(shares.shape[-1])
    whole = shares.shape[-1] // width
    sums = torch.unflatten(shares[:, : whole * width], -1, (whole, width)).sum(dim=-1)
    tail = shares[:, whole * width :]
    return torch.cat([sums, tail.sum(dim=-1, keepdim=True)], dim=-1) if tail.shape[-1] else sums
