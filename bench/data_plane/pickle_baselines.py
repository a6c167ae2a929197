"""What others would use between two processes, for comparison only: the one place with pickle.

Each carries the flat arrays as they are, which is the fastest it can do; none has credit in bytes,
acknowledgement, checksums, validation or redelivery.
"""

import multiprocessing
import pickle
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import zmq

from bench.data_plane.ends import PATIENCE_S, WINDOW_BATCHES, System, produce
from bench.data_plane.rollouts import Arrays, Rollouts


class _Child:
    """A producer process that is told what to do over a pipe."""

    def __init__(self, context: Any, target: Callable[..., None], *arguments: Any) -> None:
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
        self._process.start()

    def order(self, command: list[Any]) -> None:
        """Tell the producer what to send."""
        self._pipe.send(command)

    def done(self) -> None:
        """The last batch was read."""

    def close(self) -> None:
        """End the producer."""
        self._pipe.send(None)
        self._process.join(PATIENCE_S)


def _commands(pipe: Any) -> Iterator[list[Any]]:
    while (command := pipe.recv()) is not None:
        yield command


class _QueueProducer:
    def __init__(self, queue: Any, wrap: Callable[[Arrays], Any]) -> None:
        self._queue, self._wrap = queue, wrap

    def send(self, rollouts: Rollouts, issued_ns: int) -> None:
        self._queue.put((self._wrap(rollouts.arrays), issued_ns), timeout=PATIENCE_S)

    def flush(self) -> None:
        """The queue's own thread sees to it."""


def _mp_producer(pipe: Any, queue: Any) -> None:
    produce(_QueueProducer(queue, lambda arrays: arrays), _commands(pipe))


class MpQueue(_Child):
    """multiprocessing.Queue of dictionaries of flat NumPy arrays."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._queue = context.Queue(WINDOW_BATCHES)
        super().__init__(context, _mp_producer, self._queue)

    def receive(self) -> tuple[Arrays, int]:
        """The next batch."""
        arrays, issued_ns = self._queue.get(timeout=PATIENCE_S)
        return arrays, issued_ns


def _torch_producer(pipe: Any, queue: Any) -> None:
    import torch

    torch.set_num_threads(1)
    wrap = lambda arrays: {name: torch.from_numpy(array) for name, array in arrays.items()}  # noqa: E731
    produce(_QueueProducer(queue, wrap), _commands(pipe))


class TorchQueue(_Child):
    """torch.multiprocessing.Queue of dictionaries of flat tensors, which travel through shared
    memory.
    """

    def __init__(self) -> None:
        import torch.multiprocessing

        context = torch.multiprocessing.get_context("spawn")
        self._queue = context.Queue(WINDOW_BATCHES)
        super().__init__(context, _torch_producer, self._queue)

    def receive(self) -> tuple[Arrays, int]:
        """The next batch."""
        tensors, issued_ns = self._queue.get(timeout=PATIENCE_S)
        return {name: tensor.numpy() for name, tensor in tensors.items()}, issued_ns


class _PickleProducer:
    def __init__(self, address: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        self._socket.set(zmq.SNDHWM, WINDOW_BATCHES)
        self._socket.set(zmq.SNDTIMEO, int(PATIENCE_S * 1000))
        self._socket.connect(address)

    def send(self, rollouts: Rollouts, issued_ns: int) -> None:
        self._socket.send(pickle.dumps((rollouts.arrays, issued_ns), protocol=5), copy=False)

    def flush(self) -> None:
        """ZeroMQ's own thread sees to it."""


def _pickle_producer(pipe: Any, address: str) -> None:
    produce(_PickleProducer(address), _commands(pipe))


class PickleZmq(_Child):
    """pickle over a ZeroMQ PUSH/PULL pair, by ipc."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        self._socket.set(zmq.RCVHWM, WINDOW_BATCHES)
        self._socket.set(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
        address = f"ipc://{self._folder.name}/pickle"
        self._socket.bind(address)
        super().__init__(multiprocessing.get_context("spawn"), _pickle_producer, address)

    def receive(self) -> tuple[Arrays, int]:
        """The next batch."""
        arrays, issued_ns = pickle.loads(self._socket.recv(copy=False).buffer)
        return arrays, issued_ns

    def close(self) -> None:
        """End the producer."""
        super().close()
        self._socket.close(linger=0)
        self._folder.cleanup()


SYSTEMS: dict[str, Callable[[], System]] = {
    "mp_queue": MpQueue,
    "torch_queue": TorchQueue,
    "pickle_zmq": PickleZmq,
}
