"""What of the GPU path serves a model here; imports Triton only where there is a GPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch

from operators.engine import sampler
from operators.engine.attention import Kernel
from operators.engine.sampler import Draw

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""What the attention kernel computes in."""


def has_triton(device: torch.device) -> bool:
    """Whether kernels in Triton run on this device."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def attention_kernel(model: torch.nn.Module) -> Kernel | None:
    """The kernel of decode attention for a model on a GPU; None elsewhere, and for other types of
    numbers.
    """
    first = next(model.parameters())
    if not has_triton(first.device) or first.dtype not in DTYPES:
        return None
    from operators.engine.cuda.paged_attention import paged_attention

    return paged_attention


def drawing(device: torch.device) -> Callable[..., Draw]:
    """How tokens are drawn on this device: `sampler.draw`, or the same with kernels of its own."""
    if not has_triton(device):
        return sampler.draw
    from operators.engine.cuda.draw import draw

    return draw
