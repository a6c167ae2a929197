"""The systems of the weight-plane bench, each with a trainer's and a reader's end.

ours_shm        WeightWriter and WeightReader over shared memory, as a run opens them
ours_gloo       ShardedWriter and ShardedReader over gloo, one rank each; the trainer goes on once
                it has copied
ours_gloo_zero_copy  the same without that copy: its tensors may not change until they have left
                (hold="until_settle")
gloo            torch.distributed.broadcast of a state dict, tensor by tensor
gloo_p2p        torch.distributed send and recv of the same bytes in one tensor: the floor of
                whatever goes over gloo
torch_shared    tensors that both processes map (share_memory_): the trainer copies in, the reader
                copies out
safetensors     save_file into shared memory, load_file, and a copy into the parameters
torch_save      the same with torch.save and torch.load
ray             ray.put of a state dict, ray.get, and a copy into the parameters
                (bench.weight_plane.ray_system)
ray_numpy       the same with numpy arrays, which Ray does not copy into a pickle

memcpy, which bench.weight_plane.pair measures by itself, is the floor of whatever stays in one
machine. Ours prove every version by checksum, keep what the reader computes with until the next is
whole, and need no word of the bench; the others give what they give, and tell the reader through a
pipe that a version is there.
"""

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from importlib.util import find_spec

import safetensors.torch
import torch
import torch.distributed as dist

from bench.weight_plane.cases import PATIENCE_S, Seat
from bench.weight_plane.ends import Announcing, ReaderEnd, Told, TrainerEnd
from bench.weight_plane.ours import (
    OursGlooReader,
    OursGlooTrainer,
    OursShmReader,
    OursShmTrainer,
    OursZeroCopyTrainer,
)
from bench.weight_plane.ray_system import RayNumpyReader, RayNumpyTrainer, RayReader, RayTrainer

SYSTEMS = (
    "memcpy",
    "gloo_p2p",
    "ours_shm",
    "ours_gloo",
    "ours_gloo_zero_copy",
    "gloo",
    "torch_shared",
    "safetensors",
    "torch_save",
    "ray",
    "ray_numpy",
)


def missing(system: str) -> str | None:
    """Why a system cannot run here, if so."""
    if system.startswith("ray") and find_spec("ray") is None:
        return "skipped: install it with pip install 'dataflow-rl[bench]'"
    return None


def open_trainer(system: str, seat: Seat) -> TrainerEnd:
    """In the trainer's process."""
    return ENDS[system][0](seat)


def open_reader(system: str, seat: Seat) -> ReaderEnd:
    """In the reader's process."""
    return ENDS[system][1](seat)


class GlooBroadcastTrainer(Announcing):
    """Tells the reader, and broadcasts tensor by tensor; the reader comes when its step is done."""

    def __init__(self, seat: Seat) -> None:
        """Meet the reader."""
        super().__init__(seat)
        _meet(seat, rank=0)

    def publish(self, version: int) -> None:
        """Tell first: both must be in the collective at once."""
        self.seat.words.send(version)
        self.hand_over()

    def hand_over(self) -> None:
        """Broadcast."""
        for tensor in self.seat.tensors.values():
            dist.broadcast(tensor, src=0)

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()


class GlooBroadcastReader(Told):
    """Enters the broadcasts that it was told of, straight into its parameters."""

    def __init__(self, seat: Seat) -> None:
        """Meet the trainer."""
        super().__init__(seat)
        _meet(seat, rank=1)

    def load(self) -> None:
        """Take part."""
        for parameter in self.seat.tensors.values():
            dist.broadcast(parameter.data, src=0)

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()


class GlooSendTrainer(GlooBroadcastTrainer):
    """Sends all in one tensor, which its weights are views of."""

    def __init__(self, seat: Seat) -> None:
        """Move the weights there."""
        super().__init__(seat)
        self._flat = _flattened(seat)

    def hand_over(self) -> None:
        """Send."""
        dist.send(self._flat, dst=1)


class GlooSendReader(GlooBroadcastReader):
    """Receives into the one tensor that its parameters are views of."""

    def __init__(self, seat: Seat) -> None:
        """Move the parameters there."""
        super().__init__(seat)
        self._flat = _flattened(seat)

    def load(self) -> None:
        """Receive."""
        dist.recv(self._flat, src=0)


def _meet(seat: Seat, rank: int) -> None:
    """Make the group of two, over loopback."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{seat.folder}/gloo",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=PATIENCE_S),
    )


def _flattened(seat: Seat) -> torch.Tensor:
    flat = torch.cat([tensor.detach().view(-1) for tensor in seat.tensors.values()])
    for tensor, part in zip(
        seat.tensors.values(), flat.view(seat.case.tensors, *seat.case.shape), strict=True
    ):
        tensor.data = part
    return flat


class SharedTensorsTrainer(Announcing):
    """Copies into tensors that the reader maps, once it has copied the last version out of them."""

    def __init__(self, seat: Seat) -> None:
        """Make them, and send them over once, as file descriptors."""
        super().__init__(seat)
        self._shared = {
            name: torch.zeros_like(tensor).share_memory_() for name, tensor in seat.tensors.items()
        }
        seat.words.send(self._shared)

    def hand_over(self) -> None:
        """Copy in."""
        for name, tensor in self.seat.tensors.items():
            self._shared[name].copy_(tensor)


class SharedTensorsReader(Told):
    """Copies out of the trainer's shared tensors."""

    def __init__(self, seat: Seat) -> None:
        """Map them."""
        super().__init__(seat)
        if not seat.words.poll(PATIENCE_S):
            raise TimeoutError(f"the trainer has shared no tensors after {PATIENCE_S:g} s")
        self._shared = seat.words.recv()

    def load(self) -> None:
        """Copy out."""
        self.put(self._shared)


class SafetensorsTrainer(Announcing):
    """Writes a file in shared memory."""

    def hand_over(self) -> None:
        """Write it."""
        safetensors.torch.save_file(
            dict(self.seat.tensors), self.seat.memory / "weights.safetensors"
        )


class SafetensorsReader(Told):
    """Loads the file."""

    def load(self) -> None:
        """Read it."""
        self.put(safetensors.torch.load_file(self.seat.memory / "weights.safetensors"))


class TorchSaveTrainer(Announcing):
    """Pickles a state dict into a file in shared memory."""

    def hand_over(self) -> None:
        """Write it."""
        torch.save(dict(self.seat.tensors), self.seat.memory / "weights.pt")


class TorchSaveReader(Told):
    """Loads the file."""

    def load(self) -> None:
        """Read it."""
        self.put(torch.load(self.seat.memory / "weights.pt", weights_only=True))


ENDS: dict[str, tuple[Callable[[Seat], TrainerEnd], Callable[[Seat], ReaderEnd]]] = {
    "ours_shm": (OursShmTrainer, OursShmReader),
    "ours_gloo": (OursGlooTrainer, OursGlooReader),
    "ours_gloo_zero_copy": (OursZeroCopyTrainer, OursGlooReader),
    "gloo": (GlooBroadcastTrainer, GlooBroadcastReader),
    "gloo_p2p": (GlooSendTrainer, GlooSendReader),
    "torch_shared": (SharedTensorsTrainer, SharedTensorsReader),
    "safetensors": (SafetensorsTrainer, SafetensorsReader),
    "torch_save": (TorchSaveTrainer, TorchSaveReader),
    "ray": (RayTrainer, RayReader),
    "ray_numpy": (RayNumpyTrainer, RayNumpyReader),
}
