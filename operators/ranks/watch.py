"""Ends a collective in which a rank has waited for too long, by a clock that stands still while the
run is stopped.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from dataflow.system.clocks import LOOK_S, AwakeClock
from dataflow.worker.cpu_watchdog import CpuWatchdog


class ExchangeWatch:
    """The deadline of exchanges in which one thread takes part: gloo's and NCCL's own run on while
    nobody runs.

    consumes: when its thread enters an exchange and leaves it; the clock
    produces: the end of what the thread waits for, here and at the other ranks, as a TimeoutError
    waits for: its next look, several a second
    unblocked by: the time
    """

    def __init__(
        self,
        limit_s: float,
        end: Callable[[], None],
        *,
        computes: bool = True,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """limit_s: of waiting without a break. end: breaks off what is waited for; called in
        another thread. computes: whether processor time of the thread says that it does not wait;
        False where a GPU does the work.
        """
        self._limit_s, self._end, self._computes, self._clock = (
            limit_s,
            end,
            computes,
            clock or AwakeClock(),
        )
        self._entered: tuple[float, CpuWatchdog] | None = None
        self._is_over = False
        self._closed = threading.Event()
        threading.Thread(target=self._serve, name="ranks-watch", daemon=True).start()

    @contextlib.contextmanager
    def within(self) -> Iterator[None]:
        """Raises TimeoutError where the calling thread has waited for too long. Not for two threads
        at once.
        """
        self._enter()
        try:
            yield
        except RuntimeError as error:
            if self._is_over:
                raise TimeoutError(f"timed out after {self._limit_s:g} s") from error
            raise
        finally:
            self._entered = None

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
        """Within an exchange: what is waited for now has a deadline of its own."""
        self._entered = None
        try:
            yield
        finally:
            self._enter()

    def close(self) -> None:
        """End the thread; may be called again."""
        self._closed.set()

    def _enter(self) -> None:
        self._entered = (
            self._clock(),
            CpuWatchdog(_used_by(threading.get_ident()) if self._computes else float),
        )

    def _serve(self) -> None:
        while not self._closed.wait(LOOK_S) and not self._is_over:
            now, entered = self._clock(), self._entered
            if entered is not None and entered[1].look(now - entered[0], now) > self._limit_s:
                self._is_over = True
                self._end()


def _used_by(thread: int) -> Callable[[], float]:
    """Processor time of a thread; where the system does not tell (macOS), none: all time in an
    exchange counts.
    """
    if not hasattr(time, "pthread_getcpuclockid"):
        return float
    clock = time.pthread_getcpuclockid(thread)
    return lambda: time.clock_gettime(clock)
