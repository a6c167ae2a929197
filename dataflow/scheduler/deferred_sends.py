"""Words to workers that a scheduler has not heard yet: its socket reaches nobody before that one has found it."""

from collections.abc import Callable, Iterable


class Unheard:
    """Workers that a new scheduler has taken over, until each has spoken for the first time.

    consumes: what is to be sent to somebody (`reach`), who has spoken (`spoke`)
    produces: calls of what sends it, in order
    waits for: the worker's first word, which comes with its next beat
    unblocked by: it; its next attempt (`forget`), which speaks before it is spoken to
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        """names: of workers that live."""
        self._kept: dict[str, list[Callable[[], object]]] = {name: [] for name in names}

    def reach(self, name: str, send: Callable[[], object]) -> None:
        """Send now, or once this one has spoken."""
        if name in self._kept:
            self._kept[name].append(send)
        else:
            send()

    def spoke(self, name: str) -> None:
        """Something has come from it: send what was kept."""
        for send in self._kept.pop(name, ()):
            send()

    def forget(self, name: str) -> None:
        """It has ended: nobody needs what was kept for it."""
        self._kept.pop(name, None)
