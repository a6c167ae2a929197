"""What a trainer's rank holds of a GPU while it makes two steps, and what a generator's passes
take, found without one.

Their own code runs on fake tensors, which have shapes and no numbers, as rank 0 of a fake
process group. Counted are storages from when they are made until they are freed, in blocks of 512
bytes as torch's allocator takes them. Not counted is what no tensor shows: CUDA's context, NCCL's
buffers, workspaces within a kernel, holes between blocks.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from bench.gpu.trainer import Load, make_rows
from operators import Generator, Trainer
from operators.engine import attention, prefill
from operators.engine.attention import AttentionLayout, KVCache
from operators.engine.budget import Budget, EnginePasses, measured
from operators.engine.build import context_tokens_of
from operators.engine.pages import AHEAD
from operators.engine.parallel.shards import AXES, distribute
from operators.models.loading import on_meta
from operators.models.slices import given_memory
from operators.training.learner import head, memory, packed_attention, row_share
from operators.training.learner.build import forward_of, learner_of
from operators.training.learner.copies import ComputeCopies
from operators.training.learner.learner import Learner
from operators.training.parallel import shard
from operators.training.parallel.mesh import make_mesh

BLOCK = 512
"""Bytes that torch's allocator for CUDA rounds up to."""
DEVICE = torch.device("cpu")
aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class Held:
    """What a rank held, in bytes."""

    most: int
    parts: dict[str, int]
    """At the most, by what was under way when it was made: load, micro, update."""
    rest: int
    """After the last step."""
    groups: int
    """Process groups of several ranks that it is in."""


def tracked(trainer: Trainer, ranks: int, load: Load, *, steps: int = 2) -> Held:
    """What rank 0 of so many holds at the most while it makes steps of this load, from the config
    of the trainer's model alone.

    trainer: its loss may depend on no number. load: of one rank. One process makes one at a time.
    """
    storages = Storages()
    with _as_on_a_gpu(storages), contextlib.ExitStack() as open_:
        mesh = None
        if ranks > 1:
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
            open_.callback(dist.destroy_process_group)
            mesh = make_mesh(
                DEVICE,
                ranks,
                tensor_parallel=trainer.tensor_parallel,
                dp_replicate=trainer.dp_replicate,
            )
        module: Any = on_meta(trainer.model, "float32", None)
        with FakeTensorMode(allow_non_fake_inputs=True), storages:
            learner = _learner(trainer, module, mesh)
            rows = make_rows(load, module.config.get_text_config().vocab_size)
            for version in range(steps):
                storages.phase = "micro"
                for part in learner.begin(rows, version):
                    learner.micro(part)
                storages.phase = "update"
                learner.end(1e-6)
        return Held(
            most=storages.most,
            parts=dict(storages.at_most),
            rest=storages.now,
            groups=sum(group.size() > 1 for group in dist.distributed_c10d._world.pg_map),
        )


def _learner(trainer: Trainer, module: Any, mesh: Any) -> Learner:
    if mesh is None:
        forward = forward_of(trainer, given_memory(module, DEVICE))
        learner = learner_of(trainer, forward, node=trainer.name)
        if forward.compute is not None:
            learner.copies = ComputeCopies(forward.module, forward.compute)
        return learner
    compute = None if trainer.model.dtype == "float32" else getattr(torch, trainer.model.dtype)
    sharded = shard.shared_out(module, mesh, compute, trainer.model.name)
    sharded.take_memory(DEVICE)
    return shard.learner_of_slices(trainer, sharded, mesh, DEVICE, node=trainer.name, seed=0)


def tracked_budget(generator: Generator, whole: int, ranks: int = 1) -> Budget:
    """The budget of the cache of a rank of a generator on a GPU of `whole` bytes, as
    `operators.engine.budget` measures it, without what a draw takes; from its model's config alone,
    in the model's own precision.
    """
    storages = Storages()
    module: Any = on_meta(generator.model, generator.model.dtype, None)
    attention.register()
    module.set_attn_implementation(attention.NAME)

    def forward(
        tokens: torch.Tensor, at: torch.Tensor, kept: torch.Tensor | int, layout: AttentionLayout
    ) -> Any:
        return module(
            input_ids=tokens[None],
            position_ids=at[None],
            use_cache=False,
            logits_to_keep=kept,
            slot_layout=layout,
        ).logits[0]

    with contextlib.ExitStack() as open_:
        open_.enter_context(_as_on_a_gpu(storages))
        mesh = None
        if ranks > 1:
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
            open_.callback(dist.destroy_process_group)
            mesh = init_device_mesh(DEVICE.type, (1, 1, 1, ranks), mesh_dim_names=AXES)
        open_.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        open_.enter_context(storages)
        open_.enter_context(torch.no_grad())
        if mesh is not None:
            distribute(module, mesh, DEVICE, generator.model.name)
        else:
            module = given_memory(module, DEVICE)
        cache, context = KVCache(1), context_tokens_of(generator, module.config)
        one = torch.zeros(1, dtype=torch.int64)
        forward(one, one, 0, AttentionLayout(cache, one, 1, one[None]))
        passes = EnginePasses(
            forward=forward,
            draw=lambda logits: None,
            kernel=None,
            device=DEVICE,
            slots=generator.slots,
            context_tokens=context,
            new_tokens=generator.prefill_tokens,
            token_bytes=cache.token_bytes,
            captured=AHEAD,
        )
        cache.drop()
        return measured(passes, _TrackedMemory(storages, whole), arriving=storages.now)


