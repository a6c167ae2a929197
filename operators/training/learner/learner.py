"""The optimiser step over packed micro-batches: forward, loss, backward, clip, update; imports
torch.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from dataflow.errors import Unusable
from dataflow.limits import Limits
from dataflow.records import ADVANTAGE, LOGPROBS, REF_LOGPROBS, TEMPERATURE, VALUES, AnyArray
from dataflow.staleness import NO_TOKEN
from dataflow.tokens.ragged import gather
from dataflow.tokens.rollout_tokens import SamplingMask
from dataflow.weight_ends import WeightsOut
from operators.training.learner.copies import ComputeCopies
from operators.training.learner.cpu import DirectGradients
from operators.training.learner.diagnostics import Diagnostics, Measures, ratio_bounds, sums_of
from operators.training.learner.loss_function import LossFunction
from operators.training.learner.memory import OffloadedLearner, Refreshed, settle
from operators.training.learner.rows import (
    StepRows,
    TokenTree,
    by_temperature,
    pack,
    split,
    whitened,
)
from operators.training.learner.together import Alone, NotFinite, Together, not_finite

# Whether a loss lets rollouts of advantage 0 be left out; imports torch.


def vanishes_without_advantage(loss: LossFunction) -> bool:
    """Whether rollouts of advantage 0 can be left out: they add exactly nothing to the loss and its
    gradient, and the other rollouts' part does not depend on them. Found by trying.

    False for losses with an entropy bonus, a KL term or a whitened advantage, for those that do not
    read the advantage, and for those that cannot be called on random numbers.
    """
    plain_arguments = {"new_logprobs", "mask", "rollout_index"}
    if (
        "advantage" not in loss.columns
        or "new_logprobs" not in loss.computed
        or not plain_arguments.issuperset(loss.computed)
    ):
        return False
    draw = torch.Generator().manual_seed(0)
    arguments = {
        name: -3.0 * torch.rand(256, generator=draw) for name in (*loss.columns, "new_logprobs")
    }
    arguments["advantage"] = torch.randn(256, generator=draw)
    arguments["rollout_index"] = torch.arange(256) // 8
    silent_T = arguments["rollout_index"] % 2 == 0
    arguments["advantage"][silent_T] = 0.0
    try:
        total, grad = _tried(loss, arguments)
        some_total, some_grad = _tried(
            loss, {name: values[~silent_T] for name, values in arguments.items()}
        )
        none_total, none_grad = _tried(
            loss, {name: values[silent_T] for name, values in arguments.items()}
        )
    except Exception:  # a loss that needs real rows is simply computed on all of them
        return False
    if none_total.count_nonzero() or none_grad.count_nonzero() or grad[silent_T].count_nonzero():
        return False
    return torch.allclose(total, some_total, rtol=1e-4) and torch.allclose(
        grad[~silent_T], some_grad, rtol=1e-4
    )


def _tried(loss: LossFunction, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Summed loss and its gradient with respect to the log-probabilities."""
    new_T = tensors["new_logprobs"].clone().requires_grad_()
    arguments = {name: values for name, values in tensors.items() if name in loss.columns}
    if "mask" in loss.computed:
        arguments["mask"] = torch.ones(len(new_T), dtype=torch.bool)
    if "rollout_index" in loss.computed:
        arguments["rollout_index"] = torch.unique(tensors["rollout_index"], return_inverse=True)[1]
    total = loss.call(new_logprobs=new_T, **arguments).expand(new_T.shape).sum()
    (grad,) = torch.autograd.grad(total, new_T)
    return total.detach(), grad


def step_divided(optimizer: torch.optim.Optimizer, divisor: float) -> None:
    """The update, by gradients that are divided first, in the same pass over memory."""
    assert getattr(optimizer, "_step_supports_amp_scaling", False), "fused AdamW divides"
    device = optimizer.param_groups[0]["params"][0].device
    vars(optimizer)["grad_scale"] = torch.tensor(divisor, dtype=torch.float32, device=device)
    optimizer.step()


