"""Our data plane as a system of the bench, by ipc or tcp."""

import json
import subprocess
import sys
import tempfile
from typing import Any

import zmq

from bench.data_plane.ends import BATCH_ROWS, PATIENCE_S, TOKENS, WINDOW_BATCHES
from bench.data_plane.rollouts import Arrays, Rollouts, from_batch, make, to_batch
from transport.data import Receiver, Sender
from transport.life import Life


class OurProducer:
    """Sends over our data plane."""

    def __init__(self, address: str) -> None:
        schema = to_batch(make(1, TOKENS), 0).schema
        self._sender = Sender(
            edge="bench",
            sender_id="producer",
            life=Life(),
            schema=schema,
            receivers=[address],
        )
        self._poller = zmq.Poller()
        for socket in self._sender.sockets:
            self._poller.register(socket, zmq.POLLIN)

    def send(self, rollouts: Rollouts, issued_ns: int) -> None:
        """Build, encode and send; wait for credit."""
        batch = to_batch(rollouts, issued_ns)
        while not self._sender.send(batch):
            self._wait()
        self._sender.poll()

    def flush(self) -> None:
        """Return when all is acknowledged."""
        while self._sender.unacknowledged:
            self._wait()

    def _wait(self) -> None:
        if not self._poller.poll(int(PATIENCE_S * 1000)):
            raise TimeoutError(
                f"the producer waited for the consumer; got nothing in {PATIENCE_S} s"
            )
        self._sender.poll()


class Ours:
    """Receives over our data plane, by ipc or tcp."""

    def __init__(self, kind: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        address = f"ipc://{self._folder.name}/bench" if kind == "ours_ipc" else "tcp://127.0.0.1:*"
        self._receiver = Receiver(
            edge="bench",
            schema=to_batch(make(1, TOKENS), 0).schema,
            address=address,
            life=Life(),
            capacity_rows=WINDOW_BATCHES * BATCH_ROWS,
        )
        command = [sys.executable, "-m", "bench.data_plane", "--produce", self._receiver.address]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
        self._held: Any = None

    def order(self, command: list[Any]) -> None:
        """One JSON line to the producer."""
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(command) + "\n")
        self._child.stdin.flush()

    def receive(self) -> tuple[Arrays, int]:
        """The next batch; the one before is acknowledged, for it was read."""
        self.done()
        self._held = self._receiver.receive(PATIENCE_S)
        if self._held is None:
            raise TimeoutError(
                f"the consumer waited for the producer; got nothing in {PATIENCE_S} s"
            )
        return from_batch(self._held.batch)

    def done(self) -> None:
        """Acknowledge the last batch."""
        if self._held is not None:
            self._held.ack()
            self._held = None

    def close(self) -> None:
        """End the producer."""
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait(PATIENCE_S)
        self._receiver.close()
        self._folder.cleanup()
