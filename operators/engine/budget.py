"""How much memory an engine's KV-cache takes when nobody says: what is left of its device beside
everything else that has to fit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import psutil
import torch

from dataflow.planning.memory_need import FILLED
from operators.engine.attention import AttentionLayout, Kernel, KVCache
from operators.engine.pages import PAGE, Prefix, pages_for
from operators.engine.prefill import lay_out
from operators.engine.rows import put
from operators.models.folders import ModelError

CPU_SHARE = 0.5
"""Of the main memory that is free, the cache's part."""


class DeviceMemory(Protocol):
    """The memory of an accelerator."""

    def free(self) -> tuple[int, int]:
        """Bytes that are free now, of how many in all."""

    def peak(self, work: Callable[[], object]) -> int:
        """The most bytes that `work` takes beside what is taken before it."""


class GpuMemory:
    """Of a GPU, by torch's allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free(self) -> tuple[int, int]:
        """As the driver says, once torch has given back what it keeps."""
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)

    def peak(self, work: Callable[[], object]) -> int:
        """By the allocator's high-water mark."""
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        work()
        return torch.cuda.max_memory_allocated(self._device) - before


@dataclass(frozen=True, kw_only=True)
class EnginePasses:
    """What makes an engine's forward passes and draws, before it has a cache."""

    forward: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | int, AttentionLayout], Any]
    """New tokens, their positions, those whose logits are kept, layout -> logits."""
    draw: Callable[[Any], object]
    """Of logits, a token for each row."""
    kernel: Kernel | None
    device: torch.device
    slots: int
    context_tokens: int
    new_tokens: int
    """Of prompts, that one pass computes at most."""
    token_bytes: int
    """Of keys and values of one position in all layers."""
    captured: int
    """Rows that captured decode steps have beside those of all slots, so that what one takes stays
    taken; 0: none is captured."""

    @property
    def prefixes(self) -> list[tuple[int, int]]:
        """Tokens, and pages of them that were there before, of the prompts of the largest pass: as
        many new tokens as there may be, at the end of the longest prompt.
        """
        context, new = self.context_tokens, self.new_tokens
        if context > new:
            return [(context, (context - new) // PAGE)]
        whole, rest = divmod(new, context)
        return [(context, 0)] * whole + [(rest, 0)] * bool(rest)

    @torch.inference_mode()
    def prefill(self) -> None:
        """A forward pass over `prefixes`, in pages of their own, and a draw for all slots."""
        pages = itertools.count()
        prefixes = [
            Prefix(
                tokens=np.zeros(length, np.int64),
                cached=cached,
                tables=[list(itertools.islice(pages, pages_for(length)))],
            )
            for length, cached in self.prefixes
        ]
        cache = KVCache(next(pages))
        new = lay_out(prefixes, lambda values: put(values, self.device))
        none = new.tokens[:0]
        table = put(np.zeros((0, 1), np.int32), self.device)
        layout = AttentionLayout(cache, none, 0, table, new=new.layout, kernel=self.kernel)
        tokens = len(new.tokens)
        last = torch.arange(max(0, tokens - self.slots), tokens, device=self.device)
        self.draw(self.forward(new.tokens, new.positions, last, layout))

    @torch.inference_mode()
    def decode(self) -> None:
        """A captured decode step of all its rows, each of which is at its first token."""
        wide, rows = pages_for(self.context_tokens + 1), self.slots + self.captured
        at = torch.zeros(rows, dtype=torch.int64, device=self.device)
        table = torch.zeros((rows, wide), dtype=torch.int32, device=self.device)
        longest = 1 if self.kernel is None else wide * PAGE
        together = self.captured > 0
        layout = AttentionLayout(
            KVCache(0), at, longest, table, kernel=self.kernel, together=together
        )
        kept = torch.arange(self.slots, device=self.device)
        self.draw(self.forward(at, at, kept, layout))

    @property
    def prefill_bytes(self) -> int:
        """Of the pages that `prefill` fills."""
        pages = sum(pages_for(length) for length, _ in self.prefixes)
        return pages * PAGE * self.token_bytes

    @property
    def rollout_bytes(self) -> int:
        """Of the pages of one rollout of full length."""
        return pages_for(self.context_tokens) * PAGE * self.token_bytes


@dataclass(frozen=True, kw_only=True)
class Budget:
    """A device's memory once an engine's weights are there, in bytes."""

    free: int
    whole: int
    arriving: int
    """A version that comes while another one is computed with."""
    passes: int
    """The largest forward pass, with the draw behind it."""
    graphs: int
    """What captured decode steps keep."""

    @property
    def cache(self) -> int:
        """What is left for keys and values; below 0 where it does not even suffice for the rest."""
        unfilled = self.whole - int(FILLED * self.whole)
        return self.free - unfilled - self.arriving - self.passes - self.graphs

    def __str__(self) -> str:
        return (
            f"{self.free} bytes are free of {self.whole}, of which the share {1 - FILLED:.2f}"
            f" stays so, an arriving version takes {self.arriving}, the largest forward pass"
            f" {self.passes} and captured steps {self.graphs}"
        )


def measured(engine: EnginePasses, memory: DeviceMemory, *, arriving: int) -> Budget:
    """The budget of an engine that has all but its cache. One full prefill and, where steps are
    captured, one decode step of all its slots are made. ModelError where the cache cannot hold one
    rollout.
    """
    try:
        passes = memory.peak(engine.prefill) - engine.prefill_bytes
        graphs = memory.peak(engine.decode) if engine.captured else 0
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"the generator cannot compute {engine.new_tokens} tokens at once beside its weights;"
            f" {str(error).splitlines()[0]}; lower context_tokens, or share the model out with"
            " tensor_parallel"
        ) from error
    free, whole = memory.free()
    budget = Budget(free=free, whole=whole, arriving=arriving, passes=max(0, passes), graphs=graphs)
    needed = engine.rollout_bytes
    if budget.cache < needed:
        raise ModelError(
            f"the KV-cache cannot hold one rollout: {engine.context_tokens} tokens take {needed}"
            f" bytes, but {max(0, budget.cache)} are left ({budget}); lower context_tokens or"
            ' slots, share the model out with tensor_parallel, or compute with weights="fp8"'
        )
    return budget


def host_budget() -> int:
    """Bytes for a cache in main memory."""
    return int(CPU_SHARE * psutil.virtual_memory().available)


def default_budget(
    engine: EnginePasses, *, arriving: int = 0, memory: DeviceMemory | None = None
) -> int:
    """Bytes for the cache of an engine that has all but this.

    arriving: of a version beside the one that is computed with. memory: of its device; None: as
    torch has it. ModelError as `measured`.
    """
    if memory is None and engine.device.type == "cpu":
        return host_budget()
    return measured(engine, memory or GpuMemory(engine.device), arriving=arriving).cache
