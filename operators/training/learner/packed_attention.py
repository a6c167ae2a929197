"""Attention over packed nodes for any model of transformers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from operators.training.learner.packed_inputs import PackedBlocks, PackedRows

ATTENTION = "dataflow_packed"


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_rows: PackedRows,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Causal attention within blocks gathered from the nodes by index; an attention function of
    transformers.

    query, key, value: [1, heads, N, D]. Returns [1, N, heads, D]. Rows that ask themselves are
    padded at the right, where no token before it sees it, so a full-attention layer needs no mask
    of them. Raises ValueError for variants that it does not compute (masks of the model's own, soft
    caps, sinks, biases).
    """
    if attention_mask is not None:
        raise ValueError("packed attention does not compute a mask of the model's own")
    for unknown in ("softcap", "s_aux", "position_bias"):
        if options.get(unknown) is not None:
            raise ValueError(f"packed attention does not compute '{unknown}'")
    query_N_H_D, key_N_H_D, value_N_H_D = (
        x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value)
    )
    outputs = []
    # whose backward pass in 16 bits is seven times as slow
    with torch.autocast("cpu", enabled=False):
        for block in packed_rows.blocks:
            rows = [
                x.index_select(0, index.view(-1)).view(*index.shape, *x.shape[1:]).transpose(1, 2)
                for x, index in (
                    (query_N_H_D, block.queries_B_Q),
                    (key_N_H_D, block.keys_B_K),
                    (value_N_H_D, block.keys_B_K),
                )
            ]
            mask = _mask(block, sliding_window, query_N_H_D.dtype)
            out = F.scaled_dot_product_attention(
                rows[0],
                rows[1],
                rows[2],
                attn_mask=mask,
                is_causal=mask is None,
                dropout_p=dropout,
                scale=scaling,
                enable_gqa=query.shape[1] != key.shape[1],
            )
            outputs.append(out.transpose(1, 2).reshape(-1, out.shape[1], out.shape[3]))
        flat = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return flat.index_select(0, packed_rows.back_N)[None], None


def _mask(block: PackedBlocks, sliding_window: int | None, dtype: torch.dtype) -> Tensor | None:
    """What the queries of a block do not see; None: what stands behind them in their row."""
    length = block.keys_B_K.shape[1]
    if block.mask_B_1_Q_K is None or block.gaps_B_1_Q_K is None:
        if sliding_window is None or sliding_window >= length:
            return None
        at = torch.arange(length, device=block.keys_B_K.device)
        return (at[:, None] >= at) & (at[:, None] - at < sliding_window)
    mask = block.mask_B_1_Q_K.to(dtype)
    if sliding_window is None:
        return mask
    return mask.masked_fill(block.gaps_B_1_Q_K >= sliding_window, -torch.inf)
