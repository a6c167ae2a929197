"""The weight plane within one process: segments are tensors, messages are queues, gates are
counters.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import torch
import zmq

from transport.weights.errors import AddressTaken
from transport.weights.protocol.messages import ReaderMessage, WriterMessage


class Hub:
    """Where one writer and its readers meet, all in one thread: pass it to both as their
    address.
    """

    socket: zmq.Socket[bytes] | None = None

    def __init__(self) -> None:
        self.segments: dict[str, _Segment] = {}
        """The segments that can be opened, by key."""
        self.inbox: deque[tuple[bytes, ReaderMessage]] = deque()
        """Messages on their way to the writer."""
        self.outboxes: dict[bytes, deque[WriterMessage]] = {}
        """Messages on their way to each reader."""
        self.poll: Callable[[], None] | None = None
        """The writer's poll, while there is a writer."""
        self.made = 0
        """Segments and readers made so far; names the next one."""

    def writer(self, poll: Callable[[], None]) -> Hub:
        """Claim the hub for one writer, whose end it is."""
        if self.poll is not None:
            raise AddressTaken(
                "this hub has a writer already; found a second one; close the first, or make"
                " another Hub"
            )
        self.poll = poll
        return self

    def reader(self) -> _ReaderPort:
        """A reader's end."""
        self.made += 1
        return _ReaderPort(self, self.made.to_bytes(8, "little"))

    def segment(self, nbytes: int) -> _Segment:
        """See `WriterPort`, as for all of these."""
        self.made += 1
        key = str(self.made)
        self.segments[key] = segment = _Segment(self, key, nbytes)
        return segment

    def receive(self) -> list[tuple[bytes, ReaderMessage]]:
        arrived = list(self.inbox)
        self.inbox.clear()
        return arrived

    def send(self, peer: bytes, message: WriterMessage) -> bool:
        outbox = self.outboxes.get(peer)
        if outbox is not None:
            outbox.append(message)
        return outbox is not None

    def wait(self, timeout_s: float) -> None:
        time.sleep(min(timeout_s, 0.001))

    def close(self) -> None:
        self.poll = None
        self.inbox.clear()


class _Segment:
    """A buffer and the number of readers inside; the same object serves both sides."""

    def __init__(self, hub: Hub, key: str, nbytes: int) -> None:
        self.key = key
        self.buffer = torch.zeros(nbytes, dtype=torch.uint8)
        self.progress: torch.Tensor | None = None
        self._hub, self._inside, self._version = hub, 0, -1

    def seal(self) -> bool:
        if self._inside == 0:
            self._version = -1
        return self._inside == 0

    def unseal(self, version: int) -> None:
        self._version = version

    def retire(self) -> None:
        self._hub.segments.pop(self.key, None)

    def enter(self, version: int) -> bool:
        if self._version != version:
            return False
        self._inside += 1
        return True

    def leave(self) -> None:
        self._inside -= 1

    def close(self) -> None:
        """Nothing to give back: the tensor goes with its last reference."""


class _ReaderPort:
    socket: zmq.Socket[bytes] | None = None

    def __init__(self, hub: Hub, peer: bytes) -> None:
        self._hub, self._peer = hub, peer
        hub.outboxes[peer] = deque()

    def segment(self, key: str, nbytes: int) -> _Segment | None:
        segment = self._hub.segments.get(key)
        return segment if segment is not None and segment.buffer.numel() == nbytes else None

    def receive(self) -> list[WriterMessage]:
        outbox = self._hub.outboxes[self._peer]
        arrived = list(outbox)
        outbox.clear()
        return arrived

    def send(self, message: ReaderMessage) -> None:
        if self._hub.poll is not None:
            self._hub.inbox.append((self._peer, message))

    def wait(self, timeout_s: float) -> None:
        if self._hub.poll is not None:
            self._hub.poll()
        if not self._hub.outboxes[self._peer]:
            time.sleep(min(timeout_s, 0.001))

    def close(self) -> None:
        self._hub.outboxes.pop(self._peer, None)
