"""Copies checkpoints to the run's address beside the training, for as long as it takes, and says
how that goes.

Its thread reads the files of a committed checkpoint from the disk, and waits for the network. So a
step is held up by nothing but the processor's time of reading and summing, and a checkpoint is good
in the run folder long before: the address may be slow, or away for hours. What is copied stays in
the folder until it is, though a newer one is there; of temporary ones that wait meanwhile only the
newest is copied.
"""

import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dataflow.errors import RunError
from dataflow.folder.checkpoints import MARKER
from dataflow.folder.copies.store import Address, Copies, Store, TakenUp
from dataflow.limits import Limits

AGAIN_S = 1.0
"""Before the first try after one that failed; then twice as long each time."""
MOST_AGAIN_S = 30.0


@dataclass
class CopyQueue:
    """Steps that are to be copied: all of those that stay, the newest of the others."""

    staying: set[int] = field(default_factory=set)
    newest: int = 0
    """A temporary one; 0: none."""

    def add(self, step: int, *, is_temporary: bool) -> None:
        """Of a checkpoint that is committed, or that is to stay from now on."""
        if is_temporary:
            self.newest = max(self.newest, step)
            return
        self.staying.add(step)
        if self.newest <= step:
            self.newest = 0  # it stays, or nobody would go on from it

    @property
    def next(self) -> int:
        """The newest of all, as that is what a host would go on from; 0: none."""
        return max(self.newest, max(self.staying, default=0))

    def take(self) -> tuple[int, bool]:
        """Have the next one, and whether it is temporary."""
        step = self.next
        is_temporary = step == self.newest
        self.staying.discard(step)
        if is_temporary:
            self.newest = 0
        return step, is_temporary

    def put_back(self, step: int, *, is_temporary: bool) -> None:
        """It could not be copied; of a temporary one nothing is wanted once a newer one waits."""
        if not is_temporary or self.next < step:
            self.add(step, is_temporary=is_temporary)


class _Stopped(Exception):
    """In the midst of a copy."""


