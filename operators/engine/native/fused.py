"""One forward pass of a whole decoder in C: from tokens to logits, writing the paged cache on its
way.

It computes decoded rows, then the tokens of new prefixes as rows. Axes: n decoded rows, I new
prefixes, N rows in all, V vocabulary, P pages of PAGE tokens, W pages of a row, K key/value heads,
D width of a head.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from operators.engine.attention import (
    AttentionLayout,
    KVCache,
    copy_partial_pages,
    huge_pages,
)
from operators.engine.native.attention import DTYPES, library
from operators.engine.native.packing import LONG, POINTER, PackedWeights, reason_against
from operators.engine.pages import PAGE, Prefix
from operators.models.folders import ModelError


class RowsStruct(ctypes.Structure):
    """See `NativeRows` in decoder.c."""

    _fields_ = [
        ("tokens", POINTER),
        ("positions", POINTER),
        ("table", POINTER),
        ("table_rows", POINTER),
        ("table_width", LONG),
        ("rows", LONG),
        ("starts", POINTER),
        ("pages", POINTER),
        ("runs", LONG),
        ("near", POINTER),
        ("alike", POINTER),
        ("wanted", POINTER),
        ("wanted_count", LONG),
        ("logits", POINTER),
    ]


@dataclass(frozen=True, kw_only=True)
class NativeRows:
    """The rows of a step; a prefix is a run of rows that share all pages."""

    tokens: torch.Tensor
    """int64 [N], dense."""
    positions: torch.Tensor
    """int64 [N], dense."""
    longest: int
    """The largest position plus one."""
    table: torch.Tensor
    """int32 [n + I, W]."""
    table_rows: torch.Tensor | None
    """Which of its rows each row has, int32 [N]; None: its own."""
    runs: torch.Tensor | None
    """int32 [r + 1], dense."""
    shared: torch.Tensor | None
    """int32 [r], dense."""
    near: torch.Tensor | None
    """The page that each run's first one begins like, int32 [r]; None: there are no prefixes."""
    alike: torch.Tensor | None
    """For so many tokens, int32 [r]; 0: none."""
    wanted: torch.Tensor | None
    """Rows whose logits are asked for, int64, ascending; None: all."""

    @property
    def rows(self) -> int:
        """N."""
        return len(self.tokens)

    @staticmethod
    def of(
        tokens: torch.Tensor,
        positions: torch.Tensor,
        layout: AttentionLayout,
        new: Sequence[Prefix],
    ) -> NativeRows:
        """The rows of `layout`, whose newest tokens are `tokens` at `positions` [n], and those of
        the prefixes.
        """
        n = len(tokens)
        runs, shared = (None, None) if layout.runs is None else layout.runs()
        if not new:
            return NativeRows(
                tokens=tokens.contiguous(),
                positions=positions.contiguous(),
                longest=layout.longest,
                table=layout.table,
                table_rows=None,
                runs=runs,
                shared=shared,
                near=None,
                alike=None,
                wanted=None,
            )
        begins = [prefix.begin for prefix in new]
        counts = np.array(
            [len(prefix.tokens) - begin for prefix, begin in zip(new, begins, strict=True)]
        )
        ends = n + np.cumsum(counts)
        wide = max(layout.table.shape[1], *(len(prefix.tables[0]) for prefix in new))
        table = torch.zeros(n + len(new), wide, dtype=torch.int32)
        table[:n, : layout.table.shape[1]] = layout.table[:n]
        for i, prefix in enumerate(new):
            table[n + i, : len(prefix.tables[0])] = torch.tensor(
                prefix.tables[0], dtype=torch.int32
            )
        if runs is None or shared is None:
            runs, shared = torch.arange(n + 1, dtype=torch.int32), torch.zeros(n, dtype=torch.int32)
        fresh = np.concatenate(
            [prefix.tokens[begin:] for prefix, begin in zip(new, begins, strict=True)]
        )
        places = [
            np.arange(begin, len(prefix.tokens)) for prefix, begin in zip(new, begins, strict=True)
        ]
        return NativeRows(
            tokens=torch.cat([tokens, torch.from_numpy(fresh.astype(np.int64))]),
            positions=torch.cat([positions, torch.from_numpy(np.concatenate(places))]),
            longest=max(layout.longest, *(len(prefix.tokens) for prefix in new)),
            table=table,
            table_rows=torch.from_numpy(
                np.concatenate([np.arange(n), np.repeat(n + np.arange(len(new)), counts)]).astype(
                    np.int32
                )
            ),
            runs=torch.cat([runs, torch.from_numpy(ends.astype(np.int32))]),
            shared=torch.cat([shared, torch.full((len(new),), wide, dtype=torch.int32)]),
            near=torch.tensor(
                [-1] * len(shared) + [prefix.near for prefix in new], dtype=torch.int32
            ),
            alike=torch.tensor(
                [0] * len(shared) + [prefix.alike for prefix in new], dtype=torch.int32
            ),
            wanted=torch.from_numpy(np.concatenate([np.arange(n), ends - 1])),
        )

    def structure(self, logits: torch.Tensor) -> RowsStruct:
        """As C reads it; the tensors have to live as long."""

        def place(tensor: torch.Tensor | None) -> int | None:
            return None if tensor is None else tensor.data_ptr()

        return RowsStruct(
            tokens=place(self.tokens),
            positions=place(self.positions),
            table=place(self.table),
            table_rows=place(self.table_rows),
            table_width=self.table.stride(0),
            rows=self.rows,
            starts=place(self.runs),
            pages=place(self.shared),
            runs=0 if self.shared is None else len(self.shared),
            near=place(self.near),
            alike=place(self.alike),
            wanted=place(self.wanted),
            wanted_count=0 if self.wanted is None else len(self.wanted),
            logits=place(logits),
        )


