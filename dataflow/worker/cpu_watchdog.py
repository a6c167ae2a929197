"""How long a worker has computed nothing in one slice of work: that tells one that hangs from one
that is long.

Its heartbeat cannot: a thread of its own sends it, so that a step may take minutes.
"""

import os
import threading
import time
from collections.abc import Callable

from dataflow.system import processes

LOOK_S = 2.0
"""Seconds between two looks at the processor time, and before the first."""
_IDLE_SHARE = 0.001
"""Share of a core: a lock that never comes uses none, and one call over a network in each look uses
more."""


def processor_time() -> float:
    """Seconds that the main thread has computed, and all processes that this one has started; where
    the system does not tell of a thread (macOS), the time of day: nobody looks idle there.
    """
    if not hasattr(time, "pthread_getcpuclockid"):
        return time.monotonic()
    thread = threading.main_thread().ident
    assert thread is not None, "it runs"
    below = sum(processes.cpu_s(pid) or 0.0 for pid in processes.below(os.getpid()))
    return time.clock_gettime(time.pthread_getcpuclockid(thread)) + below


class CpuWatchdog:
    """Looks at the processor time, now and then, while a slice of work lasts.

    consumes: how long the slice has lasted
    produces: how long nobody has computed in it
    waits for: nothing
    unblocked by: -
    """

    def __init__(self, used_s: Callable[[], float] = processor_time) -> None:
        """used_s: the processor time so far that counts as work."""
        self._used_s = used_s
        self._since: float | None = None
        self._looked = self._before = 0.0

    def look(self, slice_s: float, now: float) -> float:
        """Seconds without work, up to `now`, of the slice that has lasted `slice_s`; 0.0 while it
        is short.
        """
        if slice_s < LOOK_S:
            self._since = None
            return 0.0
        if self._since is None or now - self._looked >= LOOK_S:
            used_s = self._used_s()
            if self._since is None or abs(used_s - self._before) > _IDLE_SHARE * (
                now - self._looked
            ):
                self._since = now
            self._before, self._looked = used_s, now
        return now - self._since
