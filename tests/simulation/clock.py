"""Virtual time: events in a heap, run one after the other; time passes only between them."""

import heapq
from collections.abc import Callable


class Clock:
    """What happens when; the same calls give the same order, always."""

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds since the beginning."""
        self.events = 0
        """Events that have happened."""
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._made = 0

    def __call__(self) -> float:
        """The time, as `time.monotonic` would tell it."""
        return self.now

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Let something happen so much later."""
        self._made += 1
        heapq.heappush(self._heap, (self.now + delay_s, self._made, action))

    def step(self) -> bool:
        """Let the next event happen; False when none is left."""
        if not self._heap:
            return False
        self.now, _, action = heapq.heappop(self._heap)
        self.events += 1
        action()
        return True
