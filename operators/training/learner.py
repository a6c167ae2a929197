"""The optimiser step over packed micro-batches: forward, loss, backward, clip, update; imports torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dataflow.errors import OperatorError
from operators.packing import Array, gather, pack, split
from operators.training.loss_function import LossFunction
from operators.training.policy import Policy
from operators.training.rows import StepRows


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a step did; means are over the tokens that were computed."""

    loss: float
    grad_norm: float
    """Before clipping."""
    ratio_mean: float | None
    """Mean of pi / mu."""
    kl: float | None
    """Estimate of KL(generator || trainer) in nats per token: mean of r - 1 - log r (k3), r = pi / mu."""
    clipped_share: float | None
    """Share of tokens beyond the loss's bounds on the ratio; None when it has none."""
    nodes: int
    """Tokens that went through the model."""
    culprit: str | None = None
    """What was not finite; then the weights were left as they were."""


@dataclass
class Learner:
    """Trains one policy; one call of `micro` per micro-batch, between `begin` and `end`.

    normalize: what the summed loss is divided by: "tokens" (trained tokens of the step), "rollouts", or
    "rollout_means" (rollouts, after each rollout's sum was divided by its tokens).
    """

    policy: Policy
    optimizer: torch.optim.Optimizer
    loss: LossFunction
    node: str
    normalize: str
    max_grad_norm: float
    micro_batch_tokens: int
    skip_zero_advantage: bool
    _rows: StepRows | None = None
    _scale_R: Array = field(default_factory=lambda: np.zeros(0))
    _sums: list[Tensor] = field(default_factory=list)
    _bad: list[tuple[Tensor, Array]] = field(default_factory=list)
    _nodes: int = 0
    _tokens: int = 0

    def __post_init__(self) -> None:
        self.parameters = dict(self.policy.module.named_parameters())
        if self.skip_zero_advantage:
            self.skip_zero_advantage = vanishes_without_advantage(self.loss)

    def begin(self, rows: StepRows) -> list[Array]:
        """Start a step; the micro-batches to hand to `micro`, as indices of rollouts."""
        trained_R = rows.trained_R
        if self.normalize == "tokens":
            self._scale_R = np.full(rows.rollouts, 1.0 / max(1, int(trained_R.sum())))
        else:
            self._scale_R = np.full(rows.rollouts, 1.0 / max(1, rows.rollouts))
            if self.normalize == "rollout_means":
                self._scale_R = self._scale_R / np.maximum(trained_R, 1)
        self._rows, self._sums, self._bad = rows, [], []
        self._nodes = self._tokens = 0
        self.optimizer.zero_grad(set_to_none=True)
        computed = np.flatnonzero((trained_R > 0) & (rows.signal_R | (not self.skip_zero_advantage)))
        if not len(computed):
            return []
        positions, offsets = gather(rows.offsets, computed)
        parts = split(rows.tokens_S[positions], offsets, rows.groups_R[computed], self.micro_batch_tokens)
        return [computed[part] for part in parts]

    def micro(self, part: Array) -> None:
        """Forward and backward of one micro-batch; gradients add up."""
        assert self._rows is not None
        rows = self._rows
        positions, offsets = gather(rows.offsets, part)
        packed = pack(rows.tokens_S[positions], rows.mask_S[positions], offsets)
        self._nodes += packed.nodes
        flat_T, row_T = positions[packed.flat_T], part[packed.row_T]
        kept_T = None if rows.kept_S is None else rows.kept_S.select(flat_T)
        new_T, entropy_T = self.policy.logprobs(packed, kept_T, entropy="entropy" in self.loss.computed)
        given = {name: self._tensor(values[flat_T], new_T) for name, values in rows.columns_S.items()}
        old_T = given["logprobs"]
        given |= {name: self._tensor(values[row_T], new_T) for name, values in rows.columns_R.items()}
        computed = {
            "new_logprobs": new_T,
            "entropy": entropy_T,
            "mask": torch.ones(len(new_T), dtype=torch.bool, device=new_T.device),
            "rollout_index": torch.from_numpy(packed.row_T).to(new_T.device),
        }
        known = given | computed
        losses = self._call({name: known[name] for name in self.loss.columns + self.loss.computed}, new_T)
        total = (losses * self._tensor(self._scale_R[row_T], new_T)).sum()
        torch.autograd.backward(total)
        self._measure(total, losses, new_T.detach(), old_T, row_T)

    def end(self, learning_rate: float) -> Outcome:
        """Clip, update the weights and report; the weights stay as they were when anything was not finite."""
        for parameter in self.parameters.values():
            if parameter.grad is None and parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        grads = [weight.grad for weight in self.parameters.values() if weight.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        none = torch.zeros(4, dtype=torch.float64, device=norm.device)
        sums = torch.stack([none, *self._sums]).sum(0)
        grad_norm, loss, ratio, kl, clipped = torch.cat([norm.double()[None], sums]).tolist()
        culprit, tokens = None, self._tokens
        if math.isfinite(loss) and math.isfinite(grad_norm):
            torch.nn.utils.clip_grads_with_norm_(self.parameters.values(), self.max_grad_norm, norm)
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            self.optimizer.step()
        else:
            culprit = self._culprit()
        return Outcome(
            loss=loss,
            grad_norm=grad_norm,
            ratio_mean=ratio / tokens if tokens else None,
            kl=kl / tokens if tokens else None,
            clipped_share=clipped / tokens if tokens and _bounds(self.loss) else None,
            nodes=self._nodes,
            culprit=culprit,
        )

    def _call(self, arguments: dict[str, Any], new_T: Tensor) -> Tensor:
        """The loss per token; a single number stands for each of them."""
        losses = self.loss.call(**arguments)
        if not isinstance(losses, Tensor) or losses.shape not in (new_T.shape, torch.Size(())):
            found = f"shape {list(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
            raise OperatorError(
                f"loss '{self.loss.name}' ({self.loss.where}) of '{self.node}' must return a tensor "
                f"[{len(new_T)}] with a number per token, or a single number; found {found}; mend its return"
            )
        return losses.expand(new_T.shape)

    def _measure(self, total: Tensor, losses: Tensor, new_T: Tensor, old_T: Tensor, row_T: Array) -> None:
        with torch.no_grad():
            self._bad.append((~torch.isfinite(losses), row_T))
            log_ratio = new_T - old_T
            ratio = log_ratio.exp()
            low, high = _bounds(self.loss) or (0.0, math.inf)
            outside = (ratio > high) | (ratio < low)
            sums = [total, ratio.sum(), (ratio - 1 - log_ratio).sum(), outside.sum()]
            self._sums.append(torch.stack([value.to(torch.float64) for value in sums]))
            self._tokens += len(new_T)

    def _culprit(self) -> str:
        """Where the numbers stopped being finite: rollouts if the loss was not, else the first parameter."""
        assert self._rows is not None
        rollouts: list[int] = []
        for bad_T, row_T in self._bad:
            found = np.unique(row_T[bad_T.cpu().numpy()])
            rollouts += self._rows.rollout_ids_R[found].tolist()
        weights = [name for name, weight in self.parameters.items() if not torch.isfinite(weight).all()]
        grads = [
            name for name, weight in self.parameters.items()
            if weight.grad is not None and not torch.isfinite(weight.grad).all()
        ]  # fmt: skip
        if weights:
            return f"the weights of '{weights[0]}' ({len(weights)} tensors)"
        if rollouts:
            return f"the loss of rollouts {rollouts[:8]}{' and more' if len(rollouts) > 8 else ''}"
        return f"the gradient of '{grads[0]}' ({len(grads)} tensors)" if grads else "the gradient norm"

    def _tensor(self, values: Array, like: Tensor) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(values))
        return tensor.to(like.device, like.dtype if tensor.is_floating_point() or tensor.dtype == torch.bool else None)


