"""Log-probabilities and entropies of chosen tokens from logits; uses torch.

Axis suffixes as in `packing`; and V vocabulary, M tokens drawn from less than it, P pairs of a row
and an id whose logit is wanted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Wanted:
    """Which tokens' log-probabilities are asked for, on the device of the hidden states."""

    head_T: Tensor
    """Row of the hidden states that each is predicted from."""
    targets_T: Tensor
    """The tokens."""
    tokens_M: Tensor | None = None
    """Which of the T were drawn from what truncation left of the vocabulary; None: none was."""
    segment_K: Tensor | None = None
    """Index into M of each id that was left."""
    ids_K: Tensor | None = None
    """The ids."""

    def pairs(self) -> tuple[Tensor, Tensor]:
        """Row and id of every logit that is wanted by itself: those of the T, then those of the
        K.
        """
        if self.tokens_M is None or self.segment_K is None or self.ids_K is None:
            return self.head_T, self.targets_T
        rows_K = self.head_T[self.tokens_M][self.segment_K]
        return torch.cat([self.head_T, rows_K]), torch.cat([self.targets_T, self.ids_K])


def logprobs_of_logits(
    logits_U_V: Tensor, selection: Wanted, temperature: float, *, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities [T] and, where asked for, entropies [T] in nats, differentiable in the
    logits.
    """
    if logits_U_V.dtype in (torch.bfloat16, torch.float16):
        logits_U_V = logits_U_V.float()
    if temperature != 1.0:
        logits_U_V = logits_U_V / temperature
    logs_U_V = logits_U_V.log_softmax(-1)
    entropy_U = -(logs_U_V.exp() * logs_U_V).sum(-1) if entropy else None
    if selection.tokens_M is None:
        return composed(
            selection, logs_U_V.new_zeros(len(logs_U_V)), logs_U_V[selection.pairs()], entropy_U
        )
    return composed(selection, logits_U_V.logsumexp(-1), logits_U_V[selection.pairs()], entropy_U)


def composed(
    selection: Wanted, normalizer_U: Tensor, picked_P: Tensor, entropy_U: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """What is asked for, from each row's normaliser and entropy and the logits of the pairs."""
    normalizer_T = normalizer_U[selection.head_T]
    entropy_T = None if entropy_U is None else entropy_U[selection.head_T]
    values_T = picked_P[: len(selection.targets_T)]
    if selection.tokens_M is not None and selection.segment_K is not None:
        values_K = picked_P[len(selection.targets_T) :]
        normalizer_M = _segment_logsumexp(values_K, selection.segment_K, len(selection.tokens_M))
        normalizer_T = normalizer_T.index_copy(0, selection.tokens_M, normalizer_M)
        if entropy_T is not None:
            shares_K = (values_K - normalizer_M[selection.segment_K]).exp()
            mean_M = torch.zeros_like(normalizer_M).index_add(
                0, selection.segment_K, shares_K * values_K
            )
            entropy_T = entropy_T.index_copy(0, selection.tokens_M, normalizer_M - mean_M)
    return values_T - normalizer_T, entropy_T


def _segment_logsumexp(values_K: Tensor, segment_K: Tensor, segments: int) -> Tensor:
    """Logarithm of the sum of the exponentials of each segment."""
    given_K = values_K.detach()
    most_M = given_K.new_zeros(segments).scatter_reduce_(
        0, segment_K, given_K, "amax", include_self=False
    )
    powers_K = (values_K - most_M[segment_K]).exp()
    return most_M + powers_K.new_zeros(segments).index_add(0, segment_K, powers_K).log()
