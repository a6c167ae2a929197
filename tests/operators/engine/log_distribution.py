"""What the sampler draws from, as log-probabilities of the whole vocabulary."""

import torch
from torch import Tensor

from operators.engine.sampler import (
    RowSampling,
    Sampling,
    _only,
    _scaled,
    block_sums,
    columns_of,
    left_out,
)


def log_distribution(
    logits: Tensor, sampling: Sampling | RowSampling, seen: Tensor | None = None
) -> Tensor:
    """Log-probabilities that tokens are drawn with, float32 [n, V]; -inf where truncation left one
    out.

    seen: bool [n, V], tokens that stand in each row; needed for a repetition penalty (ValueError
    without it).
    """
    knobs = columns_of(sampling, logits)
    scores = _scaled(logits, knobs, seen)
    shares = torch.softmax(scores, dim=-1)
    best, likeliest = scores.max(dim=-1, keepdim=True)
    largest = shares.amax(dim=-1, keepdim=True)
    gone = left_out(scores, shares, knobs)
    if gone is not None:
        scores = scores.masked_fill(gone, -torch.inf)
        shares.masked_fill_(gone, 0)
    total = block_sums(shares).sum(dim=-1, keepdim=True, dtype=torch.float64)
    found = scores - best + (largest / total).log().float()
    if knobs.greedy is None:
        return found
    certain = torch.zeros_like(scores).masked_fill_(~_only(likeliest, scores), -torch.inf) + (
        best - best
    )
    return torch.where(knobs.greedy, certain, found)
