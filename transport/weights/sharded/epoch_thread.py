"""The thread that works for one epoch: it connects, then transfers versions, one after the
other.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

from transport.weights.errors import ReaderMismatch
from transport.weights.protocol.messages import BROKEN
from transport.weights.protocol.ranks import Transfer, TransferOutcome


class EpochTransfers(Protocol):
    """One rank's end of an epoch's process group."""

    def prepare(self) -> None:
        """What can be done for the next transfer before it begins; it may be done already. Never
        waits for peers.
        """

    def transfer(self, transfer: Transfer, deadline: float) -> TransferOutcome:
        """Send or receive a version; ends by the deadline."""

    def abort(self) -> None:
        """End what runs, from another thread; never waits long."""

    def close(self) -> None:
        """Release its resources, in its own thread: nothing runs any more."""


class EpochThread(threading.Thread):
    """Consumes: transfers. Produces: outcomes. Waits for: its peers. Unblocked by: them, `abort`,
    `look`.
    """

    def __init__(
        self,
        connect: Callable[[threading.Event], EpochTransfers],
        formed: Callable[[str, str], None],
        transferred: Callable[[Transfer, TransferOutcome], None],
    ) -> None:
        """`connect` is given what `abort` sets, and gives up when it is.

        `formed` is told what is wrong, and which reader's layout does not fit, if it is that.
        """
        super().__init__(name="weights", daemon=True)
        self._connect, self._formed, self._transferred = connect, formed, transferred
        self._jobs: queue.SimpleQueue[Callable[[EpochTransfers], None] | None] = queue.SimpleQueue()
        self._end: EpochTransfers | None = None
        self._over = threading.Event()
        self._aborting: threading.Thread | None = None
        self._deadline = math.inf
        """Of the transfer under way."""
        self._is_late = False
        self.start()

    def transfer(self, transfer: Transfer, deadline: float) -> None:
        """Begin a transfer; its outcome comes later."""
        self._jobs.put(
            lambda end: self._transferred(transfer, self._transfer(end, transfer, deadline))
        )

    def prepare(self) -> None:
        """A buffer is free."""
        self._jobs.put(_prepare)

    def look(self, now: float) -> None:
        """Break off a transfer whose deadline has passed."""
        if now >= self._deadline:
            self._deadline, self._is_late = math.inf, True
            self._break_off()

    def abort(self) -> None:
        """End everything; returns at once, whatever the thread is doing."""
        self._over.set()
        self._jobs.put(None)
        self._break_off()

    def _break_off(self) -> None:
        if end := self._end:
            self._aborting = threading.Thread(target=end.abort, name="weights-abort", daemon=True)
            self._aborting.start()

    def ended(self, timeout_s: float) -> bool:
        """Whether its threads end within that time, after `abort`."""
        deadline = time.monotonic() + timeout_s
        threads = [self, self._aborting] if self._aborting else [self]
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def run(self) -> None:
        """Work until the epoch is over."""
        try:
            end = self._connect(self._over)
        except ReaderMismatch as error:
            return self._formed(str(error), error.reader)
        except Exception as error:
            return self._formed(f"{type(error).__name__}: {error}"[:300], "")
        self._end = end
        if self._over.is_set():
            end.abort()
        else:
            self._formed("", "")
            _prepare(end)
            while (job := self._jobs.get()) is not None:
                job(end)
        end.close()
        return None

    def _transfer(
        self, end: EpochTransfers, transfer: Transfer, deadline: float
    ) -> TransferOutcome:
        self._deadline = deadline
        try:
            outcome = end.transfer(transfer, deadline)
        except Exception as error:
            outcome = TransferOutcome(BROKEN, f"{type(error).__name__}: {error}"[:300])
        finally:
            self._deadline = math.inf
        if outcome.state == BROKEN and self._is_late:
            return TransferOutcome(
                BROKEN, f"it was not over at its deadline: {outcome.fault}"[:300]
            )
        return outcome


def _prepare(end: EpochTransfers) -> None:
    # the group is broken: the next transfer, or its end, will show it
    with contextlib.suppress(RuntimeError):
        end.prepare()
