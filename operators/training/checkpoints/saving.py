"""When and how a trainer saves checkpoints: begun between two steps, written in the background,
recorded in the ledger.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dataflow.errors import RunError, Unusable
from dataflow.folder import retention
from dataflow.folder.checkpoints import TEMPORARY, Checkpoints
from dataflow.folder.copies.copier import CheckpointCopier
from dataflow.folder.ledger import BaseLedger, LedgerError
from dataflow.runtime import Context
from dataflow.system.files import RunFolderError, disk
from operators.training.checkpoints import checkpoint
from operators.training.checkpoints.checkpoint import Background
from operators.training.learner.learner import Learner

DEAR = 20.0
"""Seconds of steps before each second that a checkpoint takes: they cost a twentieth of the time at
most."""
CLOSE_S = 5.0
"""For a checkpoint that is being written when the run ends otherwise than it should."""
COPIES_TURN_S = 0.05
SPARE_BYTES = 1 << 30
"""That a temporary checkpoint leaves free on its disk, for what must be written."""
WAL_TOLD_BYTES = 1 << 30
"""Of the ledger's log, before the user is told."""


@dataclass
class Debt:
    """The work that is lost if the trainer dies now: seconds of its steps, without waiting for
    rows. within_s: the most that may be lost. A slow checkpoint is saved less often, see `DEAR`.

    within_s: how long that may take. A checkpoint that takes long is left less often, see `DEAR`.
    """

    within_s: float
    seconds: float = 0.0
    """That the steps since a checkpoint was last begun have taken."""
    cost_s: float = 0.0
    """From the first copy to the marker of the last checkpoint, written or not; 0: none was
    tried."""

    @property
    def is_due(self) -> bool:
        """Whether it is time for a checkpoint."""
        return self.seconds > max(self.within_s, DEAR * self.cost_s)


@dataclass(frozen=True)
class _Writing:
    """A checkpoint being written."""

    step: int
    place: Path
    is_temporary: bool


