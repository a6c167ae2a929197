"""The ranks of a trainer as a mesh (replicas, data, tensor), and what they exchange over it;
imports torch.
"""

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
"""Dimensions that transformers expects of a mesh; the first is 1."""
HEAD_AXES = ("tp_heads", "tp_copies")
LOOK_S = 0.0005
"""How often a rank that waits for its GPU looks at it."""


@dataclass(frozen=True)
class TrainerMesh:
    """The ranks of a trainer in a grid, sliced as a DeviceMesh is."""

    root: DeviceMesh
    """Of `AXES`."""
    by_heads: DeviceMesh | None = None
    """Its ranks along "tp" as key/value heads x ranks that hold the same one, where there are more
    ranks than heads."""

    def __getitem__(self, axes: str | tuple[str, ...]) -> DeviceMesh:
        return self.root[axes]

    @property
    def size(self) -> int:
        """Of all ranks."""
        return int(self.root.size())

    @property
    def data(self) -> DeviceMesh:
        """What FSDP2 shards over: the ranks of a replica; with several of these, their gradients
        are added up after.
        """
        return self["fsdp"] if self["dp_replicate"].size() == 1 else self["dp_replicate", "fsdp"]

    @property
    def whole(self) -> DeviceMesh:
        """All ranks, as what is not cut by tensor parallelism lies on them."""
        return self[(*(self.data.mesh_dim_names or ()), "tp")]


def make_mesh(
    device: torch.device,
    ranks: int,
    *,
    tensor_parallel: int = 1,
    dp_replicate: int = 1,
    key_value_heads: int = 0,
) -> TrainerMesh:
    """Neighbouring ranks share out the matrices of a layer; the others shard the data, and within
    each of `dp_replicate` blocks of them all parameters, of which every block holds the whole.

    key_value_heads: of the model; every rank calls at once, since process groups are made.
    """
    shards = ranks // (dp_replicate * tensor_parallel)
    root = init_device_mesh(
        device.type, (1, dp_replicate, shards, tensor_parallel), mesh_dim_names=AXES
    )
    copies = tensor_parallel // key_value_heads if key_value_heads else 1
    if copies < 2 or tensor_parallel % key_value_heads:
        return TrainerMesh(root)
    return TrainerMesh(root, root["tp"]._unflatten(0, (key_value_heads, copies), HEAD_AXES))


def data_rank(rank: int, tensor_parallel: int) -> int:
    """Which share of the step's rollouts a rank computes."""
    return rank // tensor_parallel


@dataclass(frozen=True)
class MeshTogether:
    """`Together` for ranks that hold slices: every number that decides something is the same on all
    of them.

    A slice that several ranks hold alike counts once: each of them counts as a part of it.
    """

    mesh: TrainerMesh
    fallen: Callable[[], bool] = lambda: False
    """Whether another rank has ended: a GPU would wait for it without a word."""
    timeout_s: float = math.inf
    """For what a GPU has been told to do until the end of a step."""

    @property
    def tensor(self) -> int:
        """Ranks that compute the same rollouts."""
        return int(self.mesh["tp"].size())

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """The norm of all ranks' gradients together, after replicated ones were made equal."""
        squares = []
        for gradient in gradients:
            own = local(gradient)
            if (computed := self._alike(gradient)) is not None:
                dist.all_reduce(own, group=computed)
                own /= computed.size()
            squares.append(own.double().square().sum() / copies(gradient, self.mesh))
        total = torch.stack(squares).sum()
        dist.all_reduce(total)
        return total.sqrt()

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

    def _alike(self, gradient: Tensor) -> dist.ProcessGroup | None:
        """The ranks that have each computed this gradient from the same rollouts; None: no other
        one has.
        """
        assert isinstance(gradient, DTensor), "FSDP2 shards every parameter"
        on, place = gradient.device_mesh, gradient.placements[-1]
        if on == self.mesh.data:
            on, place = self.mesh["tp"], Replicate()
        *_, last = on.mesh_dim_names or ()
        group = on.get_group(last)
        return group if place.is_replicate() and group.size() > 1 else None

    def _settle(self) -> None:
        """Wait for this rank's GPU, which waits for those of the others. RuntimeError when one of
        them is gone.
        """
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        wait = Countdown(self.timeout_s)
        event.record()
        while not event.query():
            if self.fallen():
                raise RuntimeError("another rank has ended")
            if wait.is_over:
                raise RuntimeError(f"timed out after {self.timeout_s:.0f} s")
            time.sleep(LOOK_S)


def copies(tensor: Tensor, mesh: TrainerMesh) -> int:
    """Ranks of the mesh that hold the same slice of a tensor."""
    assert isinstance(tensor, DTensor), "FSDP2 shards every parameter"
    dealt = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return mesh.size // math.prod(size for size, place in dealt if not place.is_replicate())


def placed(tensors: Mapping[str, Tensor], mesh: TrainerMesh) -> dict[str, Tensor]:
    """The same slices, each described as lying on the whole mesh, alike on all ranks."""
    return {
        name: tensor
        if not isinstance(tensor, DTensor) or tensor.device_mesh != mesh.data
        else DTensor.from_local(
            tensor.to_local(),
            mesh.whole,
            [*tensor.placements, Replicate()],
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
        for name, tensor in tensors.items()
    }