class CheckpointCopier:
    """The copies of one trainer.

    consumes: steps of committed checkpoints, by `add`
    produces: copies, each with its marker last; warnings
    waits for: the address; after a failure for a while
    unblocked by: the address, `add`, `close`
    """

    def __init__(
        self,
        copies: Copies,
        *,
        trainer: str,
        folder: Callable[[int], Path],
        pack: Callable[[Path], None],
        log: Any,
        node: str,
        open_address: Callable[[str], Address] = Address.of,
        again_s: float = AGAIN_S,
        warning_s: float = Limits().copy_s,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """folder: of the checkpoint of a step. pack: as `BaseLedger.pack`. warning_s: between two
        warnings.
        """
        self.place = copies.place
        """For people."""
        self._copies, self._trainer, self._folder, self._pack = copies, trainer, folder, pack
        self._log, self._node, self._open, self._clock = log, node, open_address, clock
        self._again_s, self._warning_s, self._fails = again_s, warning_s, 0
        self._waiting, self._changed = CopyQueue(), threading.Condition()
        self._stops, self._warned_at = False, float("-inf")
        self._last: int | None = None
        self._thread: threading.Thread | None = None
        self.under_way = 0
        """The step that is being copied."""
        self.copied = 0
        """The newest that is there."""
        self.bytes = 0
        """That went, of whatever became a copy or not."""
        self.moved_at = clock()
        """When the last of them did."""
        self.error = ""
        """Why the last try failed; empty after one that did not."""
        self.ended: RunError | None = None
        """Why nothing is copied any more: another process has the run."""

    def start(self, last: int) -> None:
        """Begin. last: step of the trainer that is committed; copies of later ones go, as those
        were taken back.
        """
        self._last = last
        self._thread = threading.Thread(target=self._run, name="copies of checkpoints", daemon=True)
        self._thread.start()

    def add(self, step: int, *, is_temporary: bool) -> None:
        """Copy a checkpoint that is committed; once more where it is there as another kind."""
        with self._changed:
            self._waiting.add(step, is_temporary=is_temporary)
            self.moved_at = self._clock()
            self._changed.notify_all()

    @property
    def held(self) -> Collection[int]:
        """Steps whose checkpoints are to stay in the folder meanwhile."""
        with self._changed:
            return {self.under_way, self._waiting.newest} - {0}

    @property
    def is_idle(self) -> bool:
        """Whether all is copied that was to be, or nothing is any more."""
        with self._changed:
            return self.ended is not None or not (self.under_way or self._waiting.next)

    def wait(self, seconds: float) -> None:
        """Until something changes, or so long."""
        with self._changed:
            if self.under_way or self._waiting.next:
                self._changed.wait(seconds)

    def close(self, within_s: float) -> None:
        """Copy nothing more; what is under way may be done within so many seconds."""
        deadline = self._clock() + within_s
        while self.under_way and not self.error and self._clock() < deadline:
            self.wait(max(0.0, min(0.2, deadline - self._clock())))
        with self._changed:
            self._stops = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(1.0)

    def _run(self) -> None:
        while True:
            with self._changed:
                self.under_way = 0
                self._changed.notify_all()
                self._changed.wait_for(
                    lambda: self._stops or (self.ended is None and self._waiting.next)
                )
                if self._stops:
                    return
                step, is_temporary = self._waiting.take()
                self.under_way = step
            try:
                self._copy(step)
            except _Stopped:
                return
            except TakenUp as error:
                with self._changed:
                    self.ended, self.error = error, str(error)
            except Exception as error:  # whatever a file system raises; the run goes on
                self._failed(step, is_temporary, error)
            else:
                self._succeeded(step)

    def _copy(self, step: int) -> None:
        address = self._open(self._copies.address)
        self._copies.check(address)
        store = Store(self._copies.at(address), self._trainer)
        if self._last is not None:
            store.take_back(self._last)
            self._last = None
        store.put(
            step, self._folder(step), self._pack, self._moved, lambda: self._copies.check(address)
        )
        self.copied = max(self.copied, step)
        store.clear(self.copied)
        self._clear_older_parts(address)

    def _clear_older_parts(self, address: Address) -> None:
        """Once a run could go on from this part alone, temporary copies of those before it are
        needed no more.
        """
        place = self._copies.at(address)
        if self._copies.part > 1 and all(
            Store(place, trainer).whole() for trainer in self._copies.trainers
        ):
            for part in range(1, self._copies.part):
                store = Store(replace(self._copies, part=part).at(address), self._trainer)
                store.clear(max(store.steps(), default=0) + 1)

    def _moved(self, count: int) -> None:
        if self._stops:
            raise _Stopped
        self.bytes += count
        self.moved_at = self._clock()

    def _succeeded(self, step: int) -> None:
        if self._fails:
            self._log.info(
                "checkpoints are copied again", node=self._node, step=step, to=self._copies.place
            )
        with self._changed:
            self._fails, self.error, self._warned_at = 0, "", float("-inf")

    def _failed(self, step: int, is_temporary: bool, error: Exception) -> None:
        if not (self._folder(step) / MARKER).exists():
            return  # it was removed meanwhile
        pause_s = min(MOST_AGAIN_S, self._again_s * 2**self._fails)
        with self._changed:
            self._waiting.put_back(step, is_temporary=is_temporary)
            self._fails, self.error = min(self._fails + 1, 16), str(error)
        if self._clock() - self._warned_at >= self._warning_s:
            self._warned_at = self._clock()
            self._log.warning(
                "checkpoint not copied, and tried again; training goes on",
                node=self._node,
                step=step,
                error=str(error),
                newest=self.copied or "none",
            )
        with self._changed:
            self._changed.wait_for(lambda: self._stops, pause_s)
