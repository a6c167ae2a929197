"""A packed micro-batch as a model of transformers takes it, on its device."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from operators.training.cpu.tree_blocks import attention_blocks, subtree_ends, visible
from operators.training.learner.packing import Array, TokenTree


@dataclass(frozen=True)
class PackedBlocks:
    """Rows of queries with the keys that they ask, on the device."""

    queries_B_Q: Tensor
    """Node indices int64."""
    keys_B_K: Tensor
    """The same tensor where each row asks itself, from left to right; padding is some node."""
    mask_B_1_Q_K: Tensor | None
    """float32, 0 where a query sees a key and -inf where not; None: it sees those that stand no
    later in its row."""
    gaps_B_1_Q_K: Tensor | None
    """How many positions a key stands before the query, int32; None where there is no mask."""


@dataclass(frozen=True)
class PackedRows:
    """The attention of a packed micro-batch, on the device: an argument of `packed_attention`."""

    blocks: tuple[PackedBlocks, ...]
    back_N: Tensor
    """Where each node's output stands in the queries of the blocks, end to end."""


def on_device(array: Array, device: torch.device) -> Tensor:
    """A copy of `array` on `device`; on a CPU the same memory, where it is contiguous."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)


def packed_inputs(packed: TokenTree, device: torch.device) -> dict[str, Any]:
    """What a model of transformers is called with, to see all nodes at once, as one row [1, N]."""
    rows = _whole_rows if device.type != "cpu" else _tree_blocks
    return {
        "input_ids": on_device(packed.tokens_N, device)[None],
        "position_ids": on_device(packed.positions_N, device)[None],
        "packed_rows": rows(packed, device),
        "use_cache": False,
    }


def _whole_rows(packed: TokenTree, device: torch.device) -> PackedRows:
    """Every row from its first token on: what GPUs compute without a mask."""
    buckets = [on_device(bucket, device) for bucket in packed.buckets]
    blocks = tuple(PackedBlocks(bucket, bucket, None, None) for bucket in buckets)
    return PackedRows(blocks, on_device(packed.back_N, device))


def _tree_blocks(packed: TokenTree, device: torch.device) -> PackedRows:
    """Every node once; see `tree_blocks`."""
    ends_N, (attention, back_N) = (
        subtree_ends(packed.positions_N),
        attention_blocks(packed.positions_N),
    )
    blocks = []
    for block in attention:
        queries, keys = block.queries_B_Q, np.maximum(block.keys_B_K, 0)
        if block.is_causal:
            rows = on_device(queries, device)
            blocks.append(PackedBlocks(rows, rows, None, None))
            continue
        is_visible = visible(queries, block.keys_B_K, ends_N)[:, None]
        positions_N = packed.positions_N.astype(np.int32)
        gaps = positions_N[queries][:, None, :, None] - positions_N[keys][:, None, None]
        mask = on_device(np.where(is_visible, np.float32(0), np.float32(-np.inf)), device)
        blocks.append(
            PackedBlocks(
                on_device(queries, device), on_device(keys, device), mask, on_device(gaps, device)
            )
        )
    return PackedRows(tuple(blocks), on_device(back_N, device))


def computing(dtype: torch.dtype | None, device: torch.device) -> Any:
    """A context in which matrix products are made in `dtype`; None: in the type of the weights."""
    return contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)
