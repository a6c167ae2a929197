"""One forward pass of a whole decoder in C: from tokens to logits, writing the paged cache on its way.

Axes: n rows, I new prefixes, V vocabulary, P pages of PAGE tokens, K key/value heads, D width of a head.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from operators.engine.attention import AttentionLayout
from operators.engine.kv_cache import KVCache, huge_pages
from operators.engine.native.attention import DTYPES
from operators.engine.native.build import library
from operators.engine.native.families import reason_against
from operators.engine.native.packing import LONG, POINTER, PackedWeights
from operators.engine.native.work import NativeRows, copy_partial_pages
from operators.engine.pages import PAGE
from operators.engine.prefill import Prefix
from operators.models.errors import ModelError


def supports(model: torch.nn.Module) -> bool:
    """Whether `FusedStep` can compute this model here; `families.reason_against` says why not."""
    return library() is not None and reason_against(model) is None


class FusedStep:
    """A model's forward pass in C: a row's logits depend on that row alone, bit by bit."""

    def __init__(self, model: Any, precision: torch.dtype | None = None) -> None:
        """Pack the weights of `model`.

        Args:
            precision: of the matrix products, float32 or bfloat16; None: the weights' own. In bfloat16, weights and
                what they multiply are rounded to it, and sums are float32, as is everything between products.

        Raises:
            ModelError: there is no C compiler, or the model is not of the kind that the kernels know.
        """
        found = library()
        against = "there is no C compiler that can build the kernels" if found is None else reason_against(model)
        if against is not None or found is None:
            raise ModelError(f"the fused step cannot compute this model: {against}; use the model's own forward pass")
        found.dataflow_pack.argtypes = (POINTER, LONG, LONG)
        found.dataflow_lanes.restype = LONG
        found.dataflow_step_scratch.argtypes, found.dataflow_step_scratch.restype = (POINTER, LONG), LONG
        found.dataflow_step.argtypes = (POINTER, POINTER, LONG, POINTER, LONG, POINTER, LONG)
        found.dataflow_step.restype = LONG
        self._library = found
        self._model = model
        self._weights = PackedWeights(found, model, precision or model.lm_head.weight.dtype)
        self._angles = (torch.empty(0, 0), torch.empty(0, 0))
        self._scratch = torch.empty(0)
        decoder = self._weights.decoder
        self._like = torch.empty(1, decoder.heads, 0, decoder.width, dtype=model.lm_head.weight.dtype)

    @property
    def vocabulary(self) -> int:
        """V."""
        return int(self._weights.decoder.vocabulary)

    def refresh(self) -> None:
        """Take over the weights that the model has now; to be called after every change of them."""
        self._weights.refresh()

    def let_go(self) -> None:
        """Give back what it has packed, until `refresh`; the model's weights may go as well meanwhile."""
        self._weights.let_go()
        self._scratch = torch.empty(0)

    def __call__(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        cache: KVCache,
        layout: AttentionLayout,
        new: Sequence[Prefix] = (),
    ) -> torch.Tensor:
        """Logits of each row's next token and of each new prefix's, float32 [n + I, V]; the cache is filled on the way.

        Args:
            tokens: the newest token of each row, int64 [n].
            positions: where it stands, int64 [n].
            layout: table, runs, shared and longest of the rows; its positions are not read.
            new: prefixes to compute anew; their pages, the partial one of each row too, are filled. What a prefix
                has cached was there before, or is computed by an earlier one of these.

        Raises:
            ModelError: a token or position is out of range, or the cache is not of the model's shape.
        """
        work = NativeRows.of(tokens, positions, layout, new)
        decoder, threads = self._weights.decoder, torch.get_num_threads()
        layers = self._attach(cache)
        self._reach(work.longest)
        logits = torch.empty(work.rows if work.wanted is None else len(work.wanted), decoder.vocabulary)
        if work.rows == 0:
            return logits
        size = self._library.dataflow_step_scratch(ctypes.byref(decoder), work.longest)
        if len(self._scratch) < threads * size:
            self._scratch = huge_pages(4 * threads * size).view(torch.float32)
        begins = (LONG * (threads + 1))()
        described = work.structure(logits)
        wrong = self._library.dataflow_step(
            ctypes.byref(decoder),
            ctypes.byref(described),
            work.longest,
            self._scratch.data_ptr(),
            size,
            begins,
            threads,
        )
        if wrong >= 0:
            raise ModelError(
                f"row {wrong} is out of range: found token {int(work.tokens[wrong])} at position "
                f"{int(work.positions[wrong])}; give tokens below {decoder.vocabulary} at positions below "
                f"{work.longest}, with pages in the table"
            )
        copy_partial_pages(layers, new)
        return logits

    def _attach(self, cache: KVCache) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Point the layers to the cache's tensors, which are made where they are not there yet."""
        decoder = self._weights.decoder
        expected = (decoder.heads, PAGE, decoder.width)
        like = self._like
        layers = [cache.layer(index, like, like) for index in range(decoder.layer_count)]
        for layer, (keys, values) in zip(self._weights.layers, layers, strict=True):
            if (
                keys.shape[1:] != expected or keys.shape != values.shape or keys.dtype not in DTYPES
                or keys.dtype != values.dtype or not keys.is_contiguous() or not values.is_contiguous()
            ):  # fmt: skip
                raise ModelError(
                    f"the cache does not fit the model: found {tuple(keys.shape)} and {tuple(values.shape)} of "
                    f"{keys.dtype}; give dense pages of {expected} in float32 or bfloat16"
                )
            layer.keys, layer.values = keys.data_ptr(), values.data_ptr()
            decoder.cache_halves = keys.dtype == torch.bfloat16
        return layers

    def _reach(self, longest: int) -> None:
        """Have the angles of the model's own rotary embedding for positions below `longest`."""
        have = len(self._angles[0])
        if longest <= have:
            return
        want = max(longest, 2 * have, 256)
        like = self._model.model.embed_tokens.weight[:1]
        with torch.no_grad():
            both = self._model.model.rotary_emb(like, torch.arange(want)[None])
        half = both[0].shape[2] // 2
        cosines, sines = (angles[0, :, :half].float().contiguous() for angles in both)
        self._angles = (cosines, sines)
        self._weights.decoder.cosines, self._weights.decoder.sines = cosines.data_ptr(), sines.data_ptr()
