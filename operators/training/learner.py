"""The optimiser step over packed micro-batches: forward, loss, backward, clip, update; imports torch."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from dataflow.errors import OperatorError
from dataflow.records import ADVANTAGE, REF_LOGPROBS, VALUES
from operators.packing import Array, Kept, Packed, gather, pack, split
from operators.training.diagnostics import Diagnostics, Measures, ratio_bounds, sums_of
from operators.training.loss_function import LossFunction
from operators.training.rows import StepRows, whitened


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a step did; measures are over the tokens that were computed."""

    loss: float
    grad_norm: float
    """Before clipping."""
    measures: Measures
    """See `Diagnostics.measures`."""
    nodes: int
    """Tokens that went through the model."""
    culprit: str | None = None
    """What was not finite; then the weights were left as they were."""


class Forward(Protocol):
    """A model as a learner sees it: `Policy`, or a critic."""

    module: Any

    def computed(self, packed: Packed, kept_T: Kept | None, wanted: Collection[str]) -> dict[str, Tensor]:
        """What the loss wants of `loss_function.WITH_GRADIENT`, each [T], and `new_logprobs` or `new_values` always."""


@dataclass
class Learner:
    """Trains one model; one call of `micro` per micro-batch, between `begin` and `end`.

    normalize: what the summed loss is divided by: "tokens" (trained tokens of the step), "rollouts", or
    "rollout_means" (rollouts, after each rollout's sum was divided by its tokens).
    """

    forward: Forward
    optimizer: torch.optim.Optimizer
    loss: LossFunction
    node: str
    normalize: str
    max_grad_norm: float
    micro_batch_tokens: int
    skip_zero_advantage: bool
    whiten: bool = False
    _rows: StepRows | None = None
    _diagnostics: Diagnostics | None = None
    _scale_R: Array = field(default_factory=lambda: np.zeros(0))
    _totals: list[Tensor] = field(default_factory=list)
    _bad: list[tuple[Tensor, Array]] = field(default_factory=list)
    _nodes: int = 0

    def __post_init__(self) -> None:
        self.parameters = {
            name: weight for name, weight in self.forward.module.named_parameters() if weight.requires_grad
        }
        if self.skip_zero_advantage:
            self.skip_zero_advantage = vanishes_without_advantage(self.loss)

    def begin(self, rows: StepRows, version: int) -> list[Array]:
        """Start a step; the micro-batches to hand to `micro`, as indices of rollouts.

        version: steps behind the weights."""
        if self.whiten:
            rows = whitened(rows)
        trained_R = rows.trained_R
        if self.normalize == "tokens":
            self._scale_R = np.full(rows.rollouts, 1.0 / max(1, int(trained_R.sum())))
        else:
            self._scale_R = np.full(rows.rollouts, 1.0 / max(1, rows.rollouts))
            if self.normalize == "rollout_means":
                self._scale_R = self._scale_R / np.maximum(trained_R, 1)
        names = sums_of(self.loss.computed, self.loss.columns)
        self._diagnostics = Diagnostics(ratio_bounds(self.loss.knobs), version, names)
        self._rows, self._totals, self._bad = rows, [], []
        self._nodes = 0
        self.optimizer.zero_grad(set_to_none=True)
        computed = np.flatnonzero((trained_R > 0) & (rows.signal_R | (not self.skip_zero_advantage)))
        if not len(computed):
            return []
        positions, offsets = gather(rows.offsets, computed)
        parts = split(
            rows.tokens_S[positions], offsets, rows.groups_R[computed], self.micro_batch_tokens,
            whole="group_index" in self.loss.computed,
        )  # fmt: skip
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
        computed = self.forward.computed(packed, kept_T, self.loss.computed)
        new_T = next(iter(computed.values()))
        given = {name: self._tensor(values[flat_T], new_T) for name, values in rows.columns_S.items()}
        given |= {name: self._tensor(values[row_T], new_T) for name, values in rows.columns_R.items()}
        groups_T = np.unique(rows.groups_R[row_T], return_inverse=True)[1]
        known = given | computed | {
            "mask": torch.ones(len(new_T), dtype=torch.bool, device=new_T.device),
            "rollout_index": torch.from_numpy(packed.row_T).to(new_T.device),
            "group_index": torch.from_numpy(groups_T).to(new_T.device),
        }  # fmt: skip
        losses = self._call({name: known[name] for name in self.loss.columns + self.loss.computed}, new_T)
        total = (losses * self._tensor(self._scale_R[row_T], new_T)).sum()
        torch.autograd.backward(total)
        self._totals.append(total.detach().to(torch.float64))
        self._measure(losses, computed, given, self._tensor(rows.versions_S[flat_T], new_T), row_T)

    def end(self, learning_rate: float) -> Outcome:
        """Clip, update the weights and report; the weights stay as they were when anything was not finite."""
        assert self._diagnostics is not None
        for parameter in self.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        norm = torch.nn.utils.get_total_norm(
            [weight.grad for weight in self.parameters.values() if weight.grad is not None]
        )
        none = torch.zeros((), dtype=torch.float64, device=norm.device)
        sums, largest = self._diagnostics.totals()
        total = torch.stack([none, *self._totals]).sum()
        grad_norm, loss, most, *found = torch.cat(
            [each.reshape(-1).to(norm.device) for each in (norm.double(), total, largest, sums)]
        ).tolist()
        culprit = None
        if math.isfinite(loss) and math.isfinite(grad_norm):
            torch.nn.utils.clip_grads_with_norm_(self.parameters.values(), self.max_grad_norm, norm)
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            self.optimizer.step()
        else:
            culprit = self._culprit()
        return Outcome(
            loss=loss, grad_norm=grad_norm, measures=self._diagnostics.measures(found, most), nodes=self._nodes,
            culprit=culprit,
        )  # fmt: skip

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

    def _measure(
        self, losses: Tensor, computed: dict[str, Tensor], given: dict[str, Tensor], versions_T: Tensor, row_T: Array
    ) -> None:
        assert self._diagnostics is not None
        with torch.no_grad():
            self._bad.append((~torch.isfinite(losses), row_T))
            now = {name: values.detach() for name, values in computed.items()}
            if "new_values" not in now:
                self._diagnostics.policy(
                    now["new_logprobs"], given["logprobs"], versions_T, entropy_T=now.get("entropy"),
                    reference_T=given.get(REF_LOGPROBS),
                )  # fmt: skip
            elif VALUES in given and ADVANTAGE in given:
                self._diagnostics.critic(now["new_values"], given[VALUES] + given[ADVANTAGE])

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
