"""Writes down what the trainer did: rollouts file, ledger, checkpoint, metrics; and finds where to go on."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dataflow.errors import OperatorError
from dataflow.model import Model
from dataflow.node import Context
from operators.training import checkpoint
from operators.training.buffer import Group
from operators.training.learner import Learner
from operators.training.staging import Background

CLOSE_S = 5.0
"""For a checkpoint that is being written when the run ends otherwise than it should."""


@dataclass
class Journal:
    """The trainer's hand in the run folder and the ledger; without them it writes nothing."""

    context: Context
    lane: str
    learner: Learner
    tokenizer: Any
    kept_step: int
    """Step of the last checkpoint, which may still be being written."""
    _background: Background = field(default_factory=lambda: Background("the checkpoint being written"))
    _writing: tuple[int, Path] | None = None
    """Step and place of a checkpoint that the ledger does not know yet."""

    def commit(
        self,
        step: int,
        trained: Sequence[Group],
        dropped: Mapping[int, str],
        metrics: dict[str, Any],
        *,
        keep: bool,
    ) -> None:
        """Record a step with the groups it trained, in order, and those given up; `keep`: begin a checkpoint.

        The rollouts are written before the ledger names them. Raises what went wrong with a checkpoint meanwhile.
        """
        context, clock = self.context, self.context.clock
        self._note()
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
        """Begin the checkpoint of the last committed step, unless there is one; the one before is waited for.

        Here its tensors are copied; they are written in the background. Raises what went wrong with the one before.
        """
        context, name = self.context, self.context.own_folder
        if context.folder is None or step in (0, self.kept_step):
            return
        self._wait(checkpoint.DEADLINE_S)
        checkpoints = context.folder.checkpoints_of(name)
        trained = range(self.kept_step + 1, step + 1)
        facts = {"step": step, "version": step, "node": context.node}
        with contextlib.ExitStack() as opened:
            folder = opened.enter_context(checkpoints.writing(step, node=context.node, version=step))
            staged = self.learner.everywhere(checkpoint.stage, folder=folder)[0]
            committed = opened.pop_all()

        def write() -> None:
            """The rollouts are on the disk before the ledger is, both before the checkpoint is marked."""
            assert context.folder is not None
            with committed:
                context.folder.flush_rollouts(trained, node=name)
                if context.ledger is not None:
                    context.ledger.flush()
                staged.write(folder, self.tokenizer, facts)

        self._writing = (step, checkpoints.folder(step))
        self._background.start(write, checkpoint.DEADLINE_S)
        self.kept_step = step

    def finish(self, step: int) -> None:
        """Keep the last step and wait until all is written. Raises what went wrong."""
        self.keep(step)
        self._wait(checkpoint.DEADLINE_S)

    def close(self) -> None:
        """Leave a checkpoint that is being written a moment to be done; the run is over already, or has failed."""
        try:
            self._wait(CLOSE_S)
        except Exception as error:  # the run has an error of its own, or was told this one before
            self.context.log.warning("checkpoint not written", node=self.context.node, error=str(error))

    def _wait(self, deadline_s: float) -> None:
        self._background.wait(deadline_s)
        self._note()

    def _note(self) -> None:
        """Tell the ledger of a checkpoint that is written. Raises what went wrong with it."""
        if self._writing is not None and self._background.is_idle:
            (step, place), self._writing = self._writing, None
            if self.context.ledger is not None:
                self.context.ledger.record_checkpoint(self.context.node, step, str(place))

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
