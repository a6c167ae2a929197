"""Draws the next token of each row, and says how likely it was under the distribution really drawn from.

Noise is a function of (seed of the rollout, how many tokens it has drawn), so a rollout draws the same tokens
whatever else is in the batch. Axes: n rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)
_UNIT = 2.0**-40


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn from the logits."""

    temperature: float = 1.0
    """Divides the logits; 0: always the likeliest token, with log-probability 0."""
    top_k: int = 0
    """Only the k likeliest tokens (and those tied with the last of them); 0: all."""
    top_p: float = 1.0
    """Only the likeliest tokens that together reach this probability; 1: all."""


def uniform(seeds: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Multiples of 2^-40 in [0, 1), float64 [n], splitmix64 (Steele et al. 2014) of seeds and counts [n]."""
    z = seeds + (counts + 1) * _GOLDEN
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * _FIRST
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * _SECOND
    z = z ^ ((z >> 31) & 0x1FFFFFFFF)
    return ((z >> 24) & 0xFFFFFFFFFF).double() * _UNIT


def log_distribution(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Log-probabilities that tokens are drawn with, float32 [n, V]; -inf where truncation left one out."""
    logits = logits.float()
    if sampling.temperature != 1.0:
        logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        least = torch.topk(logits, sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if sampling.top_p < 1.0:
        ordered, order = torch.sort(logits, dim=-1, descending=True, stable=True)
        probabilities = torch.softmax(ordered, dim=-1)
        before = probabilities.cumsum(-1) - probabilities
        left_out = torch.zeros_like(before, dtype=torch.bool).scatter_(-1, order, before >= sampling.top_p)
        logits = logits.masked_fill(left_out, -torch.inf)
    return torch.log_softmax(logits, dim=-1)


def draw(
    logits: torch.Tensor, sampling: Sampling, seeds: torch.Tensor, counts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The next token of each row, int64 [n], and its log-probability [n]; not finite for broken logits."""
    if sampling.temperature == 0.0:
        best, chosen = logits.max(dim=-1)
        return chosen, (best - best).float()
    logprobs = log_distribution(logits, sampling)
    reached = logprobs.exp().cumsum(-1, dtype=torch.float64)
    mark = uniform(seeds, counts)[:, None] * reached[:, -1:]
    chosen = torch.searchsorted(reached, mark, right=True).clamp_(max=logits.shape[-1] - 1)
    return chosen[:, 0], logprobs.gather(-1, chosen)[:, 0]
