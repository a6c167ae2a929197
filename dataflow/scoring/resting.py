"""The time limit of a call that asks: its clock stands still while the call rests."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator


class RestingLimit:
    """The limit of one call. A task that outlives the call rests and works without effect."""

    def __init__(
        self,
        limit: asyncio.Timeout,
        timeout_s: float,
        *,
        rests: Callable[[], None] = lambda: None,
        works: Callable[[], None] = lambda: None,
    ) -> None:
        """rests, works: called when the call begins to rest, and when it goes on."""
        self._limit, self._timeout_s, self._rests, self._works = limit, timeout_s, rests, works
        self._resting = 0
        self.is_over = False
        """Whether the call has ended."""

    @contextlib.contextmanager
    def rest(self) -> Iterator[None]:
        """As `Ask.rest`; parts of a call may rest at once."""
        if self.is_over:
            yield
            return
        self._resting += 1
        self._rests()
        self._limit.reschedule(None)
        try:
            yield
        finally:
            self._resting -= 1
            if not self._resting and not self.is_over:
                self._works()
                self._limit.reschedule(asyncio.get_running_loop().time() + self._timeout_s)
