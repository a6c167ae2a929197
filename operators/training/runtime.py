"""The trainer at work: groups in issue order in, one optimiser step after the other, new weights out; imports torch."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import torch

from dataflow.errors import GraphError, OperatorError
from dataflow.node import Batch, Context, Runtime, WeightsOut
from dataflow.records import ERROR, GROUP_ID, MASK, VERSIONS
from dataflow.staleness import oldest_versions, sweep
from operators.packing import Array
from operators.training import checkpoint
from operators.training.buffer import Group, ReorderBuffer
from operators.training.learner import Learner, Outcome
from operators.training.metrics import Pace, step_metrics
from operators.training.optimizer import adamw, learning_rate
from operators.training.policy import Policy
from operators.training.rows import StepRows, step_rows, usable

if TYPE_CHECKING:
    from operators.trainer import Trainer

MOST_BAD_STEPS = 5
"""Steps in a row that may be skipped because a number was not finite."""
MOST_DROPPED_STEPS = 8
"""Steps' worth of groups in a row that may be dropped with none trained."""


class TrainerRuntime(Runtime):
    """Trains groups one after the other in the order of their issue.

    consumes: whole groups of one lane, in any order
    produces: weights on the weight plane; a rollouts file, a ledger entry, a line of metrics per step; checkpoints
    waits for: the next group in issue order
    unblocked by: its arrival; a call of `work` does one micro-batch
    """

    def __init__(
        self, trainer: Trainer, context: Context, learner: Learner, tokenizer: Any, start: int = 0
    ) -> None:
        """start: steps behind the weights that `learner` has."""
        self._trainer, self._context, self._learner, self._tokenizer = trainer, context, learner, tokenizer
        self._lane = _only_lane(trainer, context)
        self._step = start
        first, holes, ended = _expected(context, self._lane)
        self._buffer = ReorderBuffer(first, holes)
        self._max_staleness = (
            context.bounds[self._lane].max_staleness if self._lane in context.bounds else None
        )
        self._group_rows = 1
        self._groups: list[Group] = []
        self._passed: list[Group] = []
        self._rows: StepRows | None = None
        self._parts: list[Array] = []
        self._reasons: dict[int, str] = {}
        self._dropped: Counter[str] = Counter()
        self._told_dropped = ended - start * trainer.prompts_per_step
        self._dropped_in_a_row = 0
        self._last_failure = ""
        self._bad_steps = 0
        self._skipped_steps = 0
        self._kept_step = start
        self._ending = ""
        self._done = context.steps is not None and start >= context.steps
        self._loss = 0.0
        self._began = context.clock()
        self._pace = Pace(self._began, self._began)
        self._weights = {name: weight.detach() for name, weight in learner.parameters.items()}
        self._writer: WeightsOut | None = context.writer(self._weights) if context.writer else None
        if self._writer is not None and start:
            self._writer.publish(start, self._weights)

    @classmethod
    def build(cls, trainer: Trainer, context: Context) -> TrainerRuntime:
        """Load model, tokenizer and, where the ledger knows steps, the checkpoint of the last one."""
        from operators.models import load_model, load_tokenizer

        torch.set_num_threads(context.threads)
        model, folder = trainer.model, _resumed_from(trainer, context)
        if folder is not None:
            model = dataclasses.replace(model, source=str(folder), revision=None)
        module = load_model(model, device=context.device, dtype="float32")
        compute = None if model.dtype == "float32" else getattr(torch, model.dtype)
        parameters = dict(module.named_parameters())
        optimizer = adamw(
            parameters, lr=trainer.lr, betas=trainer.betas, eps=trainer.eps, weight_decay=trainer.weight_decay
        )
        start = 0
        if folder is not None:
            start = int(checkpoint.read_state(folder)["step"])
            checkpoint.read_optimizer(folder, optimizer, parameters)
        learner = Learner(
            policy=Policy(module, temperature=trainer.temperature, compute=compute),
            optimizer=optimizer,
            loss=trainer.loss_function,
            node=context.node,
            normalize=trainer.normalize,
            max_grad_norm=trainer.max_grad_norm,
            micro_batch_tokens=trainer.micro_batch_tokens,
            skip_zero_advantage=trainer.skip_zero_advantage,
        )
        return cls(trainer, context, learner, load_tokenizer(model), start)

    def room(self) -> int:
        """Rows up to the queue's bound; never 0 while the next group in order is missing."""
        if self._done:
            return 0
        if not self._buffer.is_ready:
            return max(1, self._free_rows())
        return max(0, self._free_rows())

    def push(self, batch: Batch) -> None:
        """Take groups in, in any order."""
        if batch.records.num_rows:
            chosen = pc.sum(pc.list_flatten(batch.records.column(MASK))).as_py() or 0
            self._pace.arrived_tokens += int(chosen)
            first = batch.records.column(GROUP_ID)[0].as_py()
            self._group_rows = max(
                self._group_rows, pc.sum(pc.equal(batch.records.column(GROUP_ID), first)).as_py()
            )
        self._buffer.add(batch)

    def work(self) -> list[Batch] | None:
        """One micro-batch, or the end of a step; None while the next groups are missing."""
        if self._writer is not None:
            self._writer.poll()
        if self._done:
            return None
        if self._rows is None and not self._collect():
            if self._ending:
                self._finish()
                return []
            return None
        began = self._context.clock()
        if self._parts:
            self._learner.micro(self._parts.pop(0))
            self._pace.add("forward_backward", self._context.clock() - began)
        else:
            self._end_step()
        return []

    def pending(self) -> int:
        """Rows of the step under way, or of one that could begin."""
        if self._done:
            return 0
        if self._rows is not None:
            return max(1, self._rows.rollouts)
        return int(self._buffer.is_ready)

    def waits(self) -> Sequence[Any]:
        """The weight plane's socket, where it has one."""
        socket = getattr(self._writer, "socket", None)
        return () if socket is None else (socket,)

    def tell(self, message: Mapping[str, Any]) -> None:
        """{"drain": True}: finish the step under way, keep a checkpoint, end. {"end": True}: no more groups come."""
        if message.get("drain"):
            self._ending = "drain"
        elif message.get("end"):
            self._ending = self._ending or "end"

    def status(self) -> dict[str, float | int | str]:
        """Step, version, groups waiting, groups dropped, the last loss, and `done`."""
        found: dict[str, float | int | str] = {
            "step": self._step, "version": self._step, "queue": len(self._buffer) + len(self._groups),
            "dropped": self._told_dropped, "loss": self._loss, "skipped_steps": self._skipped_steps,
        }  # fmt: skip
        return found | ({"done": 1} if self._done else {})

    def close(self) -> None:
        """Let the weight plane go."""
        close = getattr(self._writer, "close", None)
        if close is not None:
            close()

    def _free_rows(self) -> int:
        groups = self._trainer.queue_prompts
        if groups is None:
            groups = ((self._max_staleness or 0) + 2) * self._trainer.prompts_per_step
        return groups * self._group_rows - self._buffer.rows

    def _collect(self) -> bool:
        """Fill the next step from the buffer, dropping what cannot be trained; True when the step has begun."""
        if self._ending == "drain":
            return False
        while len(self._groups) < self._trainer.prompts_per_step:
            group = self._buffer.take()
            if group is None:
                return False
            self._passed.append(group)
            reason = self._reason_to_drop(group.records)
            if reason is None:
                self._groups.append(group)
                self._dropped_in_a_row = 0
            else:
                self._drop([group], reason)
        now = self._context.clock()
        self._pace.add("wait", now - self._pace.free)
        rows = step_rows([group.records for group in self._groups], self._learner.loss.columns)
        self._rows, self._parts = rows, self._learner.begin(rows)
        self._pace.add("forward_backward", self._context.clock() - now)
        return True

    def _reason_to_drop(self, records: pa.RecordBatch) -> str | None:
        good = usable(records, self._learner.loss.columns)
        if not good.any():
            errors = [error for error in records.column(ERROR).to_pylist() if error]
            self._last_failure = (
                errors[0] if errors else "no error, but no value in a column that the loss reads"
            )
            return "failed" if errors else "skipped"
        if self._max_staleness is not None:
            oldest = oldest_versions(records.column(VERSIONS))[good]
            if sweep(oldest, self._step, self._max_staleness).any():
                return "stale"
        return None

    def _drop(self, groups: Sequence[Group], reason: str) -> None:
        """Give groups up; the generators learn it at once, because they wait for others in their place."""
        self._reasons |= {group.group_id: reason for group in groups}
        self._dropped[reason] += len(groups)
        self._told_dropped += len(groups)
        self._dropped_in_a_row += len(groups)
        self._note()
        if self._dropped_in_a_row > MOST_DROPPED_STEPS * max(8, self._trainer.prompts_per_step):
            raise OperatorError(
                f"'{self._context.node}' dropped {self._dropped_in_a_row} groups in a row and trained none; found "
                f"{dict(self._dropped)}, the last failure: {self._last_failure or 'none'}; mend the operator it names"
            )

    def _note(self) -> None:
        if self._writer is not None:
            self._writer.tell({"dropped": self._told_dropped, "version": self._step})

    def _end_step(self) -> None:
        """Update the weights, offer them, and record what the step consumed."""
        clock, rows = self._context.clock, self._rows
        assert rows is not None
        rate = learning_rate(self._step + 1, self._trainer.lr, self._trainer.warmup_steps)
        began = clock()
        outcome = self._learner.end(rate)
        self._pace.add("optimizer", clock() - began)
        self._loss = outcome.loss
        groups, self._groups, self._rows = self._groups, [], None
        if outcome.culprit is not None:
            self._skip(groups, outcome.culprit)
            return
        self._bad_steps = 0
        self._step += 1
        began = clock()
        if self._writer is not None:
            self._writer.publish(self._step, self._weights)
            self._note()
        self._pace.add("publish", clock() - began)
        self._record(groups, rows, outcome, rate)
        if self._context.steps is not None and self._step >= self._context.steps:
            self._done = True

    def _skip(self, groups: Sequence[Group], culprit: str) -> None:
        self._bad_steps += 1
        self._skipped_steps += 1
        self._context.log.warning(
            "step skipped", node=self._context.node, step=self._step + 1, not_finite=culprit
        )
        if self._bad_steps >= MOST_BAD_STEPS:
            raise OperatorError(
                f"'{self._context.node}' skipped {self._bad_steps} steps in a row because numbers were not finite; "
                f"found {culprit}; look at those rollouts' advantage and logprobs, or lower lr or max_grad_norm"
            )
        self._drop(groups, "non-finite")

    def _record(self, groups: Sequence[Group], rows: StepRows, outcome: Outcome, rate: float) -> None:
        """Rollouts file, ledger, checkpoint, metrics, acknowledgements: in this order."""
        context, step, clock = self._context, self._step, self._context.clock
        passed, reasons = self._passed, self._reasons
        self._passed, self._reasons = [], {}
        began = clock()
        pace, self._pace = self._pace, Pace(began, began)
        if context.folder is not None:
            context.folder.write_rollouts(step, [group.records for group in passed])
        metrics = step_metrics(
            step=step, now=began, started=self._began, version=step, lr=rate, rows=rows,
            trained=[group.records for group in groups], outcome=outcome, pace=pace, dropped=self._dropped,
            skipped_steps=self._skipped_steps,
        )  # fmt: skip
        if context.ledger is not None:
            context.ledger.commit_step(
                context.node, step, version=step, source=self._lane,
                trained=[group.group_id for group in groups], dropped=reasons, metrics=metrics,
            )  # fmt: skip
        metrics["seconds_record"] = clock() - began
        every = self._trainer.checkpoint_every
        if (every and step % every == 0) or step == context.steps:
            began = clock()
            self._keep()
            metrics["seconds_checkpoint"] = clock() - began
        if context.folder is not None:
            context.folder.append_metrics(metrics)
        for group in passed:
            group.release()
        self._pace.free = clock()

    def _keep(self) -> None:
        """Write the checkpoint of this step, after the ledger is on the disk."""
        context, step = self._context, self._step
        if context.folder is None or step == 0 or self._kept_step == step:
            return
        if context.ledger is not None:
            context.ledger.flush()
        learner, checkpoints = self._learner, context.folder.checkpoints
        with checkpoints.writing(step, node=context.node, version=step) as folder:
            checkpoint.write_checkpoint(
                folder, learner.policy.module, self._tokenizer, learner.optimizer, learner.parameters,
                {"step": step, "version": step, "node": context.node},
            )  # fmt: skip
        self._kept_step = step
        if context.ledger is not None:
            context.ledger.record_checkpoint(context.node, step, str(checkpoints.folder(step)))

    def _finish(self) -> None:
        """The last checkpoint; at the end of the rows, what is too little for a step is dropped."""
        if self._ending == "end":
            left = [*self._groups, *self._buffer.rest()]
            self._passed += left[len(self._groups) :]
            self._groups = []
            reasons = {group.group_id: "too few left for a step" for group in left}
            self._reasons |= reasons
            self._dropped.update(reasons.values())
            self._told_dropped += len(left)
            self._note()
            if self._reasons and self._context.ledger is not None:
                self._context.ledger.drop(self._context.node, self._lane, self._reasons)
            self._reasons = {}
            for group in self._passed:
                group.release()
            self._passed = []
        self._keep()
        self._done = True