@dataclass
class CheckpointSaver:
    """Saves a trainer's checkpoints in the run folder, and has them copied; without one it saves
    nothing.

    consumes: steps that were committed, by `made` and `keep`
    produces: checkpoints that stay, temporary ones to recover from, their lines in the ledger
    waits for: the checkpoint before, where the next is due; `finish` for all
    unblocked by: the disk
    """

    context: Context
    learner: Learner
    tokenizer: Any
    kept_step: int
    """Step of the newest good checkpoint; 0 before the first."""
    debt: Debt
    """What it is that makes a temporary checkpoint due."""
    every: int | None = None
    """Steps between those that stay."""
    most: int | None = None
    """How many of those do; None: all."""
    dtype: str | None = None
    """As `checkpoint.rounded_to` has it."""
    copier: CheckpointCopier | None = None
    """Takes committed checkpoints to the run's address, where it has one."""
    requested: int = 0
    """The number of the last checkpoint that somebody has asked for."""
    answered: int = 0
    """That of the last which was written, or that could not be."""
    _taken: int = 0
    """That of the last which was begun."""
    asked_step: int = 0
    """Of which step that is."""
    _finished_at: float | None = None
    """When the last checkpoint was written."""
    _background: Background = field(
        default_factory=lambda: Background("the checkpoint being written")
    )
    _writing: _Writing | None = None

    def made(self, seconds: float) -> None:
        """Account for a committed step, new or made again, that took so many seconds of work."""
        self.debt.seconds += seconds

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint of this step is wanted: one that stays, or a temporary one that
        nothing waits for.
        """
        return self._stays(step) or (self._writing is None and self.debt.is_due)

    def keep(self, step: int) -> None:
        """Begin the checkpoint of a committed step, unless it has one; wait for the previous one
        first.

        Here its tensors are copied; they are written in the background. Where the disk refuses, or
        has too little room for a temporary one, a warning says so, the one before stays the newest,
        and the next is tried when it is due.
        """
        try:
            self._begin(step, is_temporary=not self._stays(step))
        except (RunFolderError, LedgerError) as error:
            self._warn(step, error)

    def keep_asked(self, step: int) -> None:
        """Between two steps: begin the checkpoint of the last one, where somebody has asked for
        one; it stays.
        """
        if self._taken == self.requested or not step:
            return
        self._taken, self.asked_step = self.requested, step
        try:
            if self._writing is None or self._writing.step != step:
                self._begin(step, is_temporary=False)
        except (RunFolderError, LedgerError) as error:
            self._warn(step, error)
        self._answer()

    def _answer(self) -> None:
        """Say that what was asked for is done, once nothing is being written any more."""
        if self._taken == self.answered or self._writing is not None:
            return
        if self.kept_step == self.asked_step:
            self._stay(self.asked_step)
        self.answered = self._taken

    def finish(self, step: int) -> None:
        """Keep the last step and wait until all is written. Raises what went wrong with it."""
        if self._writing is None or self._writing.step != step:
            self._begin(step, is_temporary=False)
        self._written(self.context.run.limits.checkpoint_s)
        self._stay(step)
        self._finished_at = time.monotonic()

    def _stay(self, step: int) -> None:
        """Let a checkpoint stay that was written to recover from."""
        if self.context.folder is not None and step:
            checkpoints = self.context.folder.checkpoints_of(self.context.graph.own_folder)
            if checkpoints.keep(step):
                self._record(step, checkpoints.folder(step))
                if self.copier is not None:
                    self.copier.add(step, is_temporary=False)

    def note(self) -> None:
        """Tell the ledger of a checkpoint that is written by now, or warn of one that could not be.
        Errors: Unusable once another process has taken the run up from its address.
        """
        if self._background.is_idle:
            self._settle(0.0)
        if self.copier is not None and self.copier.ended is not None:
            raise Unusable(
                f"'{self.context.node}' copies no checkpoint any more: {self.copier.ended}"
            )

    def begin_copies(self, last: int) -> None:
        """Have copies made from now on, first of the newest checkpoint. last: the trainer's last
        committed step.
        """
        context = self.context
        if context.copies is None or context.folder is None or context.ledger is None:
            return
        checkpoints = context.folder.checkpoints_of(context.graph.own_folder)
        self.copier = CheckpointCopier(
            context.copies,
            trainer=context.graph.own_folder or "",
            folder=checkpoints.folder,
            pack=context.ledger.pack,
            log=context.log,
            node=context.node,
            warning_s=context.run.limits.copy_s,
        )
        self.copier.start(last)
        if self.kept_step:
            self.copier.add(self.kept_step, is_temporary=checkpoints.is_temporary(self.kept_step))

    def wait_for_copies(self) -> bool:
        """At the end, wait a moment for copies under way; False: it waits no longer. Where the
        address takes nothing for `Limits.copy_s`, a warning names the missing copy.
        """
        if self.copier is None or self._finished_at is None or self.copier.is_idle:
            return False
        since = max(self._finished_at, self.copier.moved_at)
        if time.monotonic() - since < self.context.run.limits.copy_s:
            self.copier.wait(COPIES_TURN_S)
            return True
        self._finished_at = None
        self.context.log.warning(
            "the last checkpoint is in the run folder, and was not copied",
            node=self.context.node,
            step=self.kept_step,
            to=self.copier.place,
            error=self.copier.error,
            newest=self.copier.copied or "none",
        )
        return False

    @property
    def is_copied(self) -> bool:
        """Whether the last checkpoint is where it should be, as far as that is waited for."""
        return self.copier is None or self._finished_at is None or self.copier.is_idle

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is being written, from copies in main memory."""
        return not self._background.is_idle

    def close(self) -> None:
        """Leave a checkpoint that is being written a moment to be done; the run is over already, or
        has failed.
        """
        try:
            self._written(CLOSE_S)
        except Exception as error:  # the run has an error of its own, or was told this one before
            self.context.log.warning(
                "checkpoint not written", node=self.context.node, error=str(error)
            )
        if self.copier is not None:
            self.copier.close(CLOSE_S)

    def _stays(self, step: int) -> bool:
        """Whether the checkpoint of a step is one that was asked for, or that of the last step."""
        return step == self.context.run.steps or bool(self.every and step % self.every == 0)

    def _begin(self, step: int, *, is_temporary: bool) -> None:
        context, name = self.context, self.context.graph.own_folder
        if context.folder is None or step in (0, self.kept_step):
            return
        self._settle(self.context.run.limits.checkpoint_s)
        self.debt.seconds, began = 0.0, time.monotonic()
        if is_temporary:
            _check_room(context.folder.path, checkpoint.nbytes(self.learner, self.dtype))
        checkpoints = context.folder.checkpoints_of(name)
        trained = range(self.kept_step + 1, step + 1)
        facts = {"step": step, "version": step, "node": context.node}
        mark = {TEMPORARY: True} if is_temporary else {}
        with context.span("checkpoint"), contextlib.ExitStack() as opened:
            folder = opened.enter_context(
                checkpoints.writing(step, node=context.node, version=step, **mark)
            )
            checkpoint.prepare(folder)
            staged = self.learner.everywhere(
                checkpoint.stage,
                folder=folder,
                deadline_s=context.run.limits.checkpoint_s,
                dtype=self.dtype,
            )[0]
            committed = opened.pop_all()

        def write() -> None:
            """The rollouts are on the disk before the ledger is, both before the checkpoint is
            marked.
            """
            assert context.folder is not None
            try:
                with committed:
                    context.folder.rollouts_of(name).flush(trained)
                    if context.ledger is not None:
                        context.ledger.flush()
                        self._look_at(context.ledger)
                    staged.write(folder, self.tokenizer, facts)
            finally:
                self.debt.cost_s = time.monotonic() - began
            if self.copier is not None:
                self.copier.add(step, is_temporary=is_temporary)
            self._clear(checkpoints, step)

        self._writing = _Writing(step, checkpoints.folder(step), is_temporary)
        self._background.start(write, self.context.run.limits.checkpoint_s)

    def _settle(self, deadline_s: float) -> None:
        """Wait for the checkpoint being written, and warn of one that the disk refused."""
        step = self._writing.step if self._writing is not None else 0
        try:
            self._written(deadline_s)
        except (RunFolderError, LedgerError) as error:
            self._warn(step, error)
        self._answer()

    def _written(self, deadline_s: float) -> None:
        """Wait for the checkpoint being written, and record it in the ledger. Raises the writer's
        error.
        """
        if self._writing is None:
            return
        written, self._writing = self._writing, None
        self._background.wait(deadline_s)
        self.kept_step = written.step
        if not written.is_temporary:
            self._record(written.step, written.place)
        self._forget_checkpoints()
        self._forget_rollouts()

    def _forget_checkpoints(self) -> None:
        """Remove the oldest checkpoints beyond the number to keep."""
        context = self.context
        if (
            self.most is None
            or self.every is None
            or context.folder is None
            or context.ledger is None
        ):
            return
        checkpoints = context.folder.checkpoints_of(context.graph.own_folder)
        old = retention.surplus(
            staying=checkpoints.staying(),
            every=self.every,
            most=self.most,
            keep_steps=context.run.keep_steps,
            last=context.ledger.last_step(context.node),
        )
        try:
            for step in old:
                context.ledger.record_checkpoint(context.node, step, None)
                checkpoints.let_go(step)
        except (RunFolderError, LedgerError) as error:
            context.log.warning("older checkpoint not removed", node=context.node, error=str(error))
        if old:
            self._clear(checkpoints, max(old) + 1)

    def _forget_rollouts(self) -> None:
        """Remove rollouts that no checkpoint needs, now that a newer one is committed."""
        context = self.context
        if context.run.keep_steps is None or context.folder is None or context.ledger is None:
            return
        upto = retention.removable(
            last=context.ledger.last_step(context.node),
            checkpoint=self.kept_step,
            keep_steps=context.run.keep_steps,
            staying=(
                context.folder.checkpoints_of(context.graph.own_folder).staying()
                if self.every
                else None
            ),
        )
        retention.remove(
            context.folder,
            context.ledger,
            context.node,
            upto,
            kind="step",
            log=context.log,
            own=context.graph.own_folder,
        )

    def _record(self, step: int, place: Path) -> None:
        if self.context.ledger is not None:
            self.context.ledger.record_checkpoint(self.context.node, step, str(place))

    def _look_at(self, ledger: BaseLedger) -> None:
        """Tell of a program that reads the ledger and does not come to an end."""
        if (wal_bytes := ledger.wal_bytes) > WAL_TOLD_BYTES:
            self.context.log.warning(
                "some program reads ledger.db in a transaction that does not end: the log of the"
                " database grows until it does",
                node=self.context.node,
                path=f"{ledger.path}-wal",
                mebibytes=wal_bytes >> 20,
            )

    def _clear(self, checkpoints: Checkpoints, step: int) -> None:
        """Remove the temporary checkpoints before one that is committed."""
        try:
            checkpoints.clear(step, but=() if self.copier is None else self.copier.held)
        except RunFolderError as error:
            self.context.log.warning(
                "temporary checkpoint not removed", node=self.context.node, error=str(error)
            )

    def _warn(self, step: int, error: RunError) -> None:
        self.context.log.warning(
            "checkpoint not written; training goes on",
            node=self.context.node,
            step=step,
            error=str(error),
            newest=self.kept_step or "none",
        )


def _check_room(place: Path, needed: int) -> None:
    """RunFolderError where a temporary checkpoint would leave too little room for rollouts and
    ledger.
    """
    with disk("looking at", place):
        free = shutil.disk_usage(place).free
    if free < needed + SPARE_BYTES:
        raise RunFolderError(
            f"a checkpoint to recover from takes about {needed / 2**20:,.0f} MiB, and"
            f" {free / 2**20:,.0f} MiB are free on the disk of '{place}': none is begun unless"
            f" {SPARE_BYTES / 2**20:,.0f} MiB stay for rollouts and ledger; make room there, or set"
            " recover_within_s=inf"
        )
