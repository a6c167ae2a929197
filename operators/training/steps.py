"""Steps of the optimiser, a slice per call: those that are new, those that are made again after
a crash, and how long each stage took.

Axis suffixes as in `operators.training.learner.rows`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from dataflow.errors import GraphError, OperatorError, RecordError
from dataflow.folder.finished import take_out_abandoned
from dataflow.folder.knobs_by_step import KnobsByStep
from dataflow.folder.ledger import MadeStep
from dataflow.records import GROUP_ID, MASK, NEW_LOGPROBS, ROLLOUT_ID, TOKENS, AnyArray
from dataflow.rules import ends_part
from dataflow.runtime import Context
from dataflow.system.files import RunFolderError
from dataflow.tokens.ragged import flat, group_slices, list_lengths, one_chunk
from operators.trainer import TrainerKnobs, learning_rate
from operators.training.checkpoints.saving import CheckpointSaver
from operators.training.learner import memory
from operators.training.learner.learner import Learner, MicroBatch, StepOutcome
from operators.training.learner.loss_function import read_loss
from operators.training.learner.rows import StepRows, cost, step_rows


@dataclass
class StepPace:
    """Seconds of each stage of the step under way, and what arrived meanwhile."""

    began: float
    """When the weights of the step before it had been offered."""
    free: float
    """When the trainer began to wait for rows."""
    seconds: dict[str, float] = field(default_factory=dict)
    """By stage: wait, forward_backward, optimizer, publish, record, checkpoint."""
    arrived_tokens: int = 0
    """Completion tokens of the rows that came in."""
    spent: Mapping[str, float] = field(default_factory=dict)
    """How the node's time had been spent when it began, as `Context.spent` has it."""

    def by_state(self, spent: Mapping[str, float], following: StepPace) -> dict[str, float]:
        """Seconds of the step by state of the node: seconds_busy, seconds_waiting and so on. spent:
        until now, where the step that follows begins.
        """
        following.spent = spent
        return {
            f"seconds_{name}": value - self.spent.get(name, 0.0) for name, value in spent.items()
        }

    def add(self, stage: str, seconds: float) -> None:
        """Account for a slice of work."""
        self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds


@dataclass(frozen=True)
class NewLogprobs:
    """Of each rollout that went through the model, the log-probabilities of its trained tokens."""

    rollouts: Mapping[int, AnyArray] = field(default_factory=dict)
    """By rollout_id, float32 [tokens]; NaN where a token was not trained."""

    @classmethod
    def of(cls, learner: Learner) -> NewLogprobs | None:
        """Those of the step that was computed last, of all ranks; None where the learner keeps
        none.
        """
        if not learner.keep_new_logprobs:
            return None
        by_rollout: dict[int, AnyArray] = {}
        for plain in learner.everywhere(rank_logprobs, is_brief=True):
            values = np.frombuffer(plain["values"], np.float32)
            ids = np.frombuffer(plain["rollouts"], np.int64).tolist()
            by_rollout |= zip(
                ids, np.split(values, np.frombuffer(plain["ends"], np.int64))[:-1], strict=True
            )
        return cls(by_rollout)

    def beside(self, groups: Sequence[pa.RecordBatch]) -> pa.Table:
        """Rows with the column `new_logprobs`, where they have none: by token of the rollout, 0
        where the mask is false and null where the token was not trained; null for a rollout that
        did not go through the model.
        """
        table = pa.Table.from_batches(groups)
        if NEW_LOGPROBS in table.column_names:
            return table
        logprobs = [self.rollouts.get(number) for number in table.column(ROLLOUT_ID).to_pylist()]
        rows = table.select([TOKENS, MASK]).combine_chunks()
        lengths = list_lengths(one_chunk(rows, TOKENS))
        masks = flat(one_chunk(rows, MASK))
        is_null = np.array([array is None for array in logprobs], bool)
        values = np.concatenate(
            [np.zeros(0, np.float32), *(array for array in logprobs if array is not None)]
        )
        is_given = ~masks[np.repeat(~is_null, lengths)]
        numbers = pa.array(
            np.where(is_given, np.float32(0), values), mask=np.isnan(values) & ~is_given
        )
        ends = np.r_[0, np.cumsum(np.where(is_null, 0, lengths))].astype(np.int32)
        column = pa.ListArray.from_arrays(pa.array(ends, mask=np.r_[is_null, False]), numbers)
        firsts = np.cumsum([0, *(rows.num_rows for rows in groups)]).tolist()
        parts = [
            column.slice(first, rows.num_rows) for rows, first in zip(groups, firsts, strict=False)
        ]
        return table.append_column(NEW_LOGPROBS, pa.chunked_array(parts, column.type))


