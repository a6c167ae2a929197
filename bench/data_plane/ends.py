"""What a system of the data-plane bench has: a receiving end, and a producer in a process of its
own.
"""

import time
from collections.abc import Iterable
from typing import Any, Protocol

from bench.data_plane.rollouts import Arrays, Rollouts, make

BATCH_ROWS = 64
TOKENS = 1000
WINDOW_BATCHES = 4
PATIENCE_S = 60.0


class Producer(Protocol):
    """The sending end of a system, in a process of its own."""

    def send(self, rollouts: Rollouts, issued_ns: int) -> None:
        """Build, encode and send; waits when the other side is full."""

    def flush(self) -> None:
        """Return when everything left."""


class System(Protocol):
    """The receiving end of a system, with a producer process behind it."""

    def order(self, command: list[Any]) -> None:
        """Tell the producer what to send."""

    def receive(self) -> tuple[Arrays, int]:
        """The arrays of the next batch, and when it was issued (monotonic ns)."""

    def done(self) -> None:
        """The last batch was read."""

    def close(self) -> None:
        """End the producer."""


def produce(producer: Producer, commands: Iterable[list[Any]]) -> None:
    """Send what is ordered: ["throughput", batches] or ["latency", rollouts, per second]."""
    many, single = make(BATCH_ROWS, TOKENS), make(1, TOKENS)
    for command in commands:
        if command[0] == "throughput":
            for _ in range(command[1]):
                producer.send(many, time.monotonic_ns())
        else:
            begin = time.monotonic_ns() + 10_000_000
            for number in range(command[1]):
                due = begin + number * 1_000_000_000 // command[2]
                time.sleep(max(0.0, (due - time.monotonic_ns()) / 1e9))
                producer.send(single, due)
        producer.flush()
