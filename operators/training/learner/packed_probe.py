"""The self-test that packed attention changes no number of a model, whose own attention it then
replaces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from operators.models.borders import late_borders, moved_borders
from operators.models.errors import ModelError
from operators.training.learner.packed_attention import ATTENTION, packed_attention
from operators.training.learner.packing import Array, TokenTree, pack

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


def _rows(module: Any) -> list[Array]:
    draw = np.random.default_rng(0)
    rows = [
        draw.integers(0, int(module.config.get_text_config().vocab_size), size)
        for size in (12, 9, 15, 7)
    ]
    for row in rows[1:3]:
        row[:6] = rows[0][:6]
    return rows


def _packed(rows: Sequence[Array]) -> TokenTree:
    offsets = np.r_[0, np.cumsum([len(row) for row in rows])]
    is_trained = np.concatenate([np.arange(len(row)) > 1 for row in rows])
    return pack(np.concatenate(rows), is_trained, offsets)
