"""Makes steps again that the ledger knows and the weights do not have: how a trainer comes back
after a crash.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import pyarrow as pa

from dataflow.errors import OperatorError, RecordError
from dataflow.folder.ledger import MadeStep
from dataflow.folder.rollback import take_out_abandoned
from dataflow.records import GROUP_ID
from dataflow.runtime import Context
from dataflow.system.files import RunFolderError
from operators.training.checkpoints.saving import CheckpointSaver
from operators.training.steps import StepMaker

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
        if context.folder is None or context.ledger is None or context.attempt:
            return
        for source in context.bounds:
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
        if self._making.parts:
            self._making.micro()
        elif self._making.rows is not None:
            self._end(self._left.popleft())
        elif self._left:
            self._begin(self._left[0])
        else:
            return False
        return True

    def _read(self, step: MadeStep) -> list[pa.RecordBatch] | None:
        """What a step trained; None where that is lost, and the ledger was taken back."""
        context = self._context
        assert context.folder is not None, "a run with a ledger has a folder"
        try:
            table = context.folder.rollouts_of(context.own_folder).read(step.step)
            check_groups(step, table)
        except RunFolderError as error:
            self._take_back(step.step - 1, str(error))
            return None
        return list(table.to_batches())

    def _begin(self, step: MadeStep) -> None:
        groups = self._read(step)
        if groups is None:
            return
        try:
            self._making.begin(groups)
        except RecordError as error:
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
        if context.attempt:
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
