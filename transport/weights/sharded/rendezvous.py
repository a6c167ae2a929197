"""Where the ranks of an epoch meet over gloo: a file, whose readers another thread can send home."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

NAP_S = 0.002
"""Between two looks whether another rank has come."""


class Rendezvous(dist.Store):  # type: ignore[name-defined, misc]
    """A store that gloo's ranks meet in, whose waits another thread can end: torch's own last their full time."""

    def __init__(self, store: Any, stop: threading.Event, patience_s: float, clock: Callable[[], float]) -> None:
        """`patience_s`: of every wait."""
        super().__init__()
        self._store, self._stop, self._patience_s, self._clock = store, stop, patience_s, clock

    def set(self, key: str, value: Any) -> None:
        """See torch.distributed.Store."""
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """The value, once it is there."""
        self.wait([key])
        return bytes(self._store.get(key))

    def add(self, key: str, amount: int) -> int:
        """See torch.distributed.Store."""
        return int(self._store.add(key, amount))

    def check(self, keys: list[str]) -> bool:
        """Whether all are there."""
        return bool(self._store.check(keys))

    def has_extended_api(self) -> bool:
        """It has what is needed here, and no more."""
        return False

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        """Until all are there, however short gloo's own timeout is. RuntimeError when late, or `stop` is set."""
        until = self._clock() + self._patience_s
        while not self._store.check(list(keys)):
            if self._stop.wait(NAP_S) or self._clock() > until:
                raise RuntimeError(f"other ranks have not come to the rendezvous; found no '{keys[0]}'")