def rank_logprobs(*, learner: Learner, rank: int, ranks: int) -> dict[str, Any]:
    """What one rank has computed, as plain values; nothing where the rank before it tells the
    same.
    """
    rollouts, lengths, values = b"", [np.zeros(0, np.int64)], b""
    for part in () if rank % learner.together.tensor else learner.parts:
        rows = part.rows
        counts = np.r_[0, np.cumsum(~np.isnan(part.new_S))]
        is_computed_R = counts[rows.offsets[1:]] > counts[rows.offsets[:-1]]
        lengths_R = np.diff(rows.offsets)
        rollouts += rows.rollout_ids_R[is_computed_R].astype(np.int64).tobytes()
        lengths.append(lengths_R[is_computed_R])
        values += part.new_S[np.repeat(is_computed_R, lengths_R)].tobytes()
    ends = np.cumsum(np.concatenate(lengths)).astype(np.int64).tobytes()
    return {"rollouts": rollouts, "ends": ends, "values": values}


# Knobs of a learner that change between two steps, on each of its ranks; imports torch.


def rank_knobs(trainer: TrainerKnobs) -> dict[str, Any]:
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

    consumes: the groups of a step, in order; those that are there are computed while others are
        still on their way (`ends_part`)
    produces: the weights after the step

    The same groups in the same order on the same weights give the same weights, bit for bit on a
    CPU: nothing else is read, and no time is.
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
        self._trainer, self._clock, self._span = trainer, context.clock, context.span
        """The trainer with the knobs that its learner goes by."""
        self._decay_steps = _decay_steps(self.knobs.at(step + 1), context, decay_steps)
        self._uncut: list[pa.RecordBatch] = []
        self._uncut_tokens = 0
        self._parts: list[StepRows] = []
        self._micro_batches: deque[MicroBatch] = deque()
        self.is_whole = False
        """Whether all groups of the step under way are there."""
        self.seconds = 0.0
        """Of work for the step under way, or for the last one."""
        now = context.clock()
        self.pace = StepPace(now, now)
        """Of the step under way, or of the wait for it."""

    @property
    def micro_batches(self) -> int:
        """Those of the step under way that can be computed now."""
        return len(self._micro_batches)

    @property
    def is_begun(self) -> bool:
        """Whether a step is under way, on the knobs that it has."""
        return bool(self._parts)

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

    def take(self, group: pa.RecordBatch, *, is_last: bool) -> None:
        """The next group of the step. RecordError as `step_rows`."""
        self._uncut.append(group)
        ends = np.r_[0, np.cumsum(list_lengths(group.column(TOKENS)))]
        self._uncut_tokens += cost(flat(group.column(TOKENS)), ends, 0, group.num_rows)
        self.is_whole = is_last
        if is_last or ends_part(
            len(self._uncut),
            self._uncut_tokens,
            step_groups=self._trainer.prompts_per_step,
            most=self.learner.part_tokens,
        ):
            self._cut()

    def take_all(self, rows: pa.Table) -> None:
        """All groups of the step, in order. RecordError as `step_rows`."""
        groups = [
            records.slice(first, count)
            for records in rows.combine_chunks().to_batches()
            for _, first, count in group_slices(records)
        ]
        for number, group in enumerate(groups, 1):
            self.take(group, is_last=number == len(groups))

    def micro(self) -> None:
        """The next micro-batch."""
        began = self._clock()
        with self._span("forward and backward"):
            self.learner.micro(self._micro_batches.popleft())
        self._add("forward_backward", began)
        if not self._micro_batches:
            self.pace.free = self._clock()

    def abandon(self) -> None:
        """Forget the step under way: nothing of it is in the weights."""
        self._uncut, self._uncut_tokens, self._parts, self.is_whole = [], 0, [], False
        self._micro_batches.clear()

    def rows(self) -> StepRows:
        """Of the step under way."""
        return StepRows.joined(self._parts)

    def _cut(self) -> None:
        began = self._clock()
        if not self._micro_batches:
            self.pace.add("wait", began - self.pace.free)
        if not self.is_begun:
            self.seconds = 0.0
        with self._span("packing"):
            if not self.is_begun:
                self._take_knobs(self.knobs.at(self.step + 1))
                self.bring()
                self.learner.open(self.step)
            rows = step_rows(self._uncut, self.learner.loss.columns)
            self._parts.append(rows)
            self._micro_batches.extend(self.learner.add(rows))
        self._uncut, self._uncut_tokens = [], 0
        self._add("forward_backward", began)
        self.pace.free = self._clock()

    def end(self, rate: float) -> StepOutcome:
        """The update, with this learning rate; the weights and `step` stay where anything was not
        finite.
        """
        began = self._clock()
        with self._span("optimizer"):
            self.bring(moments=True)
            outcome = self.learner.end(rate)
        self.abandon()
        if outcome.culprit is None:
            self.step += 1
            if self.learner.refreshed and not all(
                self.learner.everywhere(memory.follow, step=self.step)
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
        if trainer is self._trainer:
            return
        before, self._trainer = rank_knobs(self._trainer), trainer
        if (now := rank_knobs(trainer)) != before:
            self.learner.everywhere(take_knobs, **now)

    def _add(self, stage: str, began: float) -> None:
        seconds = self._clock() - began
        self.seconds += seconds
        self.pace.add(stage, seconds)


def _decay_steps(trainer: TrainerKnobs, context: Context, begun: int | None) -> int | None:
    """The trainer's, or the schedule's that was `begun`, or the run's. GraphError when there should
    be one and none is known, or when steps of the run would be left without a rate.
    """
    steps = context.run.steps or context.graph.prompt_steps
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


LIKE = 0.05
"""Share by which the gradient's norm may differ from the recorded one before it is told of: on GPUs
sums depend on the order in which threads come."""


class CatchUp:
    """The way from the weights of a checkpoint to those of the last committed step.

    consumes: the rollouts files of the steps between, each compared with the ledger before the
        first is trained
    produces: the weights and the optimiser's state of the last of them, as they were; checkpoints
        that are due
    waits for: nothing; a call of `work` does one micro-batch
    unblocked by: -

    Nothing is written to the ledger and nothing published. Where a file is missing or damaged, the
    ledger is taken back to the step before it: what was trained from there on is in flight again.
    Only at the start of a run, before sources look what is: in one that goes on meanwhile it is an
    error.
    """

    def __init__(
        self, context: Context, making: StepMaker, saver: CheckpointSaver, steps: Sequence[MadeStep]
    ) -> None:
        """steps: those after the weights that `making` has, in order."""
        self._context, self._making, self._saver = context, making, saver
        self._unread, self._left = deque(steps), deque(steps)
        self.target = steps[-1].step if steps else making.step
        """The step that it ends at."""
        self.taken_back = 0
        """Groups that were trained, and are in flight again."""

    @property
    def left(self) -> int:
        """Steps to make."""
        return len(self._left)

    def check(self) -> None:
        """Look at all the files; at the start of a run, forget what weights drew that come after
        the last step.
        """
        while self._unread:
            self._read(self._unread.popleft())
        context = self._context
        if context.folder is None or context.ledger is None or context.life.attempt:
            return
        for source in context.graph.bounds:
            if taken_out := take_out_abandoned(
                context.folder.path / "finished", source, self.target
            ):
                context.log.warning(
                    "rollouts are generated again: the weights that drew them were taken back",
                    node=context.node,
                    rows=taken_out,
                    version=self.target,
                )

    def work(self) -> bool:
        """Do a slice; False, and nothing was done, once the weights are those of the last committed
        step.

        Raises OperatorError where a step that was made cannot be made again.
        """
        if self._making.micro_batches:
            self._making.micro()
        elif self._making.is_whole:
            self._end(self._left.popleft())
        elif self._left:
            self._begin(self._left[0])
        else:
            return False
        return True

    def _read(self, step: MadeStep) -> pa.Table | None:
        """What a step trained; None where that is lost, and the ledger was taken back."""
        context = self._context
        assert context.folder is not None, "a run with a ledger has a folder"
        try:
            table = context.folder.rollouts_of(context.graph.own_folder).read(step.step)
            check_groups(step, table)
        except RunFolderError as error:
            self._take_back(step.step - 1, str(error))
            return None
        return table

    def _begin(self, step: MadeStep) -> None:
        rows = self._read(step)
        if rows is None:
            return
        try:
            self._making.take_all(rows)
        except RecordError as error:
            self._making.abandon()
            self._take_back(step.step - 1, str(error))

    def _end(self, step: MadeStep) -> None:
        outcome = self._making.end(float(step.metrics.get("lr", self._making.rate)))
        node, was = self._context.node, step.metrics.get("grad_norm")
        if outcome.culprit is not None:
            raise OperatorError(
                f"'{node}' trained step {step.step} before, but made again from its rollouts file"
                f" it is not finite; found {outcome.culprit}; look for a damaged checkpoint, or for"
                " a loss or model that was changed"
            )
        if was is not None and not math.isclose(outcome.grad_norm, was, rel_tol=LIKE, abs_tol=1e-6):
            self._context.log.warning(
                "a step made again is not what it was",
                node=node,
                step=step.step,
                grad_norm=outcome.grad_norm,
                grad_norm_was=was,
                loss=outcome.loss,
                loss_was=step.metrics.get("loss"),
            )
        self._saver.made(self._making.seconds)
        if self._saver.is_due(step.step):
            self._saver.keep(step.step)
        self._making.rest(weights=False)

    def _take_back(self, to: int, why: str) -> None:
        """Let the ledger forget the steps after `to`. Raises OperatorError where the run has gone
        on meanwhile.
        """
        context = self._context
        if context.life.attempt:
            raise OperatorError(
                f"'{context.node}' cannot make step {to + 1} again in this run: {why}; stop it and"
                " resume it, then its groups are generated and trained again"
            )
        lost = [step for step in self._left if step.step > to]
        groups = sum(len(step.trained) for step in lost)
        assert context.ledger is not None, "it said which steps there are"
        context.ledger.roll_back_to(to, context.node)
        context.log.warning(
            "steps taken back: their groups are generated and trained again",
            node=context.node,
            error=why,
            steps=[lost[0].step, lost[-1].step],
            groups=groups,
        )
        self.target, self.taken_back = to, self.taken_back + groups
        self._unread.clear()
        self._left = deque(step for step in self._left if step.step <= to)


def check_groups(step: MadeStep, table: pa.Table) -> None:
    """Raises RunFolderError unless a rollouts file holds the groups that the ledger recorded as
    trained, in order.
    """
    ids = table.column(GROUP_ID).to_pylist() if GROUP_ID in table.column_names else []
    groups = [group for at, group in enumerate(ids) if not at or group != ids[at - 1]]
    if groups != list(step.trained):
        raise RunFolderError(
            f"the rollouts of step {step.step} are not those that the ledger says were trained:"
            f" found groups {groups[:8]} instead of {list(step.trained[:8])}; take the file from a"
            " backup, or train them again"
        )
