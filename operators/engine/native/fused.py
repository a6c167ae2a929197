"""One forward pass of a whole decoder in C: from tokens to logits, writing the paged cache on its way.

Axes: n rows, W pages of a row, V vocabulary, P pages of PAGE tokens, K key/value heads, D width of a head.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from operators.engine.native.attention import DTYPES, PAGE, Rows
from operators.engine.native.build import library
from operators.engine.native.families import reason_against
from operators.engine.native.packing import LONG, POINTER, PackedWeights
from operators.models import ModelError


class Cache(Protocol):
    """What the step needs of a cache."""

    layers: Sequence[tuple[torch.Tensor, torch.Tensor]]
    """Keys and values of each layer, [P, K, PAGE, D], dense, float32 or bfloat16."""


class _Work(ctypes.Structure):
    _fields_ = [
        ("tokens", POINTER), ("positions", POINTER), ("table", POINTER), ("table_rows", POINTER), ("table_width", LONG),
        ("rows", LONG), ("decoded", LONG), ("starts", POINTER), ("pages", POINTER), ("runs", LONG), ("wanted", POINTER),
        ("wanted_count", LONG), ("logits", POINTER),
    ]  # fmt: skip


def supports(model: torch.nn.Module) -> bool:
    """Whether `FusedStep` can compute this model here; `families.reason_against` says why not."""
    return library() is not None and reason_against(model) is None


class FusedStep:
    """A model's forward pass in C: a row's logits depend on that row alone, bit by bit."""

    def __init__(self, model: Any) -> None:
        """Pack the weights of `model`.

        Raises:
            ModelError: there is no C compiler, or the model is not of the kind that the kernels know.
        """
        found = library()
        against = "there is no C compiler that can build the kernels" if found is None else reason_against(model)
        if against is not None or found is None:
            raise ModelError(f"the fused step cannot compute this model: {against}; use the model's own forward pass")
        found.dataflow_pack.argtypes = (POINTER, LONG, LONG, LONG, LONG, POINTER, LONG)
        found.dataflow_lanes.restype = LONG
        found.dataflow_step_scratch.argtypes, found.dataflow_step_scratch.restype = (POINTER, LONG), LONG
        found.dataflow_step.argtypes = (POINTER, POINTER, LONG, POINTER, LONG, POINTER, LONG)
        found.dataflow_step.restype = LONG
        self._library = found
        self._model = model
        self._weights = PackedWeights(found, model)
        self._angles = (torch.empty(0, 0), torch.empty(0, 0))
        self._scratch = torch.empty(0)

    def refresh(self) -> None:
        """Take over the weights that the model has now; to be called after every change of them."""
        self._weights.refresh()

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor, cache: Cache, layout: Rows) -> torch.Tensor:
        """Logits of each row's next token, float32 [n, V]; keys and values of `tokens` go into the cache.

        Args:
            tokens: the newest token of each row, int64 [n].
            positions: where it stands, int64 [n].
            layout: table, runs, shared and longest of the rows; its positions are not read.

        Raises:
            ModelError: a token or position is out of range, or the cache is not of the model's shape.
        """
        return self._run(tokens, positions, cache, layout)

    def _run(self, tokens: torch.Tensor, positions: torch.Tensor, cache: Cache, layout: Rows) -> torch.Tensor:
        decoder, rows, threads = self._weights.decoder, len(tokens), torch.get_num_threads()
        self._attach(cache)
        self._reach(layout.longest)
        logits = torch.empty(rows, decoder.vocabulary)
        if rows == 0:
            return logits
        tokens, positions, table = tokens.contiguous(), positions.contiguous(), layout.table
        runs, shared = layout.runs, layout.shared
        work = _Work(
            tokens=tokens.data_ptr(), positions=positions.data_ptr(), table=table.data_ptr(),
            table_width=table.stride(0), rows=rows, decoded=rows, starts=None if runs is None else runs.data_ptr(),
            pages=None if shared is None else shared.data_ptr(), runs=0 if shared is None else len(shared),
            logits=logits.data_ptr(),
        )  # fmt: skip
        size = self._library.dataflow_step_scratch(ctypes.byref(decoder), layout.longest)
        if len(self._scratch) < threads * size:
            self._scratch = torch.empty(threads * size)
        begins = (LONG * (threads + 1))()
        wrong = self._library.dataflow_step(
            ctypes.byref(decoder), ctypes.byref(work), layout.longest, self._scratch.data_ptr(), size, begins, threads
        )
        if wrong >= 0:
            raise ModelError(
                f"row {wrong} is out of range: found token {int(tokens[wrong])} at position {int(positions[wrong])}; "
                f"give tokens below {decoder.vocabulary} at positions below {layout.longest} with pages in the table"
            )
        return logits

    def _attach(self, cache: Cache) -> None:
        """Point the layers to the cache's tensors."""
        decoder = self._weights.decoder
        expected = (decoder.heads, PAGE, decoder.width)
        for layer, (keys, values) in zip(self._weights.layers, cache.layers, strict=True):
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
