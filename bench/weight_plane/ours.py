"""Our weight plane's ends for its bench: over shared memory as a run opens them, and over gloo."""

from typing import ClassVar, Literal

from bench.weight_plane.cases import Seat
from transport.weights import (
    FlatLayout,
    ShardedReader,
    ShardedWriter,
    SharedMemory,
    WeightReader,
    WeightWriter,
)
from transport.weights.layout.layout import Layout


class OursShmTrainer:
    """Our writer over shared memory."""

    def __init__(self, seat: Seat) -> None:
        """Claim the address."""
        self._tensors = seat.tensors
        self._writer = WeightWriter(FlatLayout.of(seat.tensors), _site(seat))

    def publish(self, version: int) -> None:
        """Write and offer it."""
        self._writer.publish(version, self._tensors)

    def poll(self) -> None:
        """Answer the reader."""
        self._writer.poll()

    def settle(self, timeout_s: float) -> None:
        """They may."""

    def close(self) -> None:
        """Leave the address."""
        self._writer.close()


class OursShmReader:
    """Our reader over shared memory."""

    _reader: WeightReader | ShardedReader

    def __init__(self, seat: Seat) -> None:
        """Attach the parameters."""
        self._reader = WeightReader(_site(seat), "reader")
        self._reader.attach(seat.tensors)

    def take(self) -> bool:
        """Adopt what is offered."""
        before = self._reader.version
        return self._reader.poll() is not None and self._reader.adopt() > before

    def wait(self, timeout_s: float) -> bool:
        """Adopt the next."""
        self._reader.wait(self._reader.version + 1, timeout_s)
        return True

    def close(self) -> None:
        """Leave the writer."""
        self._reader.close()


class OursGlooTrainer:
    """Our sharded writer, one rank that holds all."""

    HOLD: ClassVar[Literal["snapshot", "until_settle"]] = "snapshot"

    def __init__(self, seat: Seat) -> None:
        """Open the address."""
        self._tensors = seat.tensors
        self._writer = ShardedWriter(_whole(seat), 0, _address(seat), hold=self.HOLD)

    def publish(self, version: int) -> None:
        """Begin to send it."""
        self._writer.publish(version, self._tensors)

    def poll(self) -> None:
        """Answer the reader."""
        self._writer.poll()

    def settle(self, timeout_s: float) -> None:
        """Until the tensors may change."""
        self._writer.settle(timeout_s)

    def close(self) -> None:
        """Leave the address."""
        self._writer.close()


class OursZeroCopyTrainer(OursGlooTrainer):
    """The same without the copy: the trainer's tensors stand still until the transfer is over."""

    HOLD = "until_settle"


class OursGlooReader(OursShmReader):
    """Our sharded reader, one rank that wants all."""

    def __init__(self, seat: Seat) -> None:
        """Attach the parameters."""
        self._reader = ShardedReader(_whole(seat), 0, _address(seat), "reader")
        self._reader.attach(seat.tensors)


def _whole(seat: Seat) -> Layout:
    shapes = {name: (tuple(tensor.shape), "float32") for name, tensor in seat.tensors.items()}
    return Layout.whole(shapes)


def _address(seat: Seat) -> str:
    return f"ipc://{seat.folder}/weights.sock"


def _site(seat: Seat) -> SharedMemory:
    return SharedMemory(_address(seat), folder=seat.memory)
