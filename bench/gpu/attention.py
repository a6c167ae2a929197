"""One layer's decode attention by itself, for several tilings of the kernel."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from bench.gpu.systems import Load, Shape
from bench.gpu.timing import seconds_in_graph
from bench.report import Report

LAYERS = 4
"""With memory of their own, so that a repeat does not find its keys in the cache."""
TILES = (
    (128, 4, 3),
    (128, 4, 4),
    (128, 2, 3),
    (64, 4, 3),
    (64, 2, 5),
    (64, 2, 3),
    (256, 4, 2),
    (256, 8, 2),
)
"""Positions of a trip, warps, stages."""


def measure_attention(
    report: Report,
    seconds: float,
    device: torch.device,
    bandwidth: float,
    models: dict[str, Shape],
    load: Load,
) -> None:
    """Time of one layer with each tiling, and the share of the bandwidth; after `seconds`, the rest
    is skipped.
    """
    from operators.engine.attention import decode

    end = time.monotonic() + seconds
    for name, shape in models.items():
        for system, attend in (*_tilings(device), ("torch", decode)):
            case = f"attention {name}"
            if time.monotonic() > end:
                report.add(case=case, system=system, skipped="no time is left")
                continue
            calls, nbytes = _calls(shape, load, device, attend)
            try:
                seconds_each = seconds_in_graph(calls, device) / LAYERS
            except RuntimeError as error:
                report.add(case=case, system=system, skipped=f"failed: {str(error)[:120]}")
                continue
            share = nbytes / seconds_each / bandwidth
            report.add(
                case=case, system=system, microseconds=seconds_each * 1e6, bandwidth_share=share
            )


def _tilings(device: torch.device) -> Iterator[tuple[str, Callable[..., torch.Tensor]]]:
    if device.type != "cuda":
        return
    from operators.engine.cuda.paged_attention import Tiles, paged_attention

    for block, warps, stages in TILES:
        tiles = Tiles(block=block, warps=warps, stages=stages)
        yield (
            f"block {block}, warps {warps}, stages {stages}",
            partial(paged_attention, tiles=tiles),
        )


def _calls(
    shape: Shape, load: Load, device: torch.device, attend: Callable[..., torch.Tensor]
) -> tuple[Callable[[], None], int]:
    """Attention of a few layers with memory of their own, rows in the middle of their completions;
    bytes of one.
    """
    from operators.engine.attention import AttentionLayout, KVCache
    from operators.engine.pages import PAGE, pages_for

    heads, kv_heads = shape.sizes["num_attention_heads"], shape.sizes["num_key_value_heads"]
    width = shape.sizes.get("head_dim", shape.sizes["hidden_size"] // heads)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    row_pages = pages_for(load.prompt + load.tokens)
    rng = np.random.default_rng(0)
    table = torch.from_numpy(rng.permutation(load.rollouts * row_pages).astype(np.int32)).view(
        load.rollouts, row_pages
    )
    at = load.prompt + rng.integers(0, load.tokens, load.rollouts)
    layout = AttentionLayout(
        KVCache(load.rollouts * row_pages),
        torch.from_numpy(at).to(device),
        row_pages * PAGE,
        table.to(device),
    )
    query = torch.randn(heads, load.rollouts, width, device=device).to(dtype)
    key = torch.randn(kv_heads, load.rollouts, width, device=device).to(dtype)
    pages = [layout.cache.layer(layer, key[None], key[None]) for layer in range(LAYERS)]
    for sides in pages:
        for side in sides:
            side.normal_()

    def calls() -> None:
        for keys, values in pages:
            attend(query, key, key, keys, values, layout, width**-0.5, None, None)

    return calls, int((at + 1).sum()) * 2 * kv_heads * width * key.element_size()
