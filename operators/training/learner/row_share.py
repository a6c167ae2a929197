"""Rows of hidden states that several ranks have alike, of which each computes a share; uses torch.

Axis suffixes as in `head`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


class RowShare:
    """This rank's share of the U rows, and of the P pairs."""

    def __init__(self, ranks: dist.ProcessGroup, rows: int, rows_P: Tensor) -> None:
        self.ranks, self.count, self._pair_count = ranks, rows, len(rows_P)
        self.most = -(-rows // ranks.size())
        """Rows of a share; the last ones may have less, or none."""
        start = min(rows, self.most * ranks.rank())
        self.own = slice(start, min(rows, start + self.most))
        self.pairs = pairs_within(rows_P, self.own)
        self.rows_P = rows_P[self.pairs] - start

    def hidden(self, hidden_U_D: Tensor) -> Tensor:
        """Of the own rows."""
        return _OwnRows.apply(hidden_U_D, self)  # type: ignore[no-any-return, no-untyped-call]

    def all_of(
        self, normalizer_U: Tensor, picked_P: Tensor, entropy_U: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Of all rows and pairs, from those of the own ones."""
        columns = [normalizer_U] if entropy_U is None else [normalizer_U, entropy_U]
        numbers_U: Tensor = _All.apply(  # type: ignore[no-untyped-call]
            torch.stack(columns, -1), self.gathered, self.own, self.ranks.size()
        )
        picked_P = _All.apply(  # type: ignore[no-untyped-call]
            picked_P, self.spread, self.pairs, self.ranks.size()
        )
        return numbers_U[:, 0], picked_P, None if entropy_U is None else numbers_U[:, 1]

    def gathered(self, own: Tensor) -> Tensor:
        """Rows [U, n] of all ranks, from the own ones."""
        padded = own.new_zeros(self.most, own.shape[1])
        padded[: len(own)] = own
        whole = own.new_empty(self.ranks.size(), *padded.shape)
        dist.all_gather([*whole.unbind()], padded, group=self.ranks)
        return whole.flatten(0, 1)[: self.count]

    def spread(self, own_P: Tensor) -> Tensor:
        """Pairs [P] of all ranks, from the own ones."""
        whole_P = own_P.new_zeros(self._pair_count)
        whole_P[self.pairs] = own_P
        dist.all_reduce(whole_P, group=self.ranks)
        return whole_P


def pairs_within(rows_P: Tensor, own: slice) -> Tensor:
    """Which pairs are of these rows."""
    inside_P: Tensor = (rows_P >= own.start) & (rows_P < own.stop)
    return inside_P.nonzero().squeeze(1)


class _OwnRows(torch.autograd.Function):
    """Own rows of what all ranks have alike; its gradient is whole on all of them."""

    @staticmethod
    def forward(ctx: Any, hidden_U_D: Tensor, share: RowShare) -> Tensor:
        ctx.share = share
        return hidden_U_D[share.own].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_own: Tensor) -> tuple[Tensor, None]:
        return ctx.share.gathered(by_own).div_(ctx.share.ranks.size()), None


class _All(torch.autograd.Function):
    """Of all ranks, from each rank's own, whose gradient is times the ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        own: Tensor,
        collect: Callable[[Tensor], Tensor],
        places: slice | Tensor,
        ranks: int,
    ) -> Tensor:
        ctx.places, ctx.ranks = places, ranks
        return collect(own)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_all: Tensor) -> tuple[Tensor, None, None, None]:
        return by_all[ctx.places] * ctx.ranks, None, None, None
