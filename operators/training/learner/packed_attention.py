"""Attention over packed nodes for any model of transformers.

Rows that are gathered whole make every prefix attend once per row. A block is a run of neighbouring
nodes: these ask, and they and their ancestors are asked. Nodes are numbered in preorder, so what a
node sees of a block's keys are those that come no later, and whose subtree has not ended before it.

Axis suffixes as in `operators.training.learner.rows`; and Q asking and K asked nodes of a block.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dataflow.records import AnyArray
from operators.models.borders import late_borders, moved_borders
from operators.models.folders import ModelError
from operators.training.learner.rows import TokenTree, pack

KEY_COST = 8
"""Pairs of tokens that cost as much as one more key to gather."""
LONG_ROW = 512
"""Keys from which on a row that is mostly its own is computed as a causal row: half of the pairs,
and no mask."""
MOST_MASKED = 2048
"""Keys from which on every row is: masks are as large as queries times keys."""
PADDED = 1.5
"""Pairs of a bucket over those that its blocks have, at most, unless they are few."""
FEW_PAIRS = 1 << 14


@dataclass(frozen=True, kw_only=True)
class AttentionBlocks:
    """Blocks of like size; arrays int64."""

    queries_B_Q: AnyArray
    """Nodes that ask; the last one of a block again where it is padding."""
    keys_B_K: AnyArray
    """Nodes that are asked, ancestors first; -1: padding."""
    is_causal: bool
    """Queries and keys are the same rows, padded at the right."""


def subtree_ends(positions_N: AnyArray) -> AnyArray:
    """The first node behind each node's subtree. positions_N: depths, in preorder."""
    ends_N = np.full(len(positions_N), len(positions_N))
    open_nodes: list[int] = []
    starts = _chain_starts(positions_N)
    for first, last in pairwise([*starts, len(positions_N)]):
        depth = int(positions_N[first])
        ends_N[open_nodes[depth:]] = first
        del open_nodes[depth:]
        open_nodes += range(first, last)
    return ends_N


def attention_blocks(positions_N: AnyArray) -> tuple[tuple[AttentionBlocks, ...], AnyArray]:
    """Blocks in which each node asks once, and where each node's answer stands in them, laid end to
    end.
    """
    blocks = list(_merged(positions_N))
    attention: list[AttentionBlocks] = []
    back_N = np.zeros(len(positions_N), np.int64)
    base = 0
    for bucket in _buckets(blocks):
        most_queries = max(len(block.path) if block.is_causal else block.size for block in bucket)
        most_keys = max(block.keys for block in bucket)
        queries_B_Q = np.zeros((len(bucket), most_queries), np.int64)
        keys_B_K = np.full((len(bucket), most_keys), -1)
        for row, block in enumerate(bucket):
            own = np.arange(block.first, block.last)
            keys = np.r_[block.path, own] if not block.is_causal else block.path
            keys_B_K[row, : len(keys)] = keys
            asking = block.path if block.is_causal else own
            queries_B_Q[row, : len(asking)] = asking
            queries_B_Q[row, len(asking) :] = asking[-1]
            begin = len(asking) - len(own)
            back_N[own] = base + row * most_queries + begin + np.arange(len(own))
        attention.append(
            AttentionBlocks(
                queries_B_Q=queries_B_Q, keys_B_K=keys_B_K, is_causal=bucket[0].is_causal
            )
        )
        base += queries_B_Q.size
    return tuple(attention), back_N


def visible(queries_B_Q: AnyArray, keys_B_K: AnyArray, ends_N: AnyArray) -> AnyArray:
    """Whether each key is the query's node or one of its ancestors: bool [B, Q, K]."""
    ends_B_K = np.where(keys_B_K < 0, -1, ends_N[keys_B_K])
    asking = queries_B_Q[:, :, None]
    is_visible: AnyArray = (keys_B_K[:, None] <= asking) & (asking < ends_B_K[:, None])
    return is_visible


@dataclass
class _Block:
    """Nodes [first, last), and the path that leads to the first of them; of a causal row all of its
    nodes.
    """

    first: int
    last: int
    path: AnyArray
    is_causal: bool = False

    @property
    def size(self) -> int:
        return self.last - self.first

    @property
    def keys(self) -> int:
        return len(self.path) + (0 if self.is_causal else self.size)


def _chain_starts(positions_N: AnyArray) -> list[int]:
    """Where the tree branches off: nodes that do not hang on the node before them."""
    if not len(positions_N):
        return []
    return np.flatnonzero(np.r_[True, positions_N[1:] != positions_N[:-1] + 1]).tolist()


def _merged(positions_N: AnyArray) -> Iterator[_Block]:
    """Chains, those together that cost less so."""
    path_L = np.zeros(int(positions_N.max(initial=-1)) + 1, np.int64)
    block: _Block | None = None
    for first, last in pairwise([*_chain_starts(positions_N), len(positions_N)]):
        depth, size = int(positions_N[first]), last - first
        path_L[depth : depth + size] = np.arange(first, last)
        if depth + size > MOST_MASKED or (depth + size > LONG_ROW and size >= depth):
            if block is not None:
                yield block
            block = None
            yield _Block(first, last, path_L[: depth + size].copy(), is_causal=True)
            continue
        if block is not None and size * (block.size + block.keys - depth) <= KEY_COST * depth:
            block.last = last
            continue
        if block is not None:
            yield block
        block = _Block(first, last, path_L[:depth].copy())
    if block is not None:
        yield block


