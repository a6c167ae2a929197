"""What one fused step computes, as the kernel reads it: decoded rows, then the tokens of new prefixes as rows.

Axes: n decoded rows, I new prefixes, N rows in all, W pages of a row.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from operators.engine.attention import AttentionLayout
from operators.engine.native.packing import LONG, POINTER
from operators.engine.pages import PAGE
from operators.engine.prefill import Prefix


class Structure(ctypes.Structure):
    """See `NativeRows` in decoder.c."""

    _fields_ = [
        ("tokens", POINTER), ("positions", POINTER), ("table", POINTER), ("table_rows", POINTER), ("table_width", LONG),
        ("rows", LONG), ("decoded", LONG), ("starts", POINTER), ("pages", POINTER), ("runs", LONG), ("joined", POINTER),
        ("wanted", POINTER), ("wanted_count", LONG), ("logits", POINTER),
    ]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class NativeRows:
    """The rows of a step; a prefix is a run of rows that share all pages."""

    tokens: torch.Tensor
    """int64 [N], dense."""
    positions: torch.Tensor
    """int64 [N], dense."""
    decoded: int
    """n."""
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
    joined: torch.Tensor | None
    """Runs that stay on the thread of the one before them, int32 [r]; None: none."""
    wanted: torch.Tensor | None
    """Rows whose logits are asked for, int64, ascending; None: all."""

    @property
    def rows(self) -> int:
        """N."""
        return len(self.tokens)

    @staticmethod
    def of(tokens: torch.Tensor, positions: torch.Tensor, layout: AttentionLayout, new: Sequence[Prefix]) -> NativeRows:
        """The rows of `layout`, whose newest tokens are `tokens` at `positions` [n], and those of the prefixes."""
        n = len(tokens)
        if not new:
            return NativeRows(
                tokens=tokens.contiguous(), positions=positions.contiguous(), decoded=n, longest=layout.longest,
                table=layout.table, table_rows=None, runs=layout.runs, shared=layout.shared, joined=None, wanted=None,
            )  # fmt: skip
        begins = [prefix.cached * PAGE for prefix in new]
        counts = np.array([len(prefix.tokens) - begin for prefix, begin in zip(new, begins, strict=True)])
        ends = n + np.cumsum(counts)
        wide = max(layout.table.shape[1], *(len(prefix.tables[0]) for prefix in new))
        table = torch.zeros(n + len(new), wide, dtype=torch.int32)
        table[:n, : layout.table.shape[1]] = layout.table[:n]
        for i, prefix in enumerate(new):
            table[n + i, : len(prefix.tables[0])] = torch.tensor(prefix.tables[0], dtype=torch.int32)
        runs, shared = layout.runs, layout.shared
        if runs is None or shared is None:
            runs, shared = torch.arange(n + 1, dtype=torch.int32), torch.zeros(n, dtype=torch.int32)
        fresh = np.concatenate([prefix.tokens[begin:] for prefix, begin in zip(new, begins, strict=True)])
        places = [np.arange(begin, len(prefix.tokens)) for prefix, begin in zip(new, begins, strict=True)]
        return NativeRows(
            tokens=torch.cat([tokens, torch.from_numpy(fresh.astype(np.int64))]),
            positions=torch.cat([positions, torch.from_numpy(np.concatenate(places))]),
            decoded=n,
            longest=max(layout.longest, *(len(prefix.tokens) for prefix in new)),
            table=table,
            table_rows=torch.from_numpy(
                np.concatenate([np.arange(n), np.repeat(n + np.arange(len(new)), counts)]).astype(np.int32)
            ),
            runs=torch.cat([runs, torch.from_numpy(ends.astype(np.int32))]),
            shared=torch.cat([shared, torch.full((len(new),), wide, dtype=torch.int32)]),
            joined=torch.tensor([0] * len(shared) + joined(new), dtype=torch.int32),
            wanted=torch.from_numpy(np.concatenate([np.arange(n), ends - 1])),
        )

    def structure(self, logits: torch.Tensor) -> Structure:
        """As C reads it; the tensors have to live as long."""

        def place(tensor: torch.Tensor | None) -> int | None:
            return None if tensor is None else tensor.data_ptr()

        return Structure(
            tokens=place(self.tokens), positions=place(self.positions), table=place(self.table),
            table_rows=place(self.table_rows), table_width=self.table.stride(0), rows=self.rows, decoded=self.decoded,
            starts=place(self.runs), pages=place(self.shared), runs=0 if self.shared is None else len(self.shared),
            joined=place(self.joined), wanted=place(self.wanted),
            wanted_count=0 if self.wanted is None else len(self.wanted), logits=place(logits),
        )  # fmt: skip


def joined(new: Sequence[Prefix]) -> list[bool]:
    """Which prefixes stay with the one before: what they have cached may be computed by earlier ones of this step."""
    maker: dict[int, int] = {}
    together = [False] * len(new)
    for i, prefix in enumerate(new):
        made = [maker[page] for page in prefix.tables[0][: prefix.cached] if page in maker]
        if made:
            together[min(made) + 1 : i + 1] = [True] * (i - min(made))
        for page in prefix.tables[0][prefix.cached :]:
            maker[page] = i
    return together


def copy_partial_pages(layers: Sequence[tuple[torch.Tensor, torch.Tensor]], new: Sequence[Prefix]) -> None:
    """Give each row of a new prefix its copy of the last page, where that is not full."""
    pairs: list[tuple[Any, Any]] = []
    for prefix in new:
        last = len(prefix.tokens) // PAGE
        if len(prefix.tokens) % PAGE:
            pairs += [(prefix.tables[0][last], table[last]) for table in prefix.tables[1:]]
    if pairs:
        origin, target = torch.tensor(pairs).T
        for keys, values in layers:
            keys[target] = keys[origin]
            values[target] = values[origin]