NEARLY = 0.999
"""Of the largest norm of a gradient: below, none is scaled down, whatever its norm was rounded
to."""


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
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
    settle_s: float = 0.0
    """How long the update waited for readers that were taking the weights."""
    settled: bool = True
    """Whether they had them then; else they were given up."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A part of a step before it is cut into micro-batches."""

    rows: StepRows
    """With the advantages that the loss is to read."""
    computed: AnyArray
    """Rollouts that go through the model."""


@dataclass(frozen=True, eq=False)
class StepPart:
    """Rollouts of a step that are cut into micro-batches together."""

    rows: StepRows
    new_S: AnyArray
    """Once the step has ended, the log-probabilities of their tokens before the update, float32;
    NaN where one was not trained. Empty where they are not kept."""


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """What goes through the model at once."""

    part: StepPart
    rollouts: AnyArray
    """Indices into the part's."""

    def __len__(self) -> int:
        return len(self.rollouts)


class Forward(Protocol):
    """A model as a learner sees it: `Policy`, or a critic."""

    module: Any

    def at(self, temperature: float) -> None:
        """Compute log-probabilities at this temperature; as declared where it is none above 0."""

    def computed(
        self, packed: TokenTree, left_T: SamplingMask | None, wanted: Collection[str]
    ) -> dict[str, Tensor]:
        """What the loss wants of `loss_function.WITH_GRADIENT`, each [T], and `new_logprobs` or
        `new_values` always.
        """


