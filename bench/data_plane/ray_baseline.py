"""Ray, actor to actor, for comparison only; imported only where Ray is installed. It listens on
127.0.0.1.
"""

import os
import queue
import secrets
import time
from typing import Any

# Read when Ray is imported: listen on loopback (the variable is named after the systems where that
# is the default), and admit who knows this token.
os.environ |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
import ray

from bench.data_plane.ends import PATIENCE_S, WINDOW_BATCHES, produce
from bench.data_plane.rollouts import Arrays, Rollouts, read


@ray.remote
class _Consumer:
    def take(self, arrays: Arrays, issued_ns: int) -> int:
        read(arrays)
        return time.monotonic_ns() - issued_ns


@ray.remote
class _Producer:
    def __init__(self, consumer: Any) -> None:
        self._consumer = consumer
        self._pending: list[Any] = []
        self._taken_ns: list[int] = []

    def send(self, rollouts: Rollouts, issued_ns: int) -> None:
        if len(self._pending) >= WINDOW_BATCHES:
            self._taken_ns.append(ray.get(self._pending.pop(0), timeout=PATIENCE_S))
        self._pending.append(self._consumer.take.remote(rollouts.arrays, issued_ns))

    def flush(self) -> None:
        self._taken_ns += ray.get(self._pending, timeout=PATIENCE_S)
        self._pending = []

    def run(self, command: list[Any]) -> list[int]:
        self._taken_ns = []
        produce(self, [command])
        return self._taken_ns


class RayActors:
    """A producing and a consuming actor; this process only hears when each batch had been read."""

    def __init__(self) -> None:
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
        self._producer = _Producer.remote(_Consumer.remote())  # type: ignore[attr-defined]
        self._taken_ns: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._running: Any = None

    def order(self, command: list[Any]) -> None:
        """Start a round."""
        self._running = self._producer.run.remote(command)

    def receive(self) -> tuple[Arrays, int]:
        """Wait for the round once; then one entry per batch, back-dated by the time that it
        took.
        """
        if self._running is not None:
            for taken_ns in ray.get(self._running, timeout=PATIENCE_S):
                self._taken_ns.put(taken_ns)
            self._running = None
        return {}, time.monotonic_ns() - self._taken_ns.get(timeout=PATIENCE_S)

    def done(self) -> None:
        """The round is over when `receive` returns."""

    def close(self) -> None:
        """Stop Ray."""
        ray.shutdown()
