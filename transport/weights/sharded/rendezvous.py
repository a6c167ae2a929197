"""Where the ranks of an epoch find each other, and what ends their waiting: a file, or the
coordinator's line.
"""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from transport.weights.protocol.messages import GetValue, Put, StoredValue

NAP_S = 0.002
"""Between two looks whether another rank has come."""
AGAIN_S = 1.0
"""Until a value is asked for once more: a message may be lost."""


@dataclass(frozen=True)
class Meeting:
    """Of one rank in one epoch."""

    store: str = ""
    """The file, which is of this machine; empty where ranks meet over the line."""
    host: str = ""
    """The address by which the others find this host; empty: all are on one."""
    line: CoordinatorStore | None = None
    over: threading.Event = field(default_factory=threading.Event)
    """Set by whoever gives the epoch up: nobody waits any more."""

    def rendezvous(
        self, backend: str, size: int, patience_s: float, clock: Callable[[], float]
    ) -> Any:
        """A store for `size` ranks, each of whose waits lasts `patience_s` at most."""
        store: Any = self.line
        if store is None:
            store = dist.FileStore(self.store, size)  # type: ignore[attr-defined]
            store.set_timeout(datetime.timedelta(seconds=patience_s))
            if backend == "nccl":
                return store
        return StoppableStore(store, self.over, patience_s, clock)


class CoordinatorStore:
    """Values that ranks put and get over the line, which only members with the run's keys
    can use.
    """

    def __init__(self, epoch: int, send: Callable[[Put | GetValue], None]) -> None:
        self._epoch, self._send = epoch, send
        self._known: dict[str, bytes] = {}
        self._asked: dict[str, float] = {}

    def told(self, message: StoredValue) -> None:
        """Another rank's value has come."""
        self._known[message.key] = message.value

    def set(self, key: str, value: str | bytes) -> None:
        """Put it."""
        self._known[key] = value.encode() if isinstance(value, str) else bytes(value)
        self._send(Put(epoch=self._epoch, key=key, value=self._known[key]))

    def get(self, key: str) -> bytes:
        """One that is known."""
        return self._known[key]

    def check(self, keys: Iterable[str]) -> bool:
        """Whether all are known; the others are asked for."""
        missing, now = [key for key in keys if key not in self._known], time.monotonic()
        for key in missing:
            if now - self._asked.get(key, float("-inf")) >= AGAIN_S:
                self._asked[key] = now
                self._send(GetValue(epoch=self._epoch, key=key))
        return not missing


class StoppableStore(dist.Store):  # type: ignore[name-defined, misc]
    """A store that ranks meet in, whose waits another thread can end: torch's own last their full
    time.
    """

    def __init__(
        self, store: Any, stop: threading.Event, patience_s: float, clock: Callable[[], float]
    ) -> None:
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
        """Only the methods needed here."""
        return False

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        """Until all are there, however short gloo's own timeout is. RuntimeError when late, or
        `stop` is set.
        """
        until = self._clock() + self._patience_s
        while not self._store.check(list(keys)):
            if self._stop.wait(NAP_S) or self._clock() > until:
                raise RuntimeError(
                    f"other ranks have not come to the rendezvous; found no '{keys[0]}'"
                )
