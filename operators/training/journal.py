"""Writes down what the trainer did: rollouts file, ledger, checkpoint, metrics; and finds where to go on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataflow.errors import OperatorError
from dataflow.model import Model
from dataflow.node import Context
from operators.training import checkpoint
from operators.training.buffer import Group
from operators.training.learner import Learner


@dataclass
class Journal:
    """The trainer's hand in the run folder and the ledger; without them it writes nothing."""

    context: Context
    lane: str
    learner: Learner
    tokenizer: Any
    kept_step: int
    """Step of the last checkpoint."""

    def commit(
        self,
        step: int,
        trained: Sequence[Group],
        dropped: Mapping[int, str],
        metrics: dict[str, Any],
        *,
        keep: bool,
    ) -> None:
        """Record a step with the groups it trained, in order, and those given up; `keep`: with a checkpoint.

        The rollouts are on the disk before the ledger names them, the ledger before a checkpoint is marked.
        """
        context, clock = self.context, self.context.clock
        began = clock()
        if context.folder is not None:
            rows = [group.records for group in trained]
            context.folder.write_rollouts(step, rows, node=context.own_folder)
        if context.ledger is not None:
            context.ledger.commit_step(
                context.node,
                step,
                version=step,
                source=self.lane,
                trained=[group.group_id for group in trained],
                dropped=dropped,
                metrics=metrics,
            )
        metrics["seconds_record"] = clock() - began
        if keep:
            began = clock()
            self.keep(step)
            metrics["seconds_checkpoint"] = clock() - began
        if context.folder is not None:
            context.folder.append_metrics(metrics)

    def keep(self, step: int) -> None:
        """Write the checkpoint of the last committed step, unless it stands already."""
        context, learner = self.context, self.learner
        if context.folder is None or step in (0, self.kept_step):
            return
        if context.ledger is not None:
            context.ledger.flush()
        checkpoints = context.folder.checkpoints_of(context.own_folder)
        with checkpoints.writing(step, node=context.node, version=step) as folder:
            checkpoint.write_checkpoint(
                folder,
                learner.forward.module,
                self.tokenizer,
                learner.optimizer,
                learner.parameters,
                {"step": step, "version": step, "node": context.node},
            )
        self.kept_step = step
        if context.ledger is not None:
            context.ledger.record_checkpoint(context.node, step, str(checkpoints.folder(step)))

    def drop(self, reasons: Mapping[int, str]) -> None:
        """Record groups given up outside any step."""
        if reasons and self.context.ledger is not None:
            self.context.ledger.drop(self.context.node, self.lane, reasons)


def expected(context: Context, lane: str) -> tuple[int, list[int], int]:
    """The first group still to consume, the later ones that will not come, and how many have an outcome."""
    if context.ledger is None or not context.ledger.last_step(context.node):
        return 0, [], 0
    following = context.ledger.next_group_id(lane)
    waiting = [group.group_id for group in context.ledger.in_flight(lane, context.node)]
    first = min(waiting, default=following)
    return first, sorted(set(range(first, following)).difference(waiting)), following - len(waiting)


def resumed(model: Model, context: Context) -> tuple[Model, Path | None]:
    """The model to load, and the checkpoint it stands in where the ledger knows steps of this trainer.

    Raises OperatorError when the ledger is ahead of the newest good checkpoint.
    """
    step = context.ledger.last_step(context.node) if context.ledger is not None else 0
    if not step:
        return model, None
    folder = None
    if context.folder is not None:
        folder = context.folder.latest_checkpoint(at_most=step, node=context.own_folder)
    if folder is None or int(checkpoint.read_state(folder)["step"]) != step:
        raise OperatorError(
            f"'{context.node}' has {step} steps in the ledger, but its newest good checkpoint "
            f"is {folder.name if folder else 'missing'}; roll back to a step that has one, then resume"
        )
    return dataclasses.replace(model, source=str(folder), revision=None), folder