def _bounds(loss: LossFunction) -> tuple[float, float] | None:
    """The interval of the ratio that a loss leaves alone, from its knobs: rho, or clip_low and clip_high."""
    if "rho" in loss.knobs:
        return 0.0, float(loss.knobs["rho"])
    if "clip_high" in loss.knobs:
        return 1.0 - float(loss.knobs.get("clip_low", math.inf)), 1.0 + float(loss.knobs["clip_high"])
    return None


def vanishes_without_advantage(loss: LossFunction) -> bool:
    """Whether tokens of advantage 0 can be left out: they add exactly nothing to the loss and its gradient,
    and the other tokens' part does not depend on them. Found by trying.

    False for losses with an entropy bonus, a KL term or a whitened advantage, for those that do not read the
    advantage, and for those that cannot be called on random numbers.
    """
    if "advantage" not in loss.columns or loss.computed not in (("new_logprobs",), ("new_logprobs", "mask")):
        return False
    draw = torch.Generator().manual_seed(0)
    given = {name: -3.0 * torch.rand(256, generator=draw) for name in (*loss.columns, "new_logprobs")}
    given["advantage"] = torch.randn(256, generator=draw)
    given["advantage"][::2] = 0.0
    try:
        total, grad = _tried(loss, given)
        some_total, some_grad = _tried(loss, {name: values[1::2] for name, values in given.items()})
        none_total, none_grad = _tried(loss, {name: values[::2] for name, values in given.items()})
    except Exception:  # a loss that needs real rows is simply computed on all of them
        return False
    if none_total.count_nonzero() or none_grad.count_nonzero() or grad[::2].count_nonzero():
        return False
    return torch.allclose(total, some_total, rtol=1e-4) and torch.allclose(grad[1::2], some_grad, rtol=1e-4)


def _tried(loss: LossFunction, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Summed loss and its gradient with respect to the log-probabilities."""
    new_T = given["new_logprobs"].clone().requires_grad_()
    arguments = {name: values for name, values in given.items() if name in loss.columns}
    if "mask" in loss.computed:
        arguments["mask"] = torch.ones(len(new_T), dtype=torch.bool)
    total = loss.call(new_logprobs=new_T, **arguments).expand(new_T.shape).sum()
    (grad,) = torch.autograd.grad(total, new_T)
    return total.detach(), grad
