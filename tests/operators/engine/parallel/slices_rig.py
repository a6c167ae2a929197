"""A trainer that publishes versions of a tiny model to all ranks of an engine, and how rank 0 opens
its end of it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import xxhash
from rigs.operators import make_context

from dataflow.limits import Limits
from dataflow.weight_ends import OpensWeights, WeightSite
from dataflow.worker.weight_ports import open_reader
from operators.engine.parallel.lockstep import make_parallel
from transport.weights import (
    FlatLayout,
    Layout,
    ShardedWriter,
    SharedMemory,
    WeightWriter,
)

Shapes = dict[str, tuple[int, ...]]
WAIT_S = 60.0


def values(shapes: Shapes, version: int) -> dict[str, torch.Tensor]:
    """Small numbers, others for each version."""
    random = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=random) * 0.05 for name, shape in shapes.items()}


class Opens(OpensWeights):
    """As the ports give it to a generator."""

    def __init__(
        self, address: str, folder: str, executor: str = "shared_memory", device: str = "cpu"
    ) -> None:
        self.address, self.folder, self.executor, self.device = address, folder, executor, device
        self.end: list[Any] = []
        site = WeightSite(
            executor=executor,
            is_sharded=executor == "gloo",
            address=address,
            folder=folder,
            name="generator-0",
        )
        super().__init__(self._opened, site)

    def _opened(self, tensors: Mapping[str, Any], slices: Sequence[Mapping[str, Any]]) -> Any:
        assert self.site is not None
        end = open_reader(self.site, 0, self.device, tensors, slices, limits=Limits(), attempt=0)
        self.end.append(end)
        return end


class ShardsOfAll:
    """A trainer of two ranks, both in this process, each of which sends its own rows."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], address: str) -> None:
        self._layout = Layout.fsdp(
            {name: (tuple(each.shape), dtype_of(each)) for name, each in tensors.items()}, 2
        )
        self._ends = [ShardedWriter(self._layout, rank, address) for rank in range(2)]

    def publish(self, version: int, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Each rank its rows."""
        done = []
        for rank, end in enumerate(self._ends):
            mine = {
                name: tensors[name].detach().chunk(2)[rank].clone()
                for name in self._layout.local(rank)
            }
            done.append(end.publish(version, mine))
        return all(done)

    def poll(self) -> None:
        for end in self._ends:
            end.poll()

    def close(self) -> None:
        for end in reversed(self._ends):
            end.close()


def dtype_of(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def writer(tensors: Mapping[str, torch.Tensor], opens: Opens) -> Any:
    """The end, or ends, of a trainer of such tensors."""
    if opens.executor == "gloo":
        return ShardsOfAll(tensors, opens.address)
    return WeightWriter(FlatLayout.of(tensors), SharedMemory(opens.address, folder=opens.folder))


class Rig:
    """Rank 0 with its followers, and a trainer in this process."""

    def __init__(
        self,
        declaration: Any,
        folder: Any,
        size: int = 2,
        timeout_s: float = 30.0,
        executor: str = "shared_memory",
        **context: Any,
    ) -> None:
        self.opens = Opens(f"ipc://{folder}/w", str(folder), executor, context.get("device", "cpu"))
        self.size = size
        limits = Limits(start_s=90.0, exchange_s=timeout_s)
        known = make_context(node="generator", reader=self.opens, limits=limits, **context)
        built = make_parallel(declaration, known, size)
        assert built.reader is not None and built.native is not None
        self.native, self.ranks = built.native, built.ranks
        self.engine: Any = built.engine
        self.shards = self.engine.shards
        self.shapes: Shapes = {name: shard.shape for name, shard in self.shards.items()}
        self.reader: Any = built.reader()
        self.writer: Any = None

    def publish(self, version: int, new: Mapping[str, torch.Tensor] | None = None) -> None:
        """From this process; `values` where it is not told which."""
        new = values(self.shapes, version) if new is None else new
        new = {name: new[name].detach() for name in self.shapes}
        self.writer = self.writer or writer(new, self.opens)
        assert self.writer.publish(version, new)

    def offered(self) -> Any:
        """Until there is an offer."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            if self.writer is not None:
                self.writer.poll()
            if offer := self.reader.poll():
                return offer
            time.sleep(0.001)
        raise AssertionError("no offer came")

    def take(self) -> int:
        """As the runtime does between two steps."""
        self.offered()
        self.reader.adopt()
        self.engine.adopted(self.reader.version)
        return int(self.reader.version)

    def assert_slices(self, version: int) -> None:
        """Every rank holds its slices of the version, and nothing else."""
        assert_slices(self.engine, values(self.shapes, version), self.size)

    def close(self) -> None:
        self.engine.close()
        for end in (*self.opens.end, *filter(None, [self.writer])):
            end.close()


def assert_slices(
    engine: Any, full: Mapping[str, torch.Tensor], size: int, heads: int | None = None
) -> None:
    """Every rank holds its slices of these tensors, byte for byte, and nothing else. heads: as in
    `part`.
    """
    found = engine.digests()
    assert len(found) == size
    for rank, digests in enumerate(found):
        assert digests.keys() == full.keys()
        for name, tensor in full.items():
            mine = (
                part(name, tensor.detach(), rank, size, heads)
                .contiguous()
                .view(-1)
                .view(torch.uint8)
            )
            assert digests[name] == xxhash.xxh3_64_intdigest(mine.numpy().tobytes()), (
                f"{name} on rank {rank}"
            )


def part(
    name: str, full: torch.Tensor, rank: int, size: int, heads: int | None = None
) -> torch.Tensor:
    """What a rank holds, written out: a range of rows or columns, one of each half where gate and
    up are fused; of keys and values one of `heads` heads, where there are fewer than ranks.
    """
    kind = name.removesuffix(".weight").removesuffix(".bias").rsplit(".", 1)[-1]
    if heads is not None and kind in ("k_proj", "v_proj"):
        return full.chunk(heads)[rank * heads // size]
    if kind in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head", "embed_tokens"):
        return full.chunk(size)[rank]
    if kind in ("o_proj", "down_proj"):
        return full.chunk(size, -1)[rank]
    if kind == "gate_up_proj":
        return torch.cat([half.chunk(size, 1)[rank] for half in full.chunk(2, 1)], 1)
    return full


def publish(address: str, folder: str, shapes: Shapes, first: int, last: int, running: Any) -> None:
    """A trainer's process: a version after the other, as soon as there is room, and skipping some;
    then it waits.
    """
    torch.set_num_threads(1)
    end = writer(values(shapes, 0), Opens(address, folder))
    deadline = time.monotonic() + 120
    for version in (number for number in range(first, last + 1) if number % 5 != 3):
        end.publish(version, values(shapes, version))
        while (end.pending or not end.readers) and time.monotonic() < deadline:
            end.poll()
            time.sleep(0.001)
        while version % 2 == 0 and end.readers[0].version < version and time.monotonic() < deadline:
            end.poll()
            time.sleep(0.001)
    running.set()
    while time.monotonic() < deadline:
        end.poll()
        time.sleep(0.001)
    sys.exit(1)
