"""Keys and values of the sequences being decoded: one slot per sequence, in tensors of fixed place.

Axes: S slots, H key/value heads, T tokens, D width of a head. Active sequences lie in slots 0 .. n-1, so that
attention reads them as plain views.
"""

from __future__ import annotations

import math
import mmap

import torch

from operators.models import ModelError


class KVCache:
    """Slots for the keys and values of every layer; layers appear when they are first written."""

    def __init__(self, slots: int, tokens: int, most_tokens: int) -> None:
        """Make room for `tokens` positions in each of `slots` slots; `grow` goes up to `most_tokens`."""
        self.slots = slots
        self.tokens = tokens
        self.most_tokens = most_tokens
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def layer(self, index: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [S, H, T, D] and values [S, H, T, D] of a layer, made like its new ones [1, H, N, D]."""
        found = self._layers.get(index)
        if found is None:
            found = (self._empty(key), self._empty(value))
            self._layers[index] = found
        return found

    def grow(self, tokens: int) -> None:
        """Make room for at least `tokens` positions per slot; what is there stays."""
        if tokens <= self.tokens:
            return
        self.tokens = min(self.most_tokens, max(tokens, 2 * self.tokens))
        for index, (keys, values) in self._layers.items():
            self._layers[index] = (self._grown(keys), self._grown(values))

    def move(self, target: torch.Tensor, origin: torch.Tensor, longest: int) -> None:
        """Copy the first `longest` positions of the slots `origin` [k] into the slots `target` [k]."""
        for keys, values in self._layers.values():
            keys[target, :, :longest] = keys[origin, :, :longest]
            values[target, :, :longest] = values[origin, :, :longest]

    def clear(self, slots: torch.Tensor) -> None:
        """Zero some slots: a masked position weighs nothing only as long as it holds a finite number."""
        for keys, values in self._layers.values():
            keys[slots] = 0
            values[slots] = 0

    @property
    def layers(self) -> int:
        """Number of layers seen so far."""
        return len(self._layers)

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes."""
        return sum(keys.nbytes + values.nbytes for keys, values in self._layers.values())

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        shape = (self.slots, like.shape[1], self.tokens, like.shape[3])
        nbytes = math.prod(shape) * like.element_size()
        try:
            if like.device.type == "cpu" and hasattr(mmap, "MADV_HUGEPAGE"):
                return _huge_pages(nbytes).view(like.dtype).view(shape)
            return torch.zeros(shape, dtype=like.dtype, device=like.device)
        except (RuntimeError, OSError) as error:
            raise ModelError(
                f"the KV-cache does not fit: {self.slots} slots of {self.tokens} tokens need {2 * nbytes} "
                f"bytes in every layer ({error}); lower slots, max_tokens or context_tokens of the generator"
            ) from error

    def _grown(self, old: torch.Tensor) -> torch.Tensor:
        new = self._empty(old)
        new[:, :, : old.shape[2]] = old
        return new


def _huge_pages(nbytes: int) -> torch.Tensor:
    """Zeros uint8 [nbytes] on huge pages where the system gives them: slots lie far apart."""
    memory = mmap.mmap(-1, nbytes)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