class _TrackedMemory:
    """A device of which storages take a part."""

    def __init__(self, storages: Storages, whole: int) -> None:
        self._storages, self._whole = storages, whole

    def free(self) -> tuple[int, int]:
        return self._whole - self._storages.now, self._whole

    def peak(self, work: Callable[[], object]) -> int:
        before = self._storages.most = self._storages.now
        work()
        return self._storages.most - before


class Storages(TorchDispatchMode):
    """Counts the bytes of all storages of a device, now and at the most.

    Where code asks what number a tensor holds, it is 1, and any two tensors are equal.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase = "load"
        self.now = self.most = 0
        self.at_most: Counter[str] = Counter()
        self.by_phase: Counter[str] = Counter()
        self._known: Any = WeakIdKeyDictionary()
        self._is_paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(kind is DTensor for kind in types):
            return NotImplemented  # until its own code has made an operation on slices of it
        if func is aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else 1
        if func in (aten.equal.default, aten.allclose.default):
            return True
        result = func(*args, **kwargs)
        if not self._is_paused:
            tree_map_only(torch.Tensor, self._see, result)
        return result

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What is made meanwhile is not counted."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A storage may have another size now."""
        record = self._known.get(storage)
        if record is not None:
            before, record[1] = record[1], _blocks(storage)
            self._add(record[0], record[1] - before)

    def _see(self, tensor: torch.Tensor) -> None:
        if tensor.device != DEVICE:
            return
        storage = tensor.untyped_storage()
        if storage in self._known:
            return
        record: list[Any] = [self.phase, _blocks(storage)]
        self._known[storage] = record
        weakref.finalize(storage, self._gone, record)
        self._add(*record)

    def _gone(self, record: list[Any]) -> None:
        self._add(record[0], -record[1])

    def _add(self, phase: str, nbytes: int) -> None:
        self.now += nbytes
        self.by_phase[phase] += nbytes
        if self.now > self.most:
            self.most, self.at_most = self.now, self.by_phase.copy()


def _blocks(storage: torch.UntypedStorage) -> int:
    return -(-storage.nbytes() // BLOCK) * BLOCK


# What lets code take the ways that it takes on a GPU. Fake tensors lie in main memory: torch
# without CUDA knows no stream, and no thread that computes gradients, of another device.


@contextlib.contextmanager
def _as_on_a_gpu(storages: Storages) -> Iterator[None]:
    resize = torch.UntypedStorage.resize_
    inferred = ShardingPropagator._propagate_tensor_meta_non_cached

    def resized(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        storages.resized(storage)
        return result

    def uncounted(*arguments: Any, **named: Any) -> Any:
        with storages.paused():  # whole tensors, for their shapes
            return inferred(*arguments, **named)

    def by_numbers(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*arguments: Any) -> Any:
            with _disable_current_modes():
                return make(*arguments)

        return made

    def uncounted_copy(tensor: torch.Tensor) -> torch.Tensor:
        with storages.paused():
            return tensor.clone()

    def without_gradients(learner: Learner) -> None:
        for weight in learner.parameters.values():
            weight.grad = None

    with (
        warnings.catch_warnings(),
        mock.patch.object(torch.UntypedStorage, "resize_", resized),
        mock.patch.object(DeviceMesh, "_concatenate", by_numbers(DeviceMesh._concatenate)),
        mock.patch.object(DeviceMesh, "__getitem__", by_numbers(DeviceMesh.__getitem__)),
        mock.patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", uncounted),
        mock.patch.object(F, "scaled_dot_product_attention", _flash),
        mock.patch.object(prefill, "serves_ragged", lambda *arguments: True),
        mock.patch.object(prefill, "ragged", lambda query, *others: torch.empty_like(query)),
        mock.patch.object(torch, "searchsorted", _evenly),
        mock.patch.object(packed_attention, "_tree_blocks", packed_attention._whole_rows),
        mock.patch.object(row_share, "pairs_within", _of_share),
        mock.patch.object(head, "CPU_SLICE", head.GPU_SLICE),
        mock.patch.object(head, "multiplies_bfloat16", lambda: False),
        mock.patch.object(shard, "adds_up_in_float32", lambda module: None),
        mock.patch.object(memory, "host_copy", uncounted_copy),
        mock.patch.object(shard, "exchange_directly", lambda layer, buffer: None),
        mock.patch.object(shard, "map_large_blocks", lambda: None),
        mock.patch.object(Learner, "_no_gradients", without_gradients),
    ):
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
        yield


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """What CUDA computes without a mask in 16 bits; otherwise every score at once."""
    if attn_mask is not None or query.dtype not in (torch.bfloat16, torch.float16):
        heads = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(heads, 1) for each in (key, value))
        return torch.softmax(query @ key.transpose(-2, -1), -1) @ value
    out: torch.Tensor = aten._scaled_dot_product_flash_attention(
        query, key, value, dropout_p, is_causal, scale=scale
    )[0]
    return out


def _of_share(rows: torch.Tensor, own: slice) -> torch.Tensor:
    """As many pairs as rows, which each has one."""
    return torch.arange(min(len(rows), own.stop - own.start))


def _evenly(ids: torch.Tensor, edges: torch.Tensor) -> Any:
    """Bounds of the slices of a vocabulary that so many ids fall into, as even as they can be."""
    bounds = np.linspace(0, len(ids), len(edges)).astype(int)
    return mock.Mock(tolist=bounds.tolist)
