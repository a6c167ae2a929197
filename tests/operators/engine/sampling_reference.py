"""The distribution of the next token in float64, one token after the other: slow, and plain to
read.
"""

import math

import torch

from operators.engine.sampler import Sampling


def reference(
    logits: torch.Tensor, sampling: Sampling, seen: torch.Tensor | None = None
) -> torch.Tensor:
    """Log-probabilities float64 [V] of one row of logits [V]; seen: bool [V]."""
    scores = logits.double().tolist()
    penalty = sampling.repetition_penalty
    if penalty != 1:
        assert seen is not None
        for token in seen.nonzero()[:, 0].tolist():
            scores[token] = (
                scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
            )
    if sampling.temperature == 0:
        return torch.tensor(
            [
                0.0 if token == scores.index(max(scores)) else -math.inf
                for token in range(len(scores))
            ]
        )
    scores = [score / sampling.temperature for score in scores]
    if sampling.top_k:
        last = sorted(scores, reverse=True)[: sampling.top_k][-1]
        scores = [score if score >= last else -math.inf for score in scores]
    if sampling.top_p < 1:
        shares = _softmax(scores)
        reached, last = 0.0, 1.0
        for share in sorted(shares, reverse=True):
            reached, last = reached + share, share
            if reached >= sampling.top_p:
                break
        scores = [
            score if share >= last else -math.inf
            for score, share in zip(scores, shares, strict=True)
        ]
    if sampling.min_p:
        shares = _softmax(scores)
        least = sampling.min_p * max(shares)
        scores = [
            score if share >= least else -math.inf
            for score, share in zip(scores, shares, strict=True)
        ]
    return torch.tensor(_softmax(scores), dtype=torch.float64).log()


def _softmax(scores: list[float]) -> list[float]:
    best = max(scores)
    weights = [math.exp(score - best) for score in scores]
    total = math.fsum(weights)
    return [weight / total for weight in weights]
