"""The ranks of a trainer as a mesh (data, tensor), and what their learners exchange over it; imports torch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from dataflow.system.clocks import Countdown
from operators.training.learner.together import local

AXES = ("pp", "dp_replicate", "fsdp", "tp")
"""Dimensions that transformers expects of a mesh; the first two are 1."""
LOOK_S = 0.0005
"""How often a rank that waits for its GPU looks at it."""


def make_mesh(device: torch.device, ranks: int, tensor_parallel: int) -> DeviceMesh:
    """Neighbouring ranks share out the matrices of a layer; the others shard the data and all parameters."""
    return init_device_mesh(device.type, (1, 1, ranks // tensor_parallel, tensor_parallel), mesh_dim_names=AXES)


def data_rank(rank: int, tensor_parallel: int) -> int:
    """Which share of the step's rollouts a rank computes."""
    return rank // tensor_parallel


@dataclass(frozen=True)
class MeshTogether:
    """`Together` for ranks that hold slices: every number that decides something is the same on all of them.

    What is not cut by tensor parallelism, `tensor` ranks hold alike; each of them counts as a part of it.
    """

    mesh: DeviceMesh
    fallen: Callable[[], bool] = lambda: False
    """Whether another rank has ended: a GPU would wait for it without a word."""
    timeout_s: float = math.inf
    """For what a GPU has been told to do until the end of a step."""

    @property
    def tensor(self) -> int:
        """Ranks that compute the same rollouts."""
        return int(self.mesh["tp"].size())

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Of all ranks' gradients together, after those that several ranks hold alike were made equal."""
        squares = []
        for gradient in gradients:
            own = local(gradient)
            copies = 1 if is_cut(gradient) else self.tensor
            if copies > 1:
                dist.all_reduce(own, group=self.mesh["tp"].get_group())
                own /= copies
            squares.append(own.double().square().sum() / copies)
        total = torch.stack(squares).sum()
        dist.all_reduce(total)
        return total.sqrt()

    def clip(self, gradients: Sequence[Tensor], most: float, norm: Tensor) -> None:
        """Scale the slices down so that the norm of all is `most`, if it is above."""
        scale = torch.clamp(most / (norm + 1e-6), max=1.0)
        for gradient in gradients:
            local(gradient).mul_(scale)

    def total(self, sums: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
        """The sums of all data ranks added up, and the largest of their maxima."""
        sums, largest = sums / self.tensor, largest.clone()
        dist.all_reduce(sums)
        self.largest(largest)
        return sums, largest

    def largest(self, numbers: Tensor) -> None:
        """Replace each number by the largest that any rank has in its place."""
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
        if numbers.is_cuda:
            self._settle()

    def _settle(self) -> None:
        """Wait for this rank's GPU, which waits for those of the others. RuntimeError when one of them is gone."""
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        wait = Countdown(self.timeout_s)
        event.record()
        while not event.query():
            if self.fallen():
                raise RuntimeError("another rank has ended")
            if wait.is_over:
                raise RuntimeError(f"timed out after {self.timeout_s:.0f} s")
            time.sleep(LOOK_S)


def is_cut(tensor: Tensor) -> bool:
    """Whether the ranks that compute the same rollouts hold different parts of it."""
    if not isinstance(tensor, DTensor) or not _is_on_both(tensor):
        return False
    names = tensor.device_mesh.mesh_dim_names or ()
    return not tensor.placements[names.index("tp")].is_replicate()


def _is_on_both(tensor: DTensor) -> bool:
    return "tp" in (tensor.device_mesh.mesh_dim_names or ())


def placed(tensors: Mapping[str, Tensor], mesh: DeviceMesh) -> dict[str, Tensor]:
    """The same slices, each said to lie on the whole mesh (data, tensor), so that all ranks describe them alike."""
    both = mesh["fsdp", "tp"]
    return {
        name: tensor
        if not isinstance(tensor, DTensor) or _is_on_both(tensor)
        else DTensor.from_local(
            tensor.to_local(), both, [*tensor.placements, Replicate()],
            run_check=False, shape=tensor.shape, stride=tensor.stride(),
        )
        for name, tensor in tensors.items()
    }  # fmt: skip
