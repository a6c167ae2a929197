"""Attention over packed nodes for any model of transformers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from operators.training.learner.packed_inputs import PackedRows

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
    **rest: Any,
) -> tuple[Tensor, None]:
    """Causal attention within rows gathered from the nodes by index; an attention function of transformers.

    query, key, value: [1, heads, N, D]. Returns [1, N, heads, D]. Padding stands at the right of the rows,
    where no token before it sees it, so a full-attention layer needs no mask. Raises ValueError for variants
    that it does not compute (masks of the model's own, soft caps, sinks, biases).
    """
    if attention_mask is not None:
        raise ValueError("packed attention does not compute a mask of the model's own")
    for unknown in ("softcap", "s_aux", "position_bias"):
        if rest.get(unknown) is not None:
            raise ValueError(f"packed attention does not compute '{unknown}'")
    query_N_H_D, key_N_H_D, value_N_H_D = (x[0].transpose(0, 1) for x in (query, key, value))
    is_grouped = query.shape[1] != key.shape[1]
    outputs = []
    for bucket_B_L in packed_rows.buckets:
        batch, length = bucket_B_L.shape
        index = bucket_B_L.view(-1)
        rows = [
            x.index_select(0, index).view(batch, length, *x.shape[1:]).transpose(1, 2)
            for x in (query_N_H_D, key_N_H_D, value_N_H_D)
        ]
        mask = None
        if sliding_window is not None and sliding_window < length:
            at = torch.arange(length, device=query.device)
            mask = (at[:, None] >= at) & (at[:, None] - at < sliding_window)
        out = F.scaled_dot_product_attention(
            rows[0], rows[1], rows[2],
            attn_mask=mask, is_causal=mask is None, dropout_p=dropout, scale=scaling, enable_gqa=is_grouped,
        )  # fmt: skip
        outputs.append(out.transpose(1, 2).reshape(batch * length, out.shape[1], out.shape[3]))
    flat = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return flat.index_select(0, packed_rows.back_N)[None], None
