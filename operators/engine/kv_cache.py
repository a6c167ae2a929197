"""The memory of keys and values: pages in tensors of fixed place, sized from a budget in bytes.

Axes: P pages, H key/value heads, D width of a head.
"""

from __future__ import annotations

import itertools
import math
import mmap

import psutil
import torch

from operators.engine.pages import PAGE, pages_for
from operators.models.errors import ModelError

CPU_SHARE, GPU_SHARE = 0.5, 0.85
"""Part of the memory free now that the cache may grow to when no budget is given."""


class KVCache:
    """Pages of keys and values for every layer; a layer's tensors are made when it is first
    written.
    """

    def __init__(self, pages: int) -> None:
        """Allocate `pages` pages, and one more that pads a batch and is never read."""
        self.pages = pages
        self.scratch = pages
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def layer(
        self, index: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [P + 1, H, PAGE, D] and values of a layer, made like its new ones [1, H, N, D]."""
        pair = self._layers.get(index)
        if pair is None:
            pair = (self._empty(key), self._empty(value))
            self._layers[index] = pair
        return pair

    @property
    def layers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values by layer, of those written so far."""
        return [self._layers[index] for index in sorted(self._layers)]

    @property
    def token_bytes(self) -> int:
        """Bytes that one position takes in all layers."""
        return sum(side[0].nbytes // PAGE for both in self._layers.values() for side in both)

    def clear(self, pages: torch.Tensor) -> None:
        """Zero some pages: a masked position weighs nothing only as long as it holds a finite
        number.
        """
        for keys, values in self._layers.values():
            keys[pages] = 0
            values[pages] = 0

    def copy(
        self,
        from_pages: torch.Tensor,
        from_places: torch.Tensor,
        to_pages: torch.Tensor,
        to_places: torch.Tensor,
    ) -> None:
        """Copy keys and values of single positions, given as pages and places in them, int64 [m]
        each.
        """
        for side in itertools.chain(*self._layers.values()):
            side[to_pages, :, to_places] = side[from_pages, :, from_places]

    def drop(self) -> None:
        """Free the memory; its content is lost. It is allocated again at the next write."""
        self._layers.clear()

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        shape = (self.pages + 1, like.shape[1], PAGE, like.shape[3])
        nbytes = math.prod(shape) * like.element_size()
        try:
            if like.device.type == "cpu":
                return huge_pages(nbytes).view(like.dtype).view(shape)
            return torch.zeros(shape, dtype=like.dtype, device=like.device)
        except (RuntimeError, OSError, ValueError) as error:
            raise ModelError(
                f"the KV-cache does not fit: {self.pages} pages of {PAGE} tokens need {2 * nbytes}"
                f" bytes in every layer ({error}); lower slots, context_tokens or cache_bytes of"
                " the generator"
            ) from error


def page_count(*, slots: int, context_tokens: int, token_bytes: int, budget: int) -> int:
    """Pages for `slots` sequences of `context_tokens` tokens, as far as `budget` bytes allow.

    Raises:
        ModelError: not even one sequence fits.
    """
    slot_pages = pages_for(context_tokens)
    affordable = budget // max(1, PAGE * token_bytes)
    if affordable < slot_pages:
        raise ModelError(
            f"the KV-cache cannot hold one rollout: {context_tokens} tokens take"
            f" {slot_pages * PAGE * token_bytes} bytes ({token_bytes} each), but its budget is"
            f" {budget}"
            " bytes; raise cache_bytes, or lower context_tokens"
        )
    return min(affordable, slots * slot_pages)


def default_budget(device: torch.device, weights: int) -> int:
    """Bytes the cache may take when nobody says: a share of what is free on the device now.

    weights: bytes of the model, of which a second version arrives on a GPU beside the one that is
    computed with.
    """
    if device.type == "cuda":
        return int(GPU_SHARE * max(0, torch.cuda.mem_get_info(device)[0] - weights))
    return int(CPU_SHARE * psutil.virtual_memory().available)


def huge_pages(nbytes: int) -> torch.Tensor:
    """Zeros uint8 [nbytes] on huge pages where the system gives them; memory is taken when first
    written.
    """
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
