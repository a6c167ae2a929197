"""The trainer at work: groups in order of issue in, steps one by one, new weights out; imports
torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow.compute as pc
import torch

from dataflow.errors import Unusable
from dataflow.folder.knobs_by_step import KnobsByStep
from dataflow.folder.ledger import MadeStep
from dataflow.model import Model
from dataflow.records import GROUP_ID, MASK
from dataflow.rules import QueuedGroup, ReorderBuffer, begins_early, queue_prompts, row_room
from dataflow.runtime import Batch, Context, KnobsInForce, Runtime
from operators.trainer import TrainerKnobs
from operators.training.batches import Drops, step_metrics
from operators.training.checkpoints import checkpoint
from operators.training.checkpoints.checkpoint import expected, find_start, recorded_drops
from operators.training.checkpoints.saving import CheckpointSaver, Debt
from operators.training.journal import TOO_FEW, Journal, only_source
from operators.training.learner import memory
from operators.training.learner.build import check_gradients, make_learner
from operators.training.learner.learner import Learner
from operators.training.offers import Offers
from operators.training.steps import CatchUp, StepMaker, StepPace

# The learner of a trainer on one rank or on several; imports torch.


def learner_on_ranks(
    trainer: TrainerKnobs, model: Model, context: Context
) -> tuple[Learner, Context]:
    """The learner of one rank, or of several; and the context, whose weight plane then takes what
    each rank has.
    """
    if context.devices.ranks == 1:
        learner = make_learner(
            trainer,
            model,
            node=context.node,
            device=context.devices.device,
            seed=context.run.seed,
            aside=context.devices.aside,
        )
        learner.settle_s = context.run.limits.settle_s
        return learner, context
    from operators.training.parallel.launch import led

    return led(trainer, model, context)


MOST_BAD_STEPS = 5
"""Steps in a row that may be skipped because a number was not finite; the last of them ends the
run."""


class TrainerRuntime(Runtime):
    """Trains groups one after the other in the order of their issue.

    consumes: whole groups of one source, in any order
    produces: weights on the weight plane; per step a rollouts file, a ledger entry, a line of
        metrics
    waits for: the next group in issue order; those that are there it computes meanwhile
    unblocked by: its arrival; a call of `work` does one micro-batch

    One that starts behind the ledger first catches up (`catch_up`), and neither publishes nor takes
    groups before.
    """

    def __init__(
        self,
        trainer: TrainerKnobs,
        context: Context,
        learner: Learner,
        tokenizer: Any,
        start: int = 0,
        missing: Sequence[MadeStep] = (),
        last_metrics: Mapping[str, Any] | None = None,
    ) -> None:
        """start: steps behind the weights that `learner` has. missing: committed ones after it, to
        be made again. last_metrics: those of the last committed step.
        """
        self._trainer, self._context, self._learner = trainer, context, learner
        self._source = only_source(context)
        self._knobs = KnobsByStep(trainer, context.changes, context.ledger)
        last_metrics = last_metrics or {}
        self._making = StepMaker(
            trainer, context, learner, start, self._knobs, last_metrics.get("decay_steps")
        )
        self._journal = Journal(context, self._source)
        debt = Debt(trainer.recover_within_s)
        self._saver = CheckpointSaver(
            context,
            learner,
            tokenizer,
            start,
            debt,
            trainer.checkpoint_every,
            trainer.save_total_limit,
            dtype=trainer.checkpoint_dtype,
        )
        self._behind: CatchUp | None = CatchUp(context, self._making, self._saver, missing)
        self._buffer = ReorderBuffer()
        self._early: list[Batch] = []
        """Came before it had caught up."""
        self._declared = context.graph.bounds.get(self._source)
        self._bound = self._knobs.bound(start + 1, self._declared)
        self._group_rows = 1
        self._groups: list[QueuedGroup] = []
        """Of the step under way, or of the next."""
        self._taken = 0
        """How many of them are in its micro-batches."""
        self._drops = Drops(
            context, self._journal, learner.loss.columns, self._bound, trainer.prompts_per_step
        )
        self._taken_back = 0
        self._surplus = 0
        """Groups that came after its last step."""
        self._bad_steps = 0
        self._skipped_steps = int(last_metrics.get("skipped_steps", 0))
        self._ending = ""
        self._done = False
        self._awake = True
        """Whether it has the memory of its devices."""
        self._loss = float(last_metrics.get("loss", 0.0))
        self._began = context.clock() - float(last_metrics.get("seconds", 0.0))
        self._offers = Offers(context, learner)
        self._behind.check()
        self._saver.begin_copies(self._behind.target)
        if not self._behind.left:
            self._taken_back = self._behind.taken_back
            self._open()

    @classmethod
    def build(cls, trainer: TrainerKnobs, context: Context) -> TrainerRuntime:
        """Load model and tokenizer: those of the newest good checkpoint where the ledger knows
        steps.
        """
        from operators.models.loading import load_tokenizer

        check_gradients(context.node)
        torch.set_num_threads(context.devices.threads)
        start = find_start(trainer.model, context)
        learner, context = learner_on_ranks(trainer, start.model, context)
        for refresh in context.weights.refreshers:
            options: dict[str, Any] = {"step": start.step, "dtype": trainer.model.dtype}
            learner.everywhere(memory.add, every=refresh.every, decay=refresh.decay, **options)
        if start.folder is not None:
            learner.everywhere(checkpoint.restore, folder=start.folder)
        tokenizer = load_tokenizer(start.model)
        return cls(
            trainer, context, learner, tokenizer, start.step, start.missing, start.last_metrics
        )

    def room(self) -> int:
        """Rows up to the queue's bound; never 0 while the next group in order is missing, or once
        it is done.
        """
        if self._done:
            return 1
        if self._behind is not None:
            return 0
        ahead = self._bound.max_staleness if self._bound is not None else 0
        groups = queue_prompts(self._trainer.queue_prompts, self._trainer.prompts_per_step, ahead)
        return row_room(groups, self._group_rows, self._buffer.rows, is_ready=self._buffer.is_ready)

    def push(self, batch: Batch) -> None:
        """Take groups in, in any order; once it is done it passes them, as other trainers may still
        need theirs.
        """
        rows = batch.records
        if self._behind is not None:
            self._early.append(batch)
            return
        if self._done:
            self._surplus += len(pc.unique(rows.column(GROUP_ID)))
            self._note()
            batch.ack()
            return
        if rows.num_rows:
            self._making.pace.arrived_tokens += int(
                pc.sum(pc.list_flatten(rows.column(MASK))).as_py() or 0
            )
            ids = rows.column(GROUP_ID)
            self._group_rows = max(self._group_rows, int(pc.sum(pc.equal(ids, ids[0])).as_py()))
        self._buffer.add(batch)

    def work(self) -> list[Batch] | None:
        """One micro-batch, or the end of a step; None while the next groups are missing."""
        self._offers.poll()
        self._saver.note()
        if self._done:
            return [] if self._saver.wait_for_copies() else None
        if self._behind is None and not self._making.is_whole:
            self._between_steps()
            self._collect()
        if not self._awake or not self._has_work:
            return None
        if self._behind is not None:
            self._catch_up(self._behind)
        elif self._ending == "drain" and not self._making.is_whole:
            self._finish()
        elif self._making.micro_batches:
            self._making.micro()
        elif self._making.is_whole:
            self._end_step()
        else:
            self._finish()
        return []

    def pending(self) -> int:
        """Rows of the step under way, unless it waits for more; of one that could begin; steps that
        it lacks.
        """
        if self._done:
            return 0
        if self._behind is not None:
            return max(1, self._behind.left)
        if self._making.is_whole or self._making.micro_batches:
            return sum(group.records.num_rows for group in self._groups)
        return int(self._buffer.is_ready or self._has_work)

    def waits(self) -> Sequence[Any]:
        """The weight planes' sockets, where they have some."""
        return self._offers.waits()

    def wants_devices(self) -> bool:
        """While it has a step to make, to publish or to keep: nothing of it may be put away
        meanwhile.
        """
        return (
            (not self._done and self._has_work) or self._saver.is_writing or self._offers.is_pending
        )

    def sleep(self) -> None:
        """Put weights and moments away, on all ranks; rows and notes go on coming and going."""
        self._making.rest(weights=True)
        self._awake = False

    def wake(self) -> None:
        """Have the weights again; the moments come for the update."""
        self._making.bring()
        self._awake = True

    def tell(self, message: Mapping[str, Any]) -> None:
        """{"drain": True}: end the step under way, keep a checkpoint, end. {"end": True}: no group
        comes. {"checkpoint": n}: keep one after the step under way, the n-th that somebody has
        asked for.
        """
        self._saver.requested = max(self._saver.requested, int(message.get("checkpoint", 0)))
        if message.get("drain"):
            self._ending = "drain"
        elif message.get("end"):
            self._ending = self._ending or "end"

    def change(self, knobs: KnobsInForce) -> None:
        """From the next step on that is begun."""
        self._knobs.hear(knobs.changes)

    @property
    def is_behind(self) -> bool:
        """Until that step, which a trainer that has made its last does not begin."""
        return self._knobs.is_behind and not self._done

    def status(self) -> dict[str, float | int | str]:
        """Step, version, groups waiting, groups dropped, the last loss, the newest good checkpoint,
        and `done`.

        `catching_up`: steps that it still makes again; step and version are then those that it
        comes to. `taken_back`: groups that it had trained, and that the source has to issue again.
        """
        step = self._making.step if self._behind is None else self._behind.target
        figures: dict[str, float | int | str] = {
            "step": step,
            "version": step,
            "queue": len(self._buffer) + len(self._groups),
            "next": self._buffer.following,
            "dropped": self._drops.total,
            "loss": self._loss,
            "skipped_steps": self._skipped_steps,
            "checkpoint": self._saver.kept_step,
            "asked_checkpoint": self._saver.answered,
            "asked_step": self._saver.asked_step,
        }
        if self._behind is not None:
            figures |= {"catching_up": self._behind.left, "taken_back": self._behind.taken_back}
        elif self._taken_back:
            figures["taken_back"] = self._taken_back
        if (copier := self._saver.copier) is not None:
            figures |= {"copied": copier.copied, "copied_bytes": copier.bytes}
        return figures | ({"done": 1} if self._done and self._saver.is_copied else {})

    def close(self) -> None:
        """Let the weight plane go, and the other ranks, once a checkpoint that is being written had
        time to be done.
        """
        self._saver.close()
        self._offers.close()
        self._learner.close()

    def _catch_up(self, behind: CatchUp) -> None:
        """A slice of the way to the last committed step; at its end, or when it is to end, what
        comes after it.
        """
        if self._ending == "drain" and not self._making.is_begun:
            self._finish()
            return
        if not behind.work():
            self._taken_back = behind.taken_back
            self._open()

    def _open(self) -> None:
        """Offer the weights of the last committed step, and let groups in."""
        context, step = self._context, self._making.step
        self._behind = None
        first, holes, ended = expected(context, self._source)
        self._buffer = ReorderBuffer(first, holes)
        self._drops.total = ended - step * self._trainer.prompts_per_step
        self._drops.recorded = recorded_drops(context, step + 1)
        now = context.clock()
        self._making.pace = StepPace(now, now)
        self._making.bring()
        self._offers.open(step)
        self._note()
        if context.run.steps is not None and step >= context.run.steps:
            self._making.bring(moments=True)
            self._saver.finish(step)
            self._done = True
        early, self._early = self._early, []
        for batch in early:
            self.push(batch)

    @property
    def _is_complete(self) -> bool:
        """Whether the groups of a step are there that it is to make."""
        return self._making.is_whole or (
            len(self._groups) == self._trainer.prompts_per_step and self._ending != "drain"
        )

    @property
    def _has_work(self) -> bool:
        """Whether there is something of a step to compute, or an end to come to."""
        return bool(
            self._behind is not None
            or self._making.micro_batches
            or self._is_complete
            or self._ending
        )

    def _collect(self) -> None:
        """Fill the next step from the buffer, dropping what cannot be trained."""
        while self._ending != "drain" and not self._is_complete:
            group = self._buffer.take()
            if group is None:
                break
            reason = self._drops.reason(group.records, self._making.step)
            if reason is None:
                self._groups.append(group)
            else:
                self._drop([group], reason)
                self._drops.check()
        if self._awake and (self._is_complete or (self._begins_early and self._ending != "drain")):
            self._take()

    @property
    def _begins_early(self) -> bool:
        """Whether it has its devices while others generate."""
        ahead = 1 if self._bound is None else self._bound.max_staleness
        on_cpu = self._context.devices.device.startswith("cpu")
        return self._learner.parked is None and begins_early(ahead, on_cpu=on_cpu)

    def _take(self) -> None:
        """Let what is there be computed."""
        for group in self._groups[self._taken :]:
            self._taken += 1
            is_last = self._taken == self._trainer.prompts_per_step
            self._making.take(group.records, is_last=is_last)

    def _between_steps(self) -> None:
        """What was asked for since the last step ended: other knobs for the next, until it is
        begun, and a checkpoint of the last.
        """
        step, knobs = self._making.step, self._knobs
        if knobs.is_behind and not self._making.is_begun:
            changes = knobs.take(step + 1, self._declared)
            self._context.log.info(
                "knobs changed", node=self._context.node, now=[str(change) for change in changes]
            )
        self._bound = self._drops.bound = knobs.bound(step + 1, self._declared)
        self._saver.every = knobs.at(step + 1).checkpoint_every
        self._saver.keep_asked(step)

    def _drop(self, groups: Sequence[QueuedGroup], reason: str) -> None:
        """Give groups up; the generators learn it at once, because they wait for others in their
        place.
        """
        self._drops.add(groups, reason, self._making.step + 1)
        self._note()

    def _note(self) -> None:
        self._offers.tell(
            {"dropped": self._drops.total + self._surplus, "version": self._making.step}
        )

    def _end_step(self) -> None:
        """Update the weights, record what the step consumed, and then offer them; the order is the
        journal's.
        """
        context, clock, making, journal = (
            self._context,
            self._context.clock,
            self._making,
            self._journal,
        )
        rows, rate, pace = making.rows(), making.rate, making.pace
        outcome = making.end(rate)
        self._loss = outcome.loss
        groups, self._groups, self._taken = self._groups, [], 0
        if outcome.culprit is not None:
            self._skip(groups, outcome.culprit)
            self._rest()
            return
        self._bad_steps = 0
        step, ended = making.step, clock()
        making.pace = StepPace(ended, ended)
        metrics = step_metrics(
            node=context.node,
            step=step,
            now=ended,
            started=self._began,
            version=step,
            lr=rate,
            rows=rows,
            trained=[group.records for group in groups],
            outcome=outcome,
            pace=pace,
            scores=context.graph.scores,
            skipped_steps=self._skipped_steps,
            forwards=context.graph.forwards,
            **self._drops.figures,
        )
        if metrics["no_signal"] is not None:
            context.log.warning("no signal", node=context.node, step=step, **metrics["no_signal"])
        self._offers.look_at(outcome, step)
        metrics |= self._offers.sent() | (
            {"decay_steps": making.decay_steps} if making.decay_steps else {}
        )
        journal.commit(step, groups, self._drops.reasons, metrics, making.new_logprobs())
        self._saver.made(making.seconds)
        recorded = clock()
        self._offers.made(step)
        self._note()
        published = clock()
        metrics |= {"seconds_record": recorded - ended, "seconds_publish": published - recorded}
        metrics |= {**self._offers.exchanged(), **pace.by_state(context.spent(), making.pace)}
        if self._saver.is_due(step):
            self._saver.keep(step)
            metrics["seconds_checkpoint"] = clock() - published
        journal.tell(metrics)
        for group in groups:
            group.release()
        self._drops.committed()
        self._rest()
        making.pace.free = clock()
        if step == context.run.steps:
            self._saver.finish(step)
            self._done = True

    def _skip(self, groups: Sequence[QueuedGroup], culprit: str) -> None:
        self._bad_steps += 1
        self._skipped_steps += 1
        node = self._context.node
        self._context.log.warning(
            "step skipped", node=node, step=self._making.step + 1, not_finite=culprit
        )
        if self._bad_steps >= MOST_BAD_STEPS:
            raise Unusable(
                f"'{node}' skipped {self._bad_steps} steps in a row because numbers were not"
                f" finite; found {culprit}; look at those rollouts' advantage and logprobs, or"
                " lower lr or max_grad_norm"
            )
        self._drop(groups, "non-finite")

    def _finish(self) -> None:
        """The last checkpoint; at the end of the rows, what is too little for a step is dropped."""
        self._making.abandon()
        self._drops.record(self._making.step + 1)
        if self._ending == "end" and self._behind is None:
            leftover, self._groups = [*self._groups, *self._buffer.rest()], []
            self._drops.add(leftover, TOO_FEW, None)
            self._drops.record(None)
            self._note()
        self._making.bring(moments=True)
        self._saver.finish(self._making.step)
        self._done = True

    def _rest(self) -> None:
        """Give the devices' memory back: that of the weights too, where no step could begin and
        none of them waits to be published. One that takes turns does so at their end.
        """
        if self._context.devices.aside is None:
            self._making.rest(weights=not self._offers.is_pending and not self._buffer.is_ready)
