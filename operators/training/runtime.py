"""The trainer at work: groups in order of issue in, steps one by one, new weights out; imports torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import torch

from dataflow.errors import GraphError, OperatorError
from dataflow.model import Model
from dataflow.node import Batch, Context, Runtime
from dataflow.records import ERROR, GROUP_ID, MASK, VERSIONS
from dataflow.staleness import oldest_versions, sweep
from dataflow.weight_ends import WeightsOut
from operators.packing import Array
from operators.training import checkpoint, memory
from operators.training.buffer import Group, ReorderBuffer
from operators.training.build import make_learner
from operators.training.journal import Journal, expected, resumed
from operators.training.learner import Learner
from operators.training.metrics import Pace, step_metrics
from operators.training.rows import StepRows, drop_reason, step_rows, usable
from operators.training.schedule import learning_rate

if TYPE_CHECKING:
    from operators.trainer import Trainer

MOST_BAD_STEPS = 5
"""Steps in a row that may be skipped because a number was not finite; the last of them ends the run."""
OWN_REASONS = ("failed", "skipped", "stale", "non-finite", "too few for a step")
"""Why the trainer drops groups by itself; any other reason is the name of a filter."""
MOST_DROPPED_STEPS = 8
"""Steps' worth of groups in a row that may be dropped with none trained."""


