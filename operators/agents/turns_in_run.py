"""What a service in a run draws with: its works go to the run's generator as turns of the rollouts
of its sessions.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from dataflow.errors import RunError
from operators.serving.errors import bad
from operators.serving.work import Work


@dataclass(frozen=True)
class CallerLeft:
    """A caller no longer waits for its answer."""

    work: Work


@dataclass(frozen=True)
class RunEngine:
    """The generator, as a service knows it."""

    context_tokens: int
    version: int = 0
    live: int = 0


class TurnsInRun:
    """Hands calls to the rollouts' thread, and keeps track of open sessions.

    consumes: works and cancellations, on the event loop
    produces: the same, from `taken`, on the thread of the rollouts; who answers tells the work
    waits for: nothing
    unblocked by: -
    """

    failure: str | None = None

    def __init__(self, context_tokens: int) -> None:
        """No session is open."""
        self.engine = RunEngine(context_tokens)
        self.sessions: set[str] = set()
        """Keys."""
        self._is_closed = False
        self._arrived: queue.SimpleQueue[Work | CallerLeft] = queue.SimpleQueue()
        self._woken, self._wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._lock = threading.Lock()

    @property
    def waiting(self) -> int:
        """Calls that no thread has taken yet."""
        return self._arrived.qsize()

    def fileno(self) -> int:
        """Readable when there is something to take."""
        return self._woken

    def start(self) -> None:
        """It draws already."""

    def check_room(self, prompts: int = 1) -> None:
        """The sessions are its bound."""
        if self._is_closed:
            raise RunError(
                "the run takes no more calls; its episodes are shut down; end the program"
            )

    def submit(self, works: Sequence[Work]) -> None:
        """Take a call. Raises ApiError where it asks for more than one completion."""
        self.check_room()
        if len(works) != 1 or len(works[0].seeds) != 1:
            raise bad(
                "n",
                f"a call in a run has one prompt and one completion; found {len(works)} prompts of "
                f"{len(works[0].seeds)}; ask for one after the other",
                "unsupported_parameter",
            )
        self._put(works[0])

    def cancel(self, work: Work, why: str) -> None:
        """The turn is drawn all the same, for a caller that asks again."""
        self._put(CallerLeft(work))

    def taken(self) -> list[Work | CallerLeft]:
        """What has arrived."""
        try:
            os.read(self._woken, 1 << 12)
        except BlockingIOError:
            return []
        arrivals = []
        while not self._arrived.empty():
            arrivals.append(self._arrived.get_nowait())
        return arrivals

    def close(self, timeout_s: float = 0.0) -> None:
        """Take no more."""
        self._is_closed = True

    def let_go(self) -> None:
        """Close the descriptors, when no thread uses them any more."""
        with self._lock:
            os.close(self._woken)
            os.close(self._wakes)
            self._wakes = -1

    def _put(self, arrived: Work | CallerLeft) -> None:
        self._arrived.put(arrived)
        with self._lock:
            if self._wakes >= 0:
                try:
                    os.write(self._wakes, b"!")
                except BlockingIOError:
                    return
