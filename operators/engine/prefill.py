"""The tokens of new prefixes laid out in a flattened sequence, and their causal attention to what
stands before them.

Axes: I new prefixes, N - n new tokens of all, Q of one, L positions, P pages, H query heads, K
key/value heads, D width of a head.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from dataflow.records import AnyArray
from operators.engine.pages import PAGE, Prefix, pages_for


@dataclass(eq=False)
class NewTokens:
    """The tokens of I new prefixes: where they stand in the sequence, and where their keys and
    values go.
    """

    padded: torch.Tensor
    """Index of each prefix's tokens among the new ones, [I, Q], clamped at its end."""
    packed: torch.Tensor
    """Index into the flattened [I * Q] of each new token, [N - n]."""
    source: torch.Tensor
    """Index among the new tokens of each key that is written, [w]; one may go to several pages."""
    page: torch.Tensor
    """The page it goes to, [w]."""
    offset: torch.Tensor
    """Its place in the page, [w]."""
    counts: AnyArray
    """New tokens of each prefix, [I]."""
    before: AnyArray
    """Positions of each prefix that were there already, [I]."""
    tables: list[torch.Tensor]
    """Pages of each prefix, int64; none where nothing was there already."""
    put: Callable[[AnyArray], torch.Tensor]

    @functools.cached_property
    def ends(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the queries, and where the keys, of each prefix begin among those of all, and the
        end, int32 [I + 1].
        """
        counts = np.stack([self.counts, self.counts + self.before])
        ends = np.pad(counts.cumsum(axis=1), ((0, 0), (1, 0)))
        queries, keys = self.put(ends.astype(np.int32))
        return queries, keys

    @functools.cached_property
    def places(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Page and place of the keys of all prefixes, one prefix after the other, int64."""
        lengths = (self.counts + self.before).tolist()
        at = self.put(np.concatenate([np.arange(length) for length in lengths]))
        pairs = zip(self.tables, lengths, strict=True)
        pages = [
            table[: pages_for(length)].repeat_interleave(PAGE)[:length] for table, length in pairs
        ]
        return torch.cat(pages), at % PAGE


@dataclass(frozen=True)
class NewRow:
    """The new part of the flattened row: M tokens."""

    layout: NewTokens
    tokens: torch.Tensor
    """int64 [M]."""
    positions: torch.Tensor
    """int64 [M]."""
    last: AnyArray
    """Index of each prefix's last token among the M."""


def lay_out(prefixes: Sequence[Prefix], put: Callable[[AnyArray], torch.Tensor]) -> NewRow:
    """Where everything goes. `put` brings an array onto the device."""
    counts = np.array([prefix.new for prefix in prefixes])
    ends = np.cumsum(counts)
    firsts = ends - counts
    at = np.arange(int(counts.max()))
    padded = np.minimum(firsts[:, None] + at, ends[:, None] - 1)
    packed = np.nonzero((at < counts[:, None]).ravel())[0]
    positions = np.concatenate([np.arange(p.cached * PAGE, len(p.tokens)) for p in prefixes])
    source, page = [], []
    for first, prefix in zip(firsts, prefixes, strict=True):
        begin, whole, end = (
            prefix.cached * PAGE,
            len(prefix.tokens) // PAGE * PAGE,
            len(prefix.tokens),
        )
        place = np.arange(begin, whole)
        source.append(first + place - begin)
        page.append(np.asarray(prefix.tables[0], np.int64)[place // PAGE])
        tail = np.arange(max(whole, begin), end)
        if len(tail):
            for table in prefix.tables:
                source.append(first + tail - begin)
                page.append(np.full(len(tail), table[whole // PAGE], np.int64))
    sources = np.concatenate(source)
    before = np.array([prefix.cached * PAGE for prefix in prefixes])
    tables: list[torch.Tensor] = []
    if before.any():
        tables = [put(np.asarray(prefix.tables[0], np.int64)) for prefix in prefixes]
    new = NewTokens(
        padded=put(padded),
        packed=put(packed),
        source=put(sources),
        page=put(np.concatenate(page)),
        offset=put(positions[sources] % PAGE),
        counts=counts,
        before=before,
        tables=tables,
        put=put,
    )
    tokens = np.concatenate([prefix.tokens[prefix.cached * PAGE :] for prefix in prefixes])
    return NewRow(new, put(tokens), put(positions), ends - 1)


def write(new: NewTokens, pages: torch.Tensor, fresh: torch.Tensor) -> None:
    """Put the new keys (or values) [K, N - n, D] where they belong in pages [P, K, PAGE, D]."""
    pages[new.page, :, new.offset] = fresh.transpose(0, 1)[new.source]


def prefill(
    new: NewTokens,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Causal attention of the new tokens to their prefix and to each other: [N - n, H, D]."""
    if serves_ragged(query, value, softcap):
        k, v = key.transpose(0, 1), value.transpose(0, 1)
        if new.tables:
            page, place = new.places
            k, v = keys[page, :, place], values[page, :, place]
        return ragged(query.transpose(0, 1), k, v, new, scale, window)
    if not new.tables:
        q, k, v = (side[:, new.padded].transpose(0, 1) for side in (query, key, value))
        mixed = _causal(q, k, v, scale, window, softcap)
        return mixed.transpose(1, 2).flatten(0, 1)[new.packed]
    parts, first = [], 0
    for table, count, before in zip(
        new.tables, new.counts.tolist(), new.before.tolist(), strict=True
    ):
        q, length = query[None, :, first : first + count], before + count
        first += count
        pages = table[: pages_for(length)]
        k, v = (
            side[pages].transpose(0, 1).flatten(1, 2)[None, :, :length] for side in (keys, values)
        )
        at = torch.arange(length, device=q.device)
        sees = at <= at[before:, None]
        if window is not None:
            sees = sees & (at > at[before:, None] - window)
        parts.append(_masked(q, k, v, sees, scale, softcap)[0].transpose(0, 1))
    return torch.cat(parts)


def serves_ragged(query: torch.Tensor, value: torch.Tensor, softcap: float | None) -> bool:
    """Whether torch's kernel for sequences of unlike lengths takes these queries and values [H, M,
    D].
    """
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and softcap is None
        and query.shape[-1] == value.shape[-1] <= MOST_WIDE
        and query.shape[-1] % 8 == 0
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
        and has_ragged()
    )


@functools.cache
def has_ragged() -> bool:
    """Whether this torch has that kernel, for fewer key/value heads than query heads too."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return {"scale", "window_size", "enable_gqa"} <= inspect.signature(
        varlen_attn
    ).parameters.keys()


MOST_WIDE = 256
"""Width of a head that torch's kernel for sequences of unlike lengths takes."""


def ragged(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    new: NewTokens,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Causal attention of new tokens [M, H, D] to the keys and values [T, K, D] of their prefixes,
    end to end, without a mask and without padding.
    """
    from torch.nn.attention.varlen import varlen_attn

    queries, keys = new.ends
    mixed = varlen_attn(
        query,
        key,
        value,
        queries,
        keys,
        int(new.counts.max()),
        int((new.counts + new.before).max()),
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(mixed, torch.Tensor)
    return mixed


def _causal(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attention inside each new prompt, [I, H, Q, D]; what lies behind a prompt's end is not
    used.
    """
    length = q.shape[2]
    if softcap is None and (window is None or window >= length):
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    at = torch.arange(length, device=q.device)
    sees = at <= at[:, None]
    if window is not None:
        sees = sees & (at > at[:, None] - window)
    return _masked(q, k, v, sees, scale, softcap)


def _masked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sees: torch.Tensor,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """Attention under a mask of what each query sees, with scores that may be capped: [I, H, Q,
    D].
    """
    if softcap is None:
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=sees, scale=scale, enable_gqa=grouped
        )
    repeats = q.shape[1] // k.shape[1]
    scores = torch.matmul(q, k.repeat_interleave(repeats, 1).transpose(2, 3)).float() * scale
    scores = torch.tanh(scores / softcap) * softcap
    weights = torch.softmax(scores.masked_fill(~sees, -torch.inf), dim=-1).to(v.dtype)
    return torch.matmul(weights, v.repeat_interleave(repeats, 1))
