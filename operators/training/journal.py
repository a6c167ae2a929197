"""Writes down what the trainer did: rollouts file, ledger, checkpoint, metrics.

The order after an update, and what a crash between two of its points leaves:

| crash after | ledger | weights that readers may have | what the next start does |
|---|---|---|---|
| the update | m | m | goes on from m; the step's groups were not acknowledged and come again |
| its rollouts file | m | m | the same; the file is written anew |
| its commit in the ledger | m + 1 | m | makes step m + 1 again from its file and publishes it |
| publishing | m + 1 | m + 1 | the same: the weights of m + 1 are those that readers have |
| its line of metrics | m + 1 | m + 1 | the same; a line that is missing is written from the ledger |
| its acknowledgements | m + 1 | m + 1 | the same; groups that come again have an outcome, and are acknowledged |
| half a checkpoint | m + 1 | m + 1 | takes the newest one with a commit marker and undamaged files |
| a checkpoint's marker | m + 1 | m + 1 | takes it, whether the ledger knows of it or not |
| half of a return to an earlier step | m + 1, or that one | m + 1 | begins it again; it is one transaction |

So no reader ever has a version that the ledger does not know. Drops are recorded with the step, or before it where they
are many, as those of the step under way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dataflow.errors import RunError
from dataflow.files import RunFolderError
from dataflow.ledger import LedgerError
from dataflow.node import Context
from operators.training import checkpoint
from operators.training.buffer import Group
from operators.training.learner import Learner
from operators.training.staging import Background

CLOSE_S = 5.0
"""For a checkpoint that is being written when the run ends otherwise than it should."""
TOO_FEW = "too few for a step"
"""Why groups are dropped at the end of the rows."""


@dataclass
class Journal:
    """The trainer's hand in the run folder and the ledger; without them it writes nothing."""

    context: Context
    lane: str
    learner: Learner
    tokenizer: Any
    kept_step: int
    """Step of the newest good checkpoint; 0 before the first."""
    every: int | None = None
    """Steps between checkpoints."""
    _background: Background = field(default_factory=lambda: Background("the checkpoint being written"))
    _writing: tuple[int, Path] | None = None
    """Step and place of the checkpoint being written."""

    def commit(
        self, step: int, trained: Sequence[Group], dropped: Mapping[int, str], metrics: Mapping[str, Any]
    ) -> None:
        """Record a step with the groups it trained, in order, and those given up since the last record.

        The rollouts are written before the ledger names them.
        """
        context = self.context
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

    def tell(self, metrics: Mapping[str, Any]) -> None:
        """Append a committed step's line to the metrics."""
        if self.context.folder is not None:
            self.context.folder.append_metrics(metrics)

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint of this step is wanted."""
        return step == self.context.steps or bool(self.every and step % self.every == 0)

    def keep(self, step: int) -> None:
        """Begin the checkpoint of a committed step, unless there is one; the one before is waited for.

        Here its tensors are copied; they are written in the background. Where the disk refuses, a warning says so, the
        one before stays the newest, and the next is tried when it is due.
        """
        try:
            self._begin(step)
        except (RunFolderError, LedgerError) as error:
            self._warn(step, error)

    def finish(self, step: int) -> None:
        """Keep the last step and wait until all is written. Raises what went wrong with it."""
        if self._writing is None or self._writing[0] != step:
            self._begin(step)
        self._written(checkpoint.DEADLINE_S)

    def note(self) -> None:
        """Tell the ledger of a checkpoint that is written by now, or warn of one that could not be."""
        if self._background.is_idle:
            self._settle(0.0)

    def close(self) -> None:
        """Leave a checkpoint that is being written a moment to be done; the run is over already, or has failed."""
        try:
            self._written(CLOSE_S)
        except Exception as error:  # the run has an error of its own, or was told this one before
            self.context.log.warning("checkpoint not written", node=self.context.node, error=str(error))

    def drop(self, reasons: Mapping[int, str], step: int | None) -> None:
        """Record groups given up for the step under way, before it is committed; None: outside any step."""
        if reasons and self.context.ledger is not None:
            self.context.ledger.drop(self.context.node, self.lane, reasons, step=step)

    def _begin(self, step: int) -> None:
        context, name = self.context, self.context.own_folder
        if context.folder is None or step in (0, self.kept_step):
            return
        self._settle(checkpoint.DEADLINE_S)
        checkpoints = context.folder.checkpoints_of(name)
        trained = range(self.kept_step + 1, step + 1)
        facts = {"step": step, "version": step, "node": context.node}
        with contextlib.ExitStack() as opened:
            folder = opened.enter_context(checkpoints.writing(step, node=context.node, version=step))
            checkpoint.prepare(folder)
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

    def _settle(self, deadline_s: float) -> None:
        """Wait for the checkpoint being written, and warn of one that the disk refused."""
        step = self._writing[0] if self._writing is not None else 0
        try:
            self._written(deadline_s)
        except (RunFolderError, LedgerError) as error:
            self._warn(step, error)

    def _written(self, deadline_s: float) -> None:
        """Wait for the checkpoint being written, and tell the ledger of it. Raises what went wrong with it."""
        if self._writing is None:
            return
        (step, place), self._writing = self._writing, None
        self._background.wait(deadline_s)
        self.kept_step = step
        if self.context.ledger is not None:
            self.context.ledger.record_checkpoint(self.context.node, step, str(place))

    def _warn(self, step: int, error: RunError) -> None:
        self.context.log.warning(
            "checkpoint not written; training goes on", node=self.context.node, step=step, error=str(error),
            newest=self.kept_step or "none",
        )  # fmt: skip


def expected(context: Context, lane: str) -> tuple[int, list[int], int]:
    """The first group still to consume, the later ones that will not come, and how many have an outcome."""
    if context.ledger is None:
        return 0, [], 0
    following = context.ledger.next_group_id(lane)
    in_flight = [group.group_id for group in context.ledger.in_flight(lane, context.node)]
    waiting = [group for group in in_flight if group < following]  # more may have been issued between the two reads
    first = min(waiting, default=following)
    return first, sorted(set(range(first, following)).difference(waiting)), following - len(waiting)
