"""One optimiser step at a time, a slice of it per call: steps that are new, and steps that are made
again.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from dataflow.errors import GraphError
from dataflow.folder.knobs_by_step import KnobsByStep
from dataflow.runtime import Context
from operators.training.knobs import TrainerKnobs
from operators.training.learner import memory, refreshed
from operators.training.learner.learner import Learner, StepOutcome
from operators.training.learner.loss_function import read_loss
from operators.training.learner.new_logprobs import NewLogprobs
from operators.training.learner.packing import Array
from operators.training.learner.rows import StepRows, step_rows
from operators.training.learner.schedule import learning_rate
from operators.training.pace import StepPace

# Knobs of a learner that change between two steps, on each of its ranks; imports torch.


def told(trainer: TrainerKnobs) -> dict[str, Any]:
    """What each rank's learner has to know of a trainer's knobs that may change; plain values."""
    return {
        "max_grad_norm": trainer.max_grad_norm,
        "weight_decay": trainer.weight_decay,
        "loss_knobs": {
            name: trainer.loss_function.knobs[name] for name in trainer.settable_of_loss()
        },
    }


def take_knobs(
    learner: Learner,
    rank: int,
    ranks: int,
    max_grad_norm: float,
    weight_decay: float,
    loss_knobs: dict[str, Any],
) -> None:
    """Go by these from the next step on."""
    learner.max_grad_norm = max_grad_norm
    for group in learner.optimizer.param_groups:
        # as `adamw` has it: vectors are not decayed
        if any(weight.ndim >= 2 for weight in group["params"]):
            group["weight_decay"] = weight_decay
    own = {name: value for name, value in loss_knobs.items() if name in learner.loss.knobs}
    if any(learner.loss.knobs[name] != value for name, value in own.items()):
        learner.take_loss(read_loss(functools.partial(learner.loss.call, **own), learner.node))


class StepMaker:
    """What is left of the step under way, and how many are behind the weights.

    The same rows on the same weights give the same weights, bit for bit on a CPU: nothing else is
    read.
    """

    def __init__(
        self,
        trainer: TrainerKnobs,
        context: Context,
        learner: Learner,
        step: int,
        knobs: KnobsByStep[TrainerKnobs] | None = None,
        decay_steps: int | None = None,
    ) -> None:
        """step: steps behind the weights that `learner` has. knobs: of each step, where they were
        changed; None: they are the trainer's. decay_steps: of the schedule that steps were made by.
        GraphError where the schedule has no end, or the run goes on after it.
        """
        self.learner, self.step = learner, step
        self.knobs = knobs or KnobsByStep(trainer, ())
        self.rows: StepRows | None = None
        """Of the step under way."""
        self._trainer, self._clock, self._span = trainer, context.clock, context.span
        """The trainer with the knobs that its learner goes by."""
        self._decay_steps = _decay_steps(self.knobs.at(step + 1), context, decay_steps)
        self._parts: list[Array] = []
        self.seconds = 0.0
        """Of work for the step under way, or for the last one."""
        now = context.clock()
        self.pace = StepPace(now, now)
        """Of the step under way, or of the wait for it."""

    @property
    def parts(self) -> int:
        """Micro-batches that the step under way still lacks."""
        return len(self._parts)

    @property
    def rate(self) -> float:
        """The learning rate of the next update."""
        trainer = self.knobs.at(self.step + 1)
        return learning_rate(
            self.step + 1,
            trainer.lr,
            warmup_steps=trainer.warmup_steps,
            schedule=trainer.schedule,
            decay_steps=self.decay_steps,
            min_lr=trainer.min_lr,
        )

    @property
    def decay_steps(self) -> int | None:
        """Steps until the learning rate is at its end, as the next update sees it; None: it is
        constant.
        """
        return self._decay_steps and (self.knobs.at(self.step + 1).decay_steps or self._decay_steps)

    def begin(self, groups: Sequence[pa.RecordBatch]) -> None:
        """Start the next step, of these groups. RecordError as `step_rows`."""
        began = self._clock()
        with self._span("packing"):
            self._take_knobs(self.knobs.at(self.step + 1))
            self.rows = step_rows(groups, self.learner.loss.columns)
            self.bring()
            self._parts = self.learner.begin(self.rows, self.step)
        self.seconds = 0.0
        self._add("forward_backward", began)

    def micro(self) -> None:
        """The next micro-batch."""
        began = self._clock()
        with self._span("forward and backward"):
            self.learner.micro(self._parts.pop(0))
        self._add("forward_backward", began)

    def end(self, rate: float) -> StepOutcome:
        """The update, with this learning rate; the weights and `step` stay where anything was not
        finite.
        """
        began = self._clock()
        with self._span("optimizer"):
            self.bring(moments=True)
            outcome = self.learner.end(rate)
        self.rows = None
        if outcome.culprit is None:
            self.step += 1
            if self.learner.refreshed and not all(
                self.learner.everywhere(refreshed.follow, step=self.step)
            ):
                outcome = dataclasses.replace(outcome, settled=False)
        self._add("optimizer", began)
        return outcome

    def new_logprobs(self) -> NewLogprobs | None:
        """What the last step computed of its tokens; None where it is not kept."""
        return NewLogprobs.of(self.learner)

    def bring(self, *, moments: bool = False) -> None:
        """Have what is parked on the devices again."""
        if self.learner.parked is not None:
            self.learner.everywhere(memory.bring, moments=moments)

    def rest(self, *, weights: bool) -> None:
        """Free device memory after an update; `weights`: theirs too, as they have no reader now."""
        if self.learner.parked is not None:
            self.learner.unread()
            self.learner.everywhere(memory.rest, weights=weights)

    def _take_knobs(self, trainer: TrainerKnobs) -> None:
        """Let the learners of all ranks go by other knobs."""
        before, self._trainer = told(self._trainer), trainer
        if (now := told(trainer)) != before:
            self.learner.everywhere(take_knobs, **now)

    def _add(self, stage: str, began: float) -> None:
        seconds = self._clock() - began
        self.seconds += seconds
        self.pace.add(stage, seconds)


def _decay_steps(trainer: TrainerKnobs, context: Context, begun: int | None) -> int | None:
    """The trainer's, or the schedule's that was `begun`, or the run's. GraphError when there should
    be one and none is known, or when steps of the run would be left without a rate.
    """
    steps = context.steps or context.prompt_steps
    chosen = trainer.decay_steps or begun or steps
    if trainer.schedule == "constant":
        return None
    if trainer.decay_steps is None and begun and steps and steps > begun and not trainer.min_lr:
        raise GraphError(
            f"'{context.node}' has schedule='{trainer.schedule}', which began as one of {begun}"
            f" steps and ends at 0, but this run is to make {steps}; ask for {begun} steps, or give"
            " its last checkpoint to a new run, whose schedule is its own"
        )
    if chosen is None:
        raise GraphError(
            f"'{context.node}' has schedule='{trainer.schedule}', but nothing says when it ends: no"
            " steps, and prompts without end; give the run steps, the prompts epochs, or the"
            " trainer decay_steps"
        )
    return chosen
