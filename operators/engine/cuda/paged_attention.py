"""Triton kernels of decode attention over pages: one query token per row, the sequence split among
programs.

Flash-decoding (Dao et al. 2023): each split attends to its part of a row's positions and leaves a
partial softmax; a second kernel merges the parts. All query heads of one key/value head go through
one matrix product. The grid depends on shapes alone, so that a step can be captured as a CUDA
graph. Axes: n rows, H query heads, K key/value heads, D width of a head, E width of a value, P
pages, W pages of a row, S splits.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
# mypy: disable-error-code="import-not-found, unused-ignore"

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from operators.engine.attention import AttentionLayout
from operators.engine.pages import PAGE
from operators.models.folders import ModelError

PROGRAMS_PER_MULTIPROCESSOR = 8
"""Programs wanted in all, while a split still has a block to do."""

SPLIT_TOKENS = 1024
"""Most positions of one split, so that a long row does not end long after the others."""

MOST_SPLITS = 64
"""What the second kernel merges at once."""

SPARE_BYTES = 16 * 1024
"""Of a multiprocessor's shared memory, for what is no key and no value."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LEAST_DOT = 16
"""Smallest side of a matrix product in Triton."""


def splits(rows: int, kv_heads: int, tokens: int, multiprocessors: int, block: int = 64) -> int:
    """Into how many parts each row is split, when rows may have up to `tokens` positions; at least
    1.
    """
    for_width = -(-multiprocessors * PROGRAMS_PER_MULTIPROCESSOR // max(1, rows * kv_heads))
    for_length = -(-tokens // SPLIT_TOKENS)
    return max(1, min(-(-tokens // block), MOST_SPLITS, max(for_width, for_length)))


@dataclass(frozen=True)
class Tiles:
    """How a program works; measured on an H200 by `python -m bench.gpu --only attention`."""

    block: int = 128
    """Positions of one trip through its loop, a power of two from 16 on."""
    warps: int = 4
    stages: int = 3
    """Trips whose loads are under way at once."""


def fitted(tiles: Tiles, position_bytes: int, shared_bytes: int) -> Tiles:
    """The tiles, with shorter trips, and at last fewer under way, where wide heads or a small
    device need it.

    position_bytes: of a key and a value. shared_bytes: of a multiprocessor's memory for one
    program.
    """
    block, room = tiles.block, shared_bytes - SPARE_BYTES
    while block > LEAST_DOT and block * position_bytes * tiles.stages > room:
        block //= 2
    return replace(
        tiles, block=block, stages=max(1, min(tiles.stages, room // (block * position_bytes)))
    )


@dataclass(frozen=True)
class Chip:
    """What the grid and the tiles depend on."""

    multiprocessors: int = 1
    shared_bytes: int = 227 * 1024
    """Of a multiprocessor, for one program."""


@functools.cache
def chip(device: torch.device) -> Chip:
    """This device's; of the processor, where Triton interprets, one multiprocessor of an H100."""
    if device.type != "cuda":
        return Chip()
    properties = torch.cuda.get_device_properties(device)
    return Chip(
        properties.multi_processor_count,
        getattr(properties, "shared_memory_per_block_optin", 48 * 1024),
    )


def paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    layout: AttentionLayout,
    scale: float,
    window: int | None,
    softcap: float | None,
    tiles: Tiles = Tiles(),
) -> torch.Tensor:
    """Write the new key and value into their pages and attend to all positions up to them.

    The `Kernel` of `operators.engine.attention`: query [H, n, D], key [K, n, D], value [K, n, E],
    keys [P, K, PAGE, D], values [P, K, PAGE, E]; returns [n, H, E].

    Raises:
        ModelError: a type of numbers that it does not know.
    """
    heads, rows, width = query.shape
    kv_heads, value_width = key.shape[0], value.shape[2]
    if (
        keys.dtype not in DTYPES
        or not query.dtype == key.dtype == value.dtype == keys.dtype == values.dtype
    ):
        raise ModelError(
            "the Triton kernel attends in bfloat16, float16 or float32, all alike; found query"
            f" {query.dtype}, key {key.dtype}, cache {keys.dtype}; attend with torch's operators"
        )
    wide, value_wide = (
        max(LEAST_DOT, triton.next_power_of_2(size)) for size in (width, value_width)
    )
    limits = chip(query.device)
    tiles = fitted(tiles, (wide + value_wide) * keys.element_size(), limits.shared_bytes)
    table, positions = layout.table, layout.positions
    parts = splits(rows, kv_heads, layout.longest, limits.multiprocessors, tiles.block)
    out = torch.empty(rows, heads, value_width, dtype=query.dtype, device=query.device)
    if parts == 1:
        mixed, most, total = out, out, out
    else:
        numbers = {"dtype": torch.float32, "device": query.device}
        mixed = torch.empty(rows, heads, parts, value_width, **numbers)  # type: ignore[call-overload]
        most = torch.empty(rows, heads, parts, **numbers)  # type: ignore[call-overload]
        total = torch.empty_like(most)
    repeats = heads // kv_heads
    with torch.cuda.device_of(query):
        _attend[(rows, kv_heads, parts)](
            query,
            key,
            value,
            keys,
            values,
            table,
            positions,
            mixed,
            most,
            total,
            *(stride for side in (query, key, value) for stride in side.stride()),
            *keys.stride(),
            *values.stride(),
            table.stride(0),
            scale,
            softcap or 0.0,
            parts,
            window=window or 0,
            capped=softcap is not None,
            repeats=repeats,
            width=width,
            value_width=value_width,
            padded=max(LEAST_DOT, triton.next_power_of_2(repeats)),
            wide=wide,
            value_wide=value_wide,
            page=PAGE,
            block=tiles.block,
            whole=parts == 1,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )
        if parts > 1:
            _merge[(rows * heads,)](
                mixed,
                most,
                total,
                out,
                parts,
                value_width=value_width,
                value_wide=value_wide,
                padded=triton.next_power_of_2(parts),
                num_warps=2,
            )
    return out


@triton.jit(do_not_specialize=["splits"])
def _attend(
    query,
    key,
    value,
    keys,
    values,
    table,
    positions,
    mixed,
    most,
    total,
    q_head,
    q_row,
    q_at,
    k_head,
    k_row,
    k_at,
    v_head,
    v_row,
    v_at,
    keys_page,
    keys_head,
    keys_place,
    keys_at,
    values_page,
    values_head,
    values_place,
    values_at,
    table_row,
    scale,
    softcap,
    splits,
    window: tl.constexpr,
    capped: tl.constexpr,
    repeats: tl.constexpr,
    width: tl.constexpr,
    value_width: tl.constexpr,
    padded: tl.constexpr,
    wide: tl.constexpr,
    value_wide: tl.constexpr,
    page: tl.constexpr,
    block: tl.constexpr,
    whole: tl.constexpr,
):
    """One row, one key/value head, one part of the positions before the newest; the first part adds
    the newest.
    """
    row, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    position = tl.load(positions + row).to(tl.int32)
    begin = position * 0
    if window > 0:
        begin = tl.maximum(position - (window - 1), 0)
    share = tl.cdiv(tl.cdiv(position - begin, splits), block) * block
    first = begin + part * share
    last = tl.minimum(first + share, position)

    repeat = tl.arange(0, padded)
    at, value_at = tl.arange(0, wide), tl.arange(0, value_wide)
    real, in_width, value_in_width = repeat < repeats, at < width, value_at < value_width
    query_heads = head * repeats + repeat
    q = tl.load(
        query + query_heads[:, None] * q_head + row * q_row + at[None, :] * q_at,
        mask=real[:, None] & in_width[None, :],
        other=0.0,
    )
    top = tl.full([padded], -float("inf"), tl.float32)
    sums = tl.zeros([padded], tl.float32)
    acc = tl.zeros([padded, value_wide], tl.float32)
    if part == 0:
        new_key = tl.load(key + head * k_head + row * k_row + at * k_at, mask=in_width, other=0.0)
        new_value = tl.load(
            value + head * v_head + row * v_row + value_at * v_at, mask=value_in_width, other=0.0
        )
        home = tl.load(table + row * table_row + position // page).to(tl.int64)
        place = position % page
        tl.store(
            keys + home * keys_page + head * keys_head + place * keys_place + at * keys_at,
            new_key,
            mask=in_width,
        )
        tl.store(
            values
            + home * values_page
            + head * values_head
            + place * values_place
            + value_at * values_at,
            new_value,
            mask=value_in_width,
        )
        top = tl.sum(q.to(tl.float32) * new_key.to(tl.float32)[None, :], 1) * scale
        if capped:
            top = softcap * (2.0 * tl.sigmoid(2.0 * top / softcap) - 1.0)
        sums = tl.full([padded], 1.0, tl.float32)
        acc = tl.zeros([padded, value_wide], tl.float32) + new_value.to(tl.float32)[None, :]

    for start in range(first, last, block):
        token = start + tl.arange(0, block)
        valid = token < last
        pages = tl.load(table + row * table_row + token // page, mask=valid, other=0).to(tl.int64)
        places = token % page
        k = tl.load(
            keys
            + (pages * keys_page + places * keys_place + head * keys_head)[None, :]
            + at[:, None] * keys_at,
            mask=in_width[:, None] & valid[None, :],
            other=0.0,
        )
        scores = tl.dot(q, k, input_precision="ieee") * scale
        if capped:
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
        scores = tl.where(valid[None, :], scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        fade = tl.exp(top - higher)
        v = tl.load(
            values
            + (pages * values_page + places * values_place + head * values_head)[:, None]
            + value_at[None, :] * values_at,
            mask=valid[:, None] & value_in_width[None, :],
            other=0.0,
        )
        acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
        sums = sums * fade + tl.sum(weights, 1)
        top = higher

    heads = tl.num_programs(1) * repeats
    to = row * heads + query_heads
    if whole:
        tl.store(
            mixed + to[:, None] * value_width + value_at[None, :],
            (acc / sums[:, None]).to(mixed.dtype.element_ty),
            mask=real[:, None] & value_in_width[None, :],
        )
    else:
        to = to * splits + part
        tl.store(most + to, top, mask=real)
        tl.store(total + to, sums, mask=real)
        tl.store(
            mixed + to[:, None] * value_width + value_at[None, :],
            acc,
            mask=real[:, None] & value_in_width[None, :],
        )


@triton.jit(do_not_specialize=["splits"])
def _merge(
    mixed,
    most,
    total,
    out,
    splits,
    value_width: tl.constexpr,
    value_wide: tl.constexpr,
    padded: tl.constexpr,
):
    """The parts of one row and head, weighed by their softmax sums."""
    to = tl.program_id(0).to(tl.int64)
    part, at = tl.arange(0, padded), tl.arange(0, value_wide)
    real = part < splits
    top = tl.load(most + to * splits + part, mask=real, other=-float("inf"))
    sums = tl.load(total + to * splits + part, mask=real, other=0.0)
    filled = real & (sums != 0.0)
    weights = tl.where(filled, tl.exp(top - tl.max(top, 0)), 0.0)
    acc = tl.load(
        mixed + (to * splits + part)[:, None] * value_width + at[None, :],
        mask=filled[:, None] & (at < value_width)[None, :],
        other=0.0,
    )
    merged = tl.sum(acc * weights[:, None], 0) / tl.sum(sums * weights, 0)
    tl.store(out + to * value_width + at, merged.to(out.dtype.element_ty), mask=at < value_width)