def _buckets(blocks: Iterable[_Block]) -> Iterator[list[_Block]]:
    """Blocks of like size together, as few buckets as waste little."""
    bucket: list[_Block] = []
    queries = keys = pairs = 0
    for block in sorted(blocks, key=lambda block: (block.is_causal, block.keys, block.size)):
        asking = len(block.path) if block.is_causal else block.size
        wide, long = max(queries, asking), max(keys, block.keys)
        own = pairs + asking * block.keys
        padded = (len(bucket) + 1) * wide * long
        if bucket and (
            block.is_causal != bucket[0].is_causal or padded > max(PADDED * own, FEW_PAIRS)
        ):
            yield bucket
            bucket, queries, keys, pairs = [], 0, 0, 0
            wide, long, own = asking, block.keys, asking * block.keys
        bucket.append(block)
        queries, keys, pairs = wide, long, own
    if bucket:
        yield bucket


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


def on_device(array: AnyArray, device: torch.device) -> Tensor:
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


PROBE_TOLERANCE = 1e-3
BESIDE_TOLERANCE = 0.5
"""Of a token's number beside others, where matrix products round."""


def switch_to_packed(
    module: Any,
    numbers: Callable[[bool, TokenTree], Tensor],
    compute: torch.dtype | None,
    *,
    must: bool,
) -> bool:
    """Replace the module's attention, unless its numbers for `probe` would change; whether it was
    replaced.

    What begins at a later position is tried with that position moved into the probe.

    numbers: of a tree's tokens, packed or padded. compute: type of their matrix products; None:
    that of the weights. must: raise instead (ValueError, or what the module raised). Raises
    ModelError where numbers cannot be had beside those of other rows.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, packed_attention)
    was = module.config._attn_implementation
    if was == ATTENTION:
        return True
    late, together = late_borders(module), probe(module)
    is_rounded = (compute or next(module.parameters()).dtype) in (torch.bfloat16, torch.float16)
    # into blocks, whose sums have another order
    is_cut = next(module.parameters()).device.type == "cpu"
    tolerance = BESIDE_TOLERANCE if is_rounded and is_cut else PROBE_TOLERANCE

    def with_borders(packed: bool, trees: Sequence[TokenTree]) -> Tensor:
        """With borders where they are and, where there are late ones, with those moved."""
        outputs = [numbers(packed, tree) for tree in trees]
        if late:
            with moved_borders(module, late):
                outputs += [numbers(packed, tree) for tree in trees]
        return torch.cat(outputs)

    with torch.no_grad():
        expected = with_borders(False, [together])
        try:
            module.set_attn_implementation(ATTENTION)
            if bool(((with_borders(True, [together]) - expected).abs() <= tolerance).all()):
                return True
        except Exception:  # any refusal means the same: this architecture keeps its own attention
            if must:
                raise
        module.set_attn_implementation(was)
        if must:
            raise ValueError(f"{type(module).__name__} gives other numbers when packed")
        worst = float(
            (with_borders(False, [_packed([row]) for row in _rows(module)]) - expected).abs().max()
        )
    if worst > (BESIDE_TOLERANCE if is_rounded else PROBE_TOLERANCE):
        raise ModelError(
            f"{type(module).__name__} cannot be read in micro-batches: found that a token's number"
            f" differs by {worst:.2g} by what stands behind or beside"
            f" it{' where ' + ', '.join(late) + ' begins' if late else ''}; use a causal model"
        )
    return False


def probed_in(module: Any, compute: torch.dtype | None) -> torch.dtype | None:
    """The matrix products' type in which the self-test is sharpest: float32 for such weights on a
    CPU, unless they are gathered in another type.
    """
    weights = list(module.parameters())
    is_plain = all(
        weight.device.type == "cpu" and weight.dtype == torch.float32 for weight in weights
    )
    return (
        None if is_plain and not any(hasattr(weight, "to_local") for weight in weights) else compute
    )


def probe(module: Any) -> TokenTree:
    """Three rollouts that share a prefix, and one that does not; of a prompt of two tokens each."""
    return _packed(_rows(module))


def _rows(module: Any) -> list[AnyArray]:
    draw = np.random.default_rng(0)
    rows = [
        draw.integers(0, int(module.config.get_text_config().vocab_size), size)
        for size in (12, 9, 15, 7)
    ]
    for row in rows[1:3]:
        row[:6] = rows[0][:6]
    return rows


def _packed(rows: Sequence[AnyArray]) -> TokenTree:
    offsets = np.r_[0, np.cumsum([len(row) for row in rows])]
    is_trained = np.concatenate([np.arange(len(row)) > 1 for row in rows])
    return pack(np.concatenate(rows), is_trained, offsets)