class TrainerRuntime(Runtime):
    """Trains groups one after the other in the order of their issue.

    consumes: whole groups of one lane, in any order
    produces: weights on the weight plane; per step a rollouts file, a ledger entry, a line of metrics
    waits for: the next group in issue order
    unblocked by: its arrival; a call of `work` does one micro-batch
    """

    def __init__(self, trainer: Trainer, context: Context, learner: Learner, tokenizer: Any, start: int = 0) -> None:
        """start: steps behind the weights that `learner` has."""
        self._trainer, self._context, self._learner = trainer, context, learner
        lane = _only_lane(context)
        first, holes, ended = expected(context, lane)
        self._buffer = ReorderBuffer(first, holes)
        self._bound = context.bounds.get(lane)
        self._journal = Journal(context, lane, learner, tokenizer, start)
        self._step = start
        self._group_rows = 1
        self._groups: list[Group] = []
        """Of the step under way."""
        self._passed: list[Group] = []
        """Those and the dropped ones since the last committed step."""
        self._reasons: dict[int, str] = {}
        """Of the drops since the last committed step."""
        self._rows: StepRows | None = None
        self._parts: list[Array] = []
        self._told_dropped = ended - start * trainer.prompts_per_step
        self._surplus = 0
        """Groups that came after its last step."""
        self._dropped_in_a_row: Counter[str] = Counter()
        """By reason, since the last group that could be trained."""
        self._last_failure = "none"
        self._bad_steps = 0
        self._skipped_steps = 0
        self._ending = ""
        self._done = context.steps is not None and start >= context.steps
        self._decay_steps = _decay_steps(trainer, context)
        self._loss = 0.0
        self._began = context.clock()
        self._pace = Pace(self._began, self._began)
        self._weights = {name: weight.detach() for name, weight in learner.parameters.items()}
        self._writer: WeightsOut | None = context.writer(self._weights) if context.writer else None
        if self._writer is not None:
            self._writer.publish(start, self._weights)
            self._note()

    @classmethod
    def build(cls, trainer: Trainer, context: Context) -> TrainerRuntime:
        """Load model and tokenizer: those of the last step's checkpoint where the ledger knows steps."""
        from operators.models import load_tokenizer

        torch.set_num_threads(context.threads)
        model, folder = resumed(trainer.model, context)
        learner, context = _learner(trainer, model, context)
        start = 0
        if folder is not None:
            start = int(checkpoint.read_state(folder)["step"])
            learner.everywhere(checkpoint.restore, folder=folder)
        return cls(trainer, context, learner, load_tokenizer(model), start)

    def room(self) -> int:
        """Rows up to the queue's bound; never 0 while the next group in order is missing, or once it is done."""
        if self._done:
            return 1
        groups = self._trainer.queue_prompts
        if groups is None:
            ahead = self._bound.max_staleness if self._bound is not None else 0
            groups = (ahead + 2) * self._trainer.prompts_per_step
        free = groups * self._group_rows - self._buffer.rows
        return max(0 if self._buffer.is_ready else 1, free)

    def push(self, batch: Batch) -> None:
        """Take groups in, in any order; once it is done it passes them, as other trainers may still need theirs."""
        rows = batch.records
        if self._done:
            self._surplus += len(pc.unique(rows.column(GROUP_ID)))
            self._note()
            batch.ack()
            return
        if rows.num_rows:
            self._pace.arrived_tokens += int(pc.sum(pc.list_flatten(rows.column(MASK))).as_py() or 0)
            ids = rows.column(GROUP_ID)
            self._group_rows = max(self._group_rows, int(pc.sum(pc.equal(ids, ids[0])).as_py()))
        self._buffer.add(batch)

    def work(self) -> list[Batch] | None:
        """One micro-batch, or the end of a step; None while the next groups are missing."""
        if self._writer is not None:
            self._writer.poll()
        if self._done:
            return None
        if self._rows is None and not self._collect():
            if not self._ending:
                return None
            self._finish()
        elif self._parts:
            began = self._context.clock()
            self._learner.micro(self._parts.pop(0))
            self._pace.add("forward_backward", self._context.clock() - began)
        else:
            self._end_step()
        return []

    def pending(self) -> int:
        """Rows of the step under way, or of one that could begin."""
        if self._done:
            return 0
        return max(1, self._rows.rollouts) if self._rows is not None else int(self._buffer.is_ready)

    def waits(self) -> Sequence[Any]:
        """The weight plane's socket, where it has one."""
        socket = getattr(self._writer, "socket", None)
        return () if socket is None else (socket,)

    def tell(self, message: Mapping[str, Any]) -> None:
        """{"drain": True}: end the step under way, keep a checkpoint, end. {"end": True}: no group comes."""
        if message.get("drain"):
            self._ending = "drain"
        elif message.get("end"):
            self._ending = self._ending or "end"

    def status(self) -> dict[str, float | int | str]:
        """Step, version, groups waiting, groups dropped, the last loss, and `done`."""
        found: dict[str, float | int | str] = {
            "step": self._step,
            "version": self._step,
            "queue": len(self._buffer) + len(self._groups),
            "dropped": self._told_dropped,
            "loss": self._loss,
            "skipped_steps": self._skipped_steps,
        }
        return found | ({"done": 1} if self._done else {})

    def close(self) -> None:
        """Let the weight plane go, and the other ranks, once a checkpoint that is being written had time to be done."""
        self._journal.close()
        close = getattr(self._writer, "close", None)
        if close is not None:
            close()
        self._learner.close()

    def _collect(self) -> bool:
        """Fill the next step from the buffer, dropping what cannot be trained; True when it has begun."""
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
                self._dropped_in_a_row.clear()
            else:
                self._drop([group], reason)
                self._check_drops()
        now = self._context.clock()
        self._pace.add("wait", now - self._pace.free)
        self._rows = step_rows([group.records for group in self._groups], self._learner.loss.columns)
        self._bring()
        self._parts = self._learner.begin(self._rows, self._step)
        self._pace.add("forward_backward", self._context.clock() - now)
        return True

    def _reason_to_drop(self, records: pa.RecordBatch) -> str | None:
        if (marked := drop_reason(records)) is not None:
            return marked
        good = usable(records, self._learner.loss.columns)
        if not good.any():
            errors = [error for error in records.column(ERROR).to_pylist() if error]
            self._last_failure = errors[0] if errors else "no value in a column that the loss reads"
            return "failed" if errors else "skipped"
        if self._bound is not None:
            oldest = oldest_versions(records.column(VERSIONS))[good]
            if sweep(oldest, self._step, self._bound.max_staleness).any():
                return "stale"
        return None

    def _drop(self, groups: Sequence[Group], reason: str) -> None:
        """Give groups up; the generators learn it at once, because they wait for others in their place."""
        self._reasons |= {group.group_id: reason for group in groups}
        self._told_dropped += len(groups)
        self._dropped_in_a_row[reason] += len(groups)
        self._note()

    def _check_drops(self) -> None:
        """Raise OperatorError when nothing could be trained for long."""
        dropped = self._dropped_in_a_row
        if dropped.total() > MOST_DROPPED_STEPS * max(8, self._trainer.prompts_per_step):
            (most, _), *_ = dropped.most_common(1)
            do = "mend the operator that it names"
            if most not in OWN_REASONS:
                do = f"loosen the filter '{most}', or give it prompts and a policy that it lets through"
            raise OperatorError(
                f"'{self._context.node}' dropped {dropped.total()} groups in a row and trained none; "
                f"found {dict(dropped)}, the last failure: {self._last_failure}; {do}"
            )

    def _note(self) -> None:
        if self._writer is not None:
            self._writer.tell({"dropped": self._told_dropped + self._surplus, "version": self._step})

    def _end_step(self) -> None:
        """Update the weights, offer them at once, then record what the step consumed."""
        context, clock, rows = self._context, self._context.clock, self._rows
        assert rows is not None
        trainer = self._trainer
        rate = learning_rate(
            self._step + 1, trainer.lr, warmup_steps=trainer.warmup_steps, schedule=trainer.schedule,
            decay_steps=self._decay_steps, min_lr=trainer.min_lr,
        )  # fmt: skip
        began = clock()
        self._bring(moments=True)
        outcome = self._learner.end(rate)
        self._pace.add("optimizer", clock() - began)
        self._loss = outcome.loss
        groups, self._groups, self._rows = self._groups, [], None
        if outcome.culprit is not None:
            self._skip(groups, outcome.culprit)
            self._rest()
            return
        self._bad_steps = 0
        self._step += 1
        began = clock()
        if self._writer is not None:
            self._writer.publish(self._step, self._weights)
            self._note()
        ended = clock()
        self._pace.add("publish", ended - began)
        metrics = step_metrics(
            node=context.node,
            step=self._step,
            now=ended,
            started=self._began,
            version=self._step,
            lr=rate,
            rows=rows,
            trained=[group.records for group in groups],
            outcome=outcome,
            pace=self._pace,
            dropped=Counter(self._reasons.values()),
            skipped_steps=self._skipped_steps,
        )
        self._pace = Pace(ended, ended)
        every, is_last = self._trainer.checkpoint_every, self._step == context.steps
        is_kept = is_last or bool(every and self._step % every == 0)
        passed, reasons = self._passed, self._reasons
        self._passed, self._reasons = [], {}
        self._journal.commit(self._step, groups, reasons, metrics, keep=is_kept)
        for group in passed:
            group.release()
        self._rest()
        self._pace.free = clock()
        if is_last:
            self._journal.finish(self._step)
        self._done = is_last

    def _skip(self, groups: Sequence[Group], culprit: str) -> None:
        self._bad_steps += 1
        self._skipped_steps += 1
        node = self._context.node
        self._context.log.warning("step skipped", node=node, step=self._step + 1, not_finite=culprit)
        if self._bad_steps >= MOST_BAD_STEPS:
            raise OperatorError(
                f"'{node}' skipped {self._bad_steps} steps in a row because numbers were not finite; found "
                f"{culprit}; look at those rollouts' advantage and logprobs, or lower lr or max_grad_norm"
            )
        self._drop(groups, "non-finite")

    def _finish(self) -> None:
        """The last checkpoint; at the end of the rows, what is too little for a step is dropped."""
        if self._ending == "end":
            rest = self._buffer.rest()
            self._passed += rest
            self._drop([*self._groups, *rest], "too few for a step")
            self._journal.drop(self._reasons)
            for group in self._passed:
                group.release()
            self._groups, self._passed, self._reasons = [], [], {}
        self._bring(moments=True)
        self._journal.finish(self._step)
        self._done = True

    def _bring(self, *, moments: bool = False) -> None:
        """Have what is parked on the devices again."""
        if self._trainer.offload:
            self._learner.everywhere(memory.bring, moments=moments)

    def _rest(self) -> None:
        """Give the devices' memory back: that of the weights too, where no step could begin and none of them waits to
        be published."""
        if self._trainer.offload:
            unread = self._writer is None or getattr(self._writer, "pending", 0) is None
            self._learner.everywhere(memory.rest, weights=unread and not self._buffer.is_ready)


def _learner(trainer: Trainer, model: Model, context: Context) -> tuple[Learner, Context]:
    """The learner of one rank, or of several; and the context, whose weight plane then takes what each rank has."""
    if context.ranks == 1:
        return make_learner(trainer, model, node=context.node, device=context.device), context
    from operators.training.parallel.launch import led

    return led(trainer, model, context)


def _decay_steps(trainer: Trainer, context: Context) -> int | None:
    """Steps until the learning rate is at its end. GraphError when there should be one and none is known."""
    found = trainer.decay_steps or context.steps or context.prompt_steps
    if found is None and trainer.schedule != "constant":
        raise GraphError(
            f"'{context.node}' has schedule='{trainer.schedule}', but nothing says when it ends: no steps, and prompts "
            f"without end; give the run steps, the prompts epochs, or the trainer decay_steps"
        )
    return found


def _only_lane(context: Context) -> str:
    lanes = list(context.columns) or list(context.bounds)
    if len(lanes) != 1:
        raise GraphError(
            f"'{context.node}' trains groups in the order of one source, but {len(lanes)} lead to it: "
            f"{lanes}; apply it to one stream"
        )
    return lanes[0]
