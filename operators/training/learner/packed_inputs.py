"""A packed micro-batch as a model of transformers takes it, on its device."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from operators.training.learner.packing import Array, TokenTree


@dataclass(frozen=True)
class PackedRows:
    """The attention rows of a packed micro-batch, on the device: an argument of `packed_attention`."""

    buckets: tuple[Tensor, ...]
    """Node indices int64 [B, L], right padded."""
    back_N: Tensor
    """Where each node's output stands in the buckets, end to end."""


def on_device(array: Array, device: torch.device) -> Tensor:
    """A copy of `array` on `device`; on a CPU the same memory, where it is contiguous."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)


def packed_inputs(packed: TokenTree, device: torch.device) -> dict[str, Any]:
    """What a model of transformers is called with, to see all nodes at once, as one row [1, N]."""
    buckets = tuple(on_device(bucket, device) for bucket in packed.buckets)
    return {
        "input_ids": on_device(packed.tokens_N, device)[None],
        "position_ids": on_device(packed.positions_N, device)[None],
        "packed_rows": PackedRows(buckets, on_device(packed.back_N, device)),
        "use_cache": False,
    }


def computing(dtype: torch.dtype | None, device: torch.device) -> Any:
    """A context in which matrix products are made in `dtype`; None: in the type of the weights."""
    return contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)