def supports(model: torch.nn.Module) -> bool:
    """Whether `FusedStep` can compute this model here; `families.reason_against` says why not."""
    return library() is not None and reason_against(model) is None


class FusedStep:
    """A model's forward pass in C: a row's logits depend on that row alone, bit by bit."""

    def __init__(self, model: Any, precision: torch.dtype | None = None) -> None:
        """Pack the weights of `model`.

        Args:
            precision: of the matrix products, float32 or bfloat16; None: the weights' own. In
                bfloat16, weights and what they multiply are rounded to it, and sums are float32, as
                is everything between products.

        Raises:
            ModelError: there is no C compiler, or the model is not of the kind that the kernels
                know.
        """
        lib = library()
        against = (
            "there is no C compiler that can build the kernels"
            if lib is None
            else reason_against(model)
        )
        if against is not None or lib is None:
            raise ModelError(
                f"the fused step cannot compute this model: {against}; use the model's own forward"
                " pass"
            )
        lib.dataflow_pack.argtypes = (POINTER, LONG, LONG)
        lib.dataflow_lanes.restype = LONG
        lib.dataflow_step_scratch.argtypes, lib.dataflow_step_scratch.restype = (
            (POINTER, LONG),
            LONG,
        )
        lib.dataflow_step.argtypes = (POINTER, POINTER, LONG, POINTER, LONG, POINTER, LONG)
        lib.dataflow_step.restype = LONG
        self._library = lib
        self._model = model
        self._weights = PackedWeights(lib, model, precision or model.lm_head.weight.dtype)
        self._angles = (torch.empty(0, 0), torch.empty(0, 0))
        self._scratch = torch.empty(0)
        decoder = self._weights.decoder
        self._like = torch.empty(
            1, decoder.heads, 0, decoder.width, dtype=model.lm_head.weight.dtype
        )

    @property
    def vocabulary(self) -> int:
        """V."""
        return int(self._weights.decoder.vocabulary)

    def refresh(self) -> None:
        """Take over the weights that the model has now; to be called after every change of them."""
        self._weights.refresh()

    def read_windows(self) -> None:
        """Take over the windows that the model has now."""
        self._weights.read_windows()

    def let_go(self) -> None:
        """Give back what it has packed, until `refresh`; the model's weights may go as well
        meanwhile.
        """
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
        """Logits of each row's next token and of each new prefix's, float32 [n + I, V]; the cache
        is filled on the way.

        Args:
            tokens: the newest token of each row, int64 [n].
            positions: where it stands, int64 [n].
            layout: table, runs and longest of the rows; its positions are not read.
            new: prefixes to compute anew; their pages, the partial one of each row too, are filled.
                What a prefix has cached was there before, or is computed by an earlier one of
                these.

        Raises:
            ModelError: a token or position is out of range, or the cache is not of the model's
                shape.
        """
        work = NativeRows.of(tokens, positions, layout, new)
        decoder, threads = self._weights.decoder, torch.get_num_threads()
        self._attach(cache)
        self._reach(work.longest)
        logits = torch.empty(
            work.rows if work.wanted is None else len(work.wanted), decoder.vocabulary
        )
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
                f"row {wrong} is out of range: found token {int(work.tokens[wrong])} at position"
                f" {int(work.positions[wrong])}; give tokens below {decoder.vocabulary} at"
                f" positions below {work.longest}, with pages in the table"
            )
        copy_partial_pages(cache, new, torch.from_numpy)
        return logits

    def _attach(self, cache: KVCache) -> None:
        """Point the layers to the cache's tensors, which are allocated where they are missing."""
        decoder = self._weights.decoder
        expected = (decoder.heads, PAGE, decoder.width)
        like = self._like
        layers = [cache.layer(index, like, like) for index in range(decoder.layer_count)]
        for layer, (keys, values) in zip(self._weights.layers, layers, strict=True):
            if (
                keys.shape[1:] != expected
                or keys.shape != values.shape
                or keys.dtype not in DTYPES
                or keys.dtype != values.dtype
                or not keys.is_contiguous()
                or not values.is_contiguous()
            ):
                raise ModelError(
                    f"the cache does not fit the model: found {tuple(keys.shape)} and"
                    f" {tuple(values.shape)} of {keys.dtype}; give dense pages of {expected} in"
                    " float32 or bfloat16"
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
        self._weights.decoder.cosines, self._weights.decoder.sines = (
            cosines.data_ptr(),
            sines.data_ptr(),
        )