def _only_lane(trainer: Trainer, context: Context) -> str:
    lanes = list(context.columns) or list(context.bounds)
    if len(lanes) != 1:
        raise GraphError(
            f"'{context.node}' trains groups in the order of one source, but {len(lanes)} lead to it: {lanes}; "
            f"apply {type(trainer).__name__} to one stream"
        )
    return lanes[0]


def _expected(context: Context, lane: str) -> tuple[int, list[int], int]:
    """The first group still to consume, the later ones that will not come, and how many have an outcome."""
    if context.ledger is None or not context.ledger.last_step(context.node):
        return 0, [], 0
    following = context.ledger.next_group_id(lane)
    waiting = [group.group_id for group in context.ledger.in_flight(lane)]
    first = min(waiting, default=following)
    return first, sorted(set(range(first, following)).difference(waiting)), following - len(waiting)


def _resumed_from(trainer: Trainer, context: Context) -> Any:
    """Folder of the checkpoint to go on from; None for a new run."""
    step = context.ledger.last_step(context.node) if context.ledger is not None else 0
    if not step:
        return None
    folder = context.folder.latest_checkpoint(at_most=step) if context.folder is not None else None
    if folder is None or int(checkpoint.read_state(folder)["step"]) != step:
        raise OperatorError(
            f"'{context.node}' has {step} steps in the ledger, but the newest good checkpoint is "
            f"{folder.name if folder else 'missing'}; roll the ledger back to a step that has one, then resume"
        )
    return folder