@dataclass
class Learner:
    """Trains one model; one call of `micro` per micro-batch, between `open` and `end`.

    normalize: what the summed loss is divided by: "tokens" (trained tokens of the step),
    "rollouts", or "rollout_means" (rollouts, after each rollout's sum was divided by its tokens).
    The update divides: until then gradients are sums, since more of the step may be to come.
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
    seed: int = 0
    """The run's. A loss that draws random numbers draws the same ones in a step that is made again:
    what torch draws is a function of it and of the step, so that no state of a generator has to be
    kept."""
    together: Together = field(default_factory=Alone)
    parked: OffloadedLearner | None = None
    """Takes what it does not need off its device, where the trainer offloads; see `memory`."""
    writers: dict[int, WeightsOut] = field(default_factory=dict)
    """This rank's ends of the weight planes, by line as `offered` counts them."""
    settle_s: float = field(default_factory=lambda: Limits().settle_s)
    """For readers to have taken the weights that are about to change."""
    refreshed: list[Refreshed] = field(default_factory=list)
    """What it keeps for readers that get every n-th version."""
    before_change: Callable[[], None] | None = None
    """Waits for those who read the weights and the optimiser's state, a checkpoint; see
    `unread`."""
    direct: DirectGradients | None = None
    """Of a model in main memory that is here alone: what writes its gradients where they are
    kept."""
    copies: ComputeCopies | None = None
    """Of the weights of a model that is here alone, where it computes in another type."""
    keep_new_logprobs: bool = False
    """Whether `new_logprobs` has the log-probabilities that a policy computes."""
    divisor: int = 0
    """Tokens or rollouts of the step as far as it is there, on all ranks: what its sums are divided
    by."""
    parts: list[StepPart] = field(default_factory=list)
    """Of the step under way, or of the last one: what of it is on this rank."""
    _version: int = 0
    _diagnostics: Diagnostics | None = None
    _totals: list[Tensor] = field(default_factory=list)
    _bad: list[tuple[Tensor, AnyArray]] = field(default_factory=list)
    _new: list[tuple[AnyArray, AnyArray, Tensor]] = field(default_factory=list)
    """Of each micro-batch its part's `new_S`, which of these tokens it trained, and their
    log-probabilities."""
    _nodes: int = 0
    _micros: int = 0

    def __post_init__(self) -> None:
        self.parameters = {
            name: weight
            for name, weight in self.forward.module.named_parameters()
            if weight.requires_grad
        }
        self._may_skip = self.skip_zero_advantage
        self.take_loss(self.loss)

    def take_loss(self, loss: LossFunction) -> None:
        """Compute this loss from the next step on."""
        self.loss = loss
        self.skip_zero_advantage = self._may_skip and vanishes_without_advantage(loss)

    def begin(self, rows: StepRows, version: int) -> list[MicroBatch]:
        """Start a step of which all rows are there; its micro-batches."""
        self.open(version)
        return self.add(rows)

    def add(self, rows: StepRows) -> list[MicroBatch]:
        """Take in rows of the step under way; the micro-batches to hand to `micro`."""
        step = self.prepare(rows)
        part = self.keep(step.rows)
        micro_batches: list[MicroBatch] = []
        for alike in by_temperature(step.rows, step.computed):
            positions, offsets = gather(step.rows.offsets, alike)
            cuts = split(
                step.rows.tokens.ids[positions],
                offsets,
                step.rows.groups_R[alike],
                self.micro_batch_tokens,
                whole=self.needs_groups,
            )
            micro_batches += [MicroBatch(part, alike[cut]) for cut in cuts]
        return micro_batches

    @property
    def module(self) -> Any:
        """The model."""
        return self.forward.module

    def offered(self, line: int) -> dict[str, Tensor]:
        """What goes out on one of its weight planes: 0, the weights; from 1 on, what `refreshed`
        keeps.
        """
        return self.refreshed[line - 1].offered if line else self.parameters

    @property
    def needs_groups(self) -> bool:
        """Whether the loss reads whole groups, which then are never cut."""
        return "group_index" in self.loss.computed

    @property
    def data_ranks(self) -> int:
        """Ranks that compute rollouts of their own."""
        return 1

    @property
    def part_tokens(self) -> float:
        """See `ends_part`: what the loss reads of a whitened step depends on all of it."""
        return math.inf if self.whiten else self.micro_batch_tokens * self.data_ranks

    def prepare(self, rows: StepRows) -> Prepared:
        """What all ranks have to know of a part of a step, which from here on counts."""
        if self.whiten:
            rows = whitened(rows)
        trained_R = rows.trained_R
        self.divisor += int(trained_R.sum()) if self.normalize == "tokens" else rows.rollouts
        computed = np.flatnonzero(
            (trained_R > 0) & (rows.signal_R | (not self.skip_zero_advantage))
        )
        return Prepared(rows=rows, computed=computed)

    def open(self, version: int) -> None:
        """Start a step. version: steps behind the weights."""
        names = sums_of(self.loss.computed, self.loss.columns)
        self._diagnostics = Diagnostics(
            ratio_bounds(self.loss.knobs, self.loss.columns + self.loss.computed), version, names
        )
        self._version, self.divisor, self._nodes, self._micros = version, 0, 0, 0
        self.parts, self._totals, self._bad, self._new = [], [], [], []
        self._no_gradients()
        if self.copies is not None:
            self.copies.refresh()

    def keep(self, rows: StepRows) -> StepPart:
        """Rows of the step, of which this rank computes what `micro` is given."""
        tokens = len(rows.tokens) if self.keep_new_logprobs else 0
        part = StepPart(rows, np.full(tokens, np.nan, np.float32))
        self.parts.append(part)
        return part

    def micro(self, batch: MicroBatch) -> None:
        """Forward and backward of one micro-batch; gradients add up.

        An empty one has a forward and backward too, of a loss that is zero: for ranks whose
        exchanges need it.
        """
        with self.computing():
            self._micro(batch)

    def computing(self) -> AbstractContextManager[None]:
        """Where the model is called, after `open`."""
        return contextlib.nullcontext() if self.copies is None else self.copies.in_place()

    def _micro(self, batch: MicroBatch) -> None:
        rows, part = batch.part.rows, batch.rollouts
        self._micros += 1
        torch.manual_seed(
            ((self.seed * 1_000_003 + self._version) * 1_000_003 + self._micros) % 2**63
        )
        if not len(part):
            self._idle()
            return
        if TEMPERATURE in rows.columns_R:
            self.forward.at(float(rows.columns_R[TEMPERATURE][part[0]]))
        positions, begins, rollouts = rows.sequences(part)
        packed = pack(rows.tokens.ids[positions], rows.tokens.mask[positions], begins)
        self._nodes += packed.nodes
        rollout_T = rollouts[packed.row_T]
        flat_T, row_T = positions[packed.flat_T], part[rollout_T]
        left_T = (
            None if rows.tokens.sampling_mask is None else rows.tokens.sampling_mask.take(flat_T)
        )
        computed = self.forward.computed(packed, left_T, self.loss.computed)
        new_T = next(iter(computed.values()))
        if self.keep_new_logprobs:
            self._new.append((batch.part.new_S, flat_T, new_T.detach()))
        columns = {LOGPROBS, *self.loss.columns}
        per_token = {name: values for name, values in rows.per_token.items() if name in columns}
        tensors = {name: self._tensor(values[flat_T], new_T) for name, values in per_token.items()}
        tensors |= {
            name: self._tensor(values[row_T], new_T) for name, values in rows.columns_R.items()
        }
        groups_T = np.unique(rows.groups_R[row_T], return_inverse=True)[1]
        available = (
            tensors
            | computed
            | {
                "mask": torch.ones(len(new_T), dtype=torch.bool, device=new_T.device),
                "rollout_index": torch.from_numpy(rollout_T).to(new_T.device),
                "group_index": torch.from_numpy(groups_T).to(new_T.device),
            }
        )
        losses = self._call(
            {name: available[name] for name in self.loss.columns + self.loss.computed}, new_T
        )
        if self.normalize == "rollout_means":
            losses = losses / self._tensor(rows.trained_R[row_T].astype(np.float32), new_T)
        total = losses.sum()
        torch.autograd.backward(total)
        self._totals.append(total.detach().to(torch.float64))
        self._bad.append((~torch.isfinite(losses.detach()), rows.rollout_ids_R[row_T]))
        self._measure(computed, tensors, rows.oldest_R[row_T])

    def end(self, learning_rate: float) -> StepOutcome:
        """Clip, update the weights and report; the weights stay as they were when anything was not
        finite.
        """
        assert self._diagnostics is not None
        self._gather_new()
        if self.direct is not None:
            self.direct.end()
        for parameter in self.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [weight.grad for weight in self.parameters.values() if weight.grad is not None]
        norm = self.together.norm(gradients)
        sums, largest = self._diagnostics.totals()
        nodes = torch.tensor([self._nodes], dtype=torch.float64)
        total = torch.stack(
            [torch.zeros((), dtype=torch.float64, device=norm.device), *self._totals]
        ).sum()
        self._totals = []
        sums, largest = self.together.total(
            torch.cat([tensor.reshape(-1).to(norm.device) for tensor in (total, nodes, sums)]),
            largest.to(norm.device),
        )
        grad_norm, most, loss, computed, *totals = torch.cat(
            [norm.double().reshape(1), largest.reshape(1), sums]
        ).tolist()
        divisor = max(1, self.divisor)
        grad_norm, loss = grad_norm / divisor, loss / divisor
        culprit, settle_s, settled = None, 0.0, True
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self.unread()
            began = time.monotonic()
            changing = [
                0,
                *(n for n, reference in enumerate(self.refreshed, 1) if reference.offers_weights),
            ]
            settled = settle(
                [self.writers[line] for line in changing if line in self.writers], self.settle_s
            )
            settle_s = time.monotonic() - began
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            is_large = grad_norm > NEARLY * self.max_grad_norm
            step_divided(
                self.optimizer,
                divisor * (max(1.0, (grad_norm + 1e-6) / self.max_grad_norm) if is_large else 1.0),
            )
            self._bad = []  # which only `findings` reads
        else:
            culprit = str(self.findings())
        return StepOutcome(
            loss=loss,
            grad_norm=grad_norm,
            measures=self._diagnostics.measures(totals, most),
            nodes=round(computed),
            culprit=culprit,
            settle_s=settle_s,
            settled=settled,
        )

    def _gather_new(self) -> None:
        """Copy the step's log-probabilities to main memory and drop the tensors: another operator
        may use the device before the next step.
        """
        if self._new:
            values = torch.cat([values_T.float() for *_, values_T in self._new]).cpu().numpy()
            begin = 0
            for new_S, flat_T, _ in self._new:
                new_S[flat_T] = values[begin : begin + len(flat_T)]
                begin += len(flat_T)
            self._new = []

    def _no_gradients(self) -> None:
        """In main memory they have their places before anything else of a step, and keep them:
        given back and taken anew they would leave holes in the heap that activations break up, and
        come to lie beside them, until the process holds nearly one model more.
        """
        for weight in self.parameters.values():
            if weight.device.type != "cpu":
                weight.grad = None
            elif weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            elif self.direct is None or weight not in self.direct:
                weight.grad.zero_()
        if self.direct is not None:
            self.direct.begin()

    def _idle(self) -> None:
        packed = pack(np.zeros(2, np.int64), np.ones(2, bool), np.array([0, 2]))
        computed = self.forward.computed(packed, None, self.loss.computed)
        torch.autograd.backward(
            torch.stack([values.sum() for values in computed.values()]).sum() * 0.0
        )

    def _call(self, arguments: dict[str, Any], new_T: Tensor) -> Tensor:
        """The loss per token; a single number stands for each of them."""
        losses = self.loss.call(**arguments)
        if not isinstance(losses, Tensor) or losses.shape not in (new_T.shape, torch.Size(())):
            shape = (
                f"shape {list(losses.shape)}"
                if isinstance(losses, Tensor)
                else type(losses).__name__
            )
            raise Unusable(
                f"loss '{self.loss.name}' ({self.loss.where}) of '{self.node}' must return a tensor"
                f" [{len(new_T)}] with a number per token, or a single number; found {shape}; mend"
                " its return"
            )
        return losses.expand(new_T.shape)

    def _measure(
        self, computed: dict[str, Tensor], tensors: dict[str, Tensor], oldest_T: AnyArray
    ) -> None:
        assert self._diagnostics is not None
        with torch.no_grad():
            now = {name: values.detach() for name, values in computed.items()}
            # demonstrations were drawn from no weights
            if "new_values" not in now and (oldest_T != NO_TOKEN).any():
                new_T = now["new_logprobs"]
                self._diagnostics.policy(
                    new_T,
                    tensors[LOGPROBS],
                    self._tensor(oldest_T, new_T),
                    entropy_T=now.get("entropy"),
                    reference_T=tensors.get(REF_LOGPROBS),
                )
            elif VALUES in tensors and ADVANTAGE in tensors:
                self._diagnostics.critic(now["new_values"], tensors[VALUES] + tensors[ADVANTAGE])

    def everywhere(
        self, function: Callable[..., Any], *, is_brief: bool = False, **arguments: Any
    ) -> list[Any]:
        """Call a module's function(learner=, rank=, ranks=, **arguments) on each rank, all of which
        do so together; what they return. Arguments and results are plain values, and paths.
        is_brief: it takes no longer than an exchange of a step; else it may take as long as a
        checkpoint.
        """
        return [function(learner=self, rank=0, ranks=1, **arguments)]

    def unread(self) -> None:
        """Wait until no reader uses the weights and the optimiser's state, before they change or
        move.
        """
        waiting, self.before_change = self.before_change, None
        if waiting is not None:
            waiting()

    def close(self) -> None:
        """Give back what it holds beside its model."""

    def findings(self) -> NotFinite:
        """What of the step was not finite, on this rank."""
        rollouts: list[int] = []
        for bad_T, ids_T in self._bad:
            rollouts += np.unique(ids_T[bad_T.cpu().numpy()]).tolist()
        gradients = {
            name: weight.grad for name, weight in self.parameters.items() if weight.grad is not None
        }
        return NotFinite(rollouts, not_finite(self.parameters), not_finite(gradients))

    def _tensor(self, values: AnyArray, like: Tensor) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(values))
        return tensor.to(
            like.device,
            like.dtype if tensor.is_floating_point() or tensor.dtype == torch.bool else None,
        )
