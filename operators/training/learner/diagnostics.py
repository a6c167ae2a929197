"""What a step measures of its tokens while it computes them: sums and maxima on the device, figures
at the end.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dataflow.records import REF_LOGPROBS

Measures = Mapping[str, float | None]

_MOST_LOG_RATIO = 300.0
"""Of a token, in figures: the square of such a ratio is still a number in float64."""
POLICY_SUMS = ("tokens", "ratio", "squared_ratio", "kl", "truncated", "same_tokens", "same_gap")
"""What is summed of a policy's tokens; the last two of those drawn from the very weights that are
trained."""
VALUE_SUMS = ("tokens", "target", "squared_target", "residual", "squared_residual")
"""What is summed of a critic's tokens."""


def ratio_bounds(
    knobs: Mapping[str, object], reads: Collection[str] = ()
) -> tuple[float, float] | None:
    """The interval of the ratio that a loss leaves alone, from its knobs: rho, or clip_low and
    clip_high.

    None where they bound another ratio: that of whole rollouts, or that to a proximal policy.
    """
    if {"rollout_index", "proximal_logprobs"} & set(reads):
        return None
    if "rho" in knobs:
        return 0.0, float(knobs["rho"])  # type: ignore[arg-type]
    if "clip_high" in knobs:
        low = knobs.get("clip_low")
        return (0.0 if low is None else 1.0 - float(low)), 1.0 + float(knobs["clip_high"])  # type: ignore[arg-type]
    return None


def sums_of(computed: Collection[str], columns: Collection[str]) -> tuple[str, ...]:
    """What is summed for a loss that reads these: of a critic's tokens where it reads values, else
    of a policy's.
    """
    if "new_values" in computed:
        return VALUE_SUMS
    return (
        *POLICY_SUMS,
        *(["entropy"] if "entropy" in computed else []),
        *(["kl_reference"] if REF_LOGPROBS in columns else []),
    )


@dataclass
class Diagnostics:
    """Sums over the micro-batches of one step; `total` of several ranks' is that of their sums and
    maxima.
    """

    bounds: tuple[float, float] | None
    """See `ratio_bounds`."""
    version: int
    """Steps behind the weights that are trained."""
    names: tuple[str, ...]
    """Of the sums; see `sums_of`."""
    _sums: list[Tensor] = field(default_factory=list)
    _largest: list[Tensor] = field(default_factory=list)

    def policy(
        self,
        new_T: Tensor,
        old_T: Tensor,
        oldest_T: Tensor,
        *,
        entropy_T: Tensor | None = None,
        reference_T: Tensor | None = None,
    ) -> None:
        """Add a micro-batch of a policy: log-probabilities of trainer, generator, reference; no
        gradients.

        oldest_T: of each token's rollout the oldest version that drew any of it.
        """
        log_ratio = (new_T - old_T).double()
        ratio = log_ratio.clamp(max=_MOST_LOG_RATIO).exp()
        low, high = self.bounds or (0.0, math.inf)
        same = oldest_T == self.version
        sums = [
            torch.full_like(ratio[:1], len(ratio)).sum(),
            ratio.sum(),
            (ratio * ratio).sum(),
            (ratio - 1 - log_ratio).sum(),
            ((ratio > high) | (ratio < low)).sum(),
            same.sum(),
            log_ratio.abs().mul(same).sum(),
        ]
        if entropy_T is not None:
            sums.append(entropy_T.sum())
        if reference_T is not None:
            gap = (reference_T - new_T).double()
            sums.append((gap.clamp(max=_MOST_LOG_RATIO).exp() - 1 - gap).sum())
        self._add(sums, ratio.max() if len(ratio) else ratio.new_zeros(()))

    def critic(self, new_T: Tensor, target_T: Tensor) -> None:
        """Add a micro-batch of a critic: its values and what they should have been, without
        gradient.
        """
        gap = target_T - new_T
        sums = [
            torch.full_like(gap[:1], len(gap)).sum(),
            target_T.sum(),
            (target_T * target_T).sum(),
            gap.sum(),
            (gap * gap).sum(),
        ]
        self._add(sums, new_T.abs().max() if len(new_T) else new_T.new_zeros(()))

    def totals(self) -> tuple[Tensor, Tensor]:
        """All sums, float64 [names], and the largest of the maxima, float64 []."""
        if not self._sums:
            return torch.zeros(len(self.names), dtype=torch.float64), torch.zeros(
                (), dtype=torch.float64
            )
        return torch.stack(self._sums).sum(0), torch.stack(self._largest).max()

    def measures(self, sums: list[float], largest: float) -> Measures:
        """Figures under their names in metrics.jsonl, from `totals` as plain numbers; None where
        nothing was computed.

        ratio_mean, ratio_max: pi / mu. ess: effective share of the tokens, (sum r)^2 / (n sum r^2).
        kl: estimate of KL(generator || trainer), kl_reference: of KL(trainer || reference), both
        nats per token (k3). mismatch: mean |log pi - log mu| of rollouts drawn whole from the
        weights that are trained, which should be rounding alone: a token drawn from them after
        others of older weights has seen a KV-cache that the older ones left. explained_variance: 1
        - Var(target - value) / Var(target).
        """
        totals = dict(zip(self.names, sums, strict=True))
        tokens = totals.get("tokens", 0.0)
        if not tokens:
            return {}
        if "target" in totals:
            spread = totals["squared_target"] / tokens - (totals["target"] / tokens) ** 2
            residual = totals["squared_residual"] / tokens - (totals["residual"] / tokens) ** 2
            return {
                "value_mean": (totals["target"] - totals["residual"]) / tokens,
                "value_max": largest,
                "explained_variance": 1 - residual / spread if spread > 1e-12 else None,
            }
        measures: dict[str, float | None] = {
            "ratio_mean": totals["ratio"] / tokens,
            "ratio_max": largest,
            "ess": (
                totals["ratio"] ** 2 / (tokens * totals["squared_ratio"])
                if totals["squared_ratio"]
                else None
            ),
            "kl": totals["kl"] / tokens,
            "truncated_share": totals["truncated"] / tokens if self.bounds else None,
            "mismatch": totals["same_gap"] / totals["same_tokens"]
            if totals["same_tokens"]
            else None,
        }
        for name in ("entropy", "kl_reference"):
            if name in totals:
                measures[name] = totals[name] / tokens
        return measures

    def _add(self, sums: list[Tensor], largest: Tensor) -> None:
        self._sums.append(torch.stack([value.to(torch.float64) for value in sums]))
        self._largest.append(largest.to(torch.float64))
