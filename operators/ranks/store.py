"""Where ranks of a worker on several hosts meet: values at rank 0's line; imports torch.

torch's own TCPStore listens to whoever connects; here only holders of the run's keys are heard.
"""

from __future__ import annotations

import datetime
import itertools
import threading
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
import zmq

from dataflow.system.clocks import Countdown
from dataflow.system.security import RunKeys, present
from dataflow.worker.rank_messages import (
    FROM_RANK_ZERO,
    TO_RANK_ZERO,
    Delete,
    Get,
    Set,
    StoredValues,
)


class RankZeroStore(dist.Store):  # type: ignore[name-defined, misc]
    """See torch.distributed.Store; of one rank."""

    def __init__(self, address: str, keys: RunKeys, patience_s: float) -> None:
        """address: where rank 0 listens. patience_s: of every wait, after which it raises
        RuntimeError.
        """
        super().__init__()
        self._patience_s, self._address = patience_s, address
        self._tickets = itertools.count(1)
        self._lock = threading.Lock()
        """gloo and NCCL ask in threads of their own."""
        self._context: zmq.Context[Any] = zmq.Context()
        self._line: zmq.Socket[Any] = self._context.socket(zmq.DEALER)
        self._line.setsockopt(zmq.LINGER, 0)
        self._line.setsockopt(zmq.IPV6, int("[" in address))
        present(self._line, keys.senders)
        self._line.connect(address)

    def set(self, key: str, value: Any) -> None:
        """Keep a value."""
        self._ask(
            Set(
                next(self._tickets), key, value.encode() if isinstance(value, str) else bytes(value)
            )
        )

    def get(self, key: str) -> bytes:
        """The value, once it is there."""
        return self._ask(Get(next(self._tickets), [key], waits=True)).values[key]

    def add(self, key: str, amount: int) -> int:
        """Add to a number; what it then is."""
        return int(self._ask(Set(next(self._tickets), key, b"", adds=int(amount))).values[key])

    def check(self, keys: list[str]) -> bool:
        """Whether all are there."""
        return len(self._ask(Get(next(self._tickets), keys, waits=False)).values) == len(set(keys))

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        """Until all are there."""
        wait_s = self._patience_s if timeout is None else timeout.total_seconds()
        self._ask(Get(next(self._tickets), list(keys), waits=True), wait_s)

    def delete_key(self, key: str) -> bool:
        """Forget a value; whether there was one."""
        return bool(self._ask(Delete(next(self._tickets), key)).values)

    def has_extended_api(self) -> bool:
        """Only the methods needed here."""
        return False

    def close(self) -> None:
        """Hang up; later calls raise an error."""
        with self._lock:
            self._line.close()
            self._context.term()

    def _ask(self, message: Set | Get | Delete, wait_s: float | None = None) -> StoredValues:
        wait_s = self._patience_s if wait_s is None else wait_s
        with self._lock:
            self._line.send(TO_RANK_ZERO.encode(message))
            wait = Countdown(wait_s)
            while not wait.is_over:
                if not self._line.poll(max(1, int(1000 * wait.slice_s))):
                    continue
                reply = FROM_RANK_ZERO.decode(b"".join(self._line.recv_multipart()))
                if isinstance(reply, StoredValues) and reply.ticket == message.ticket:
                    return reply
        keys: Sequence[str] = message.keys if isinstance(message, Get) else [message.key]
        raise RuntimeError(
            f"timed out after {wait_s:.0f} s: rank 0 at {self._address} did not tell of"
            f" {', '.join(keys)}; another rank has not come there, see their logs"
        )
