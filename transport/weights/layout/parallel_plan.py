"""Layouts from a tensor-parallel plan by names, such as transformers has for each family: no
torch.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping

from transport.weights.errors import LayoutMismatch
from transport.weights.layout.layout import Layout, Mesh, Shape, Shards, TensorLayout

Cut = tuple[int | None, int]
"""Dimension that is cut over the ranks (None: each holds the whole), and in how many parts it is
dealt out."""
WHOLE: Cut = (None, 1)

STYLES: dict[str, tuple[int, int]] = {
    "colwise": (-2, 1),
    "packed_colwise": (-2, 2),
    "rowwise": (-1, 1),
    "packed_rowwise": (-1, 2),
    "embedding_rowwise": (0, 1),
    "embedding_colwise": (1, 1),
    "grouped_gemm": (0, 1),
}
"""How the styles of transformers' plans deal out a matrix, or a stack of them."""
LIKE = {
    "colwise_gather_output": "colwise",
    "colwise_rep": "colwise",
    "rowwise_split_input": "rowwise",
    "rowwise_rep": "rowwise",
}
"""Styles that differ from another in what they do with activations alone."""
UNCUT = frozenset(
    {
        "all_reduce",
        "ep_dispatch_experts",
        "local_params",
        "mla_kv_a_proj",
        "moe_identity_expert",
        "moe_tp_experts",
        "replicate",
        "replicated_with_grad_allreduce",
        "sequence_parallel",
    }
)
"""Styles that leave every rank the whole parameter."""

KEYS_AND_VALUES = re.compile(r"\b[kv]_proj\b")
"""Names of projections whose rows are key/value heads."""


def mesh_layout(
    tensors: Mapping[str, tuple[Shape, str]],
    plan: Mapping[str, str],
    mesh: Mesh,
    aliases: Mapping[str, str] | None = None,
    *,
    key_value_heads: int | None = None,
) -> Layout:
    """The layout of a model over replicas x FSDP x tensor parallel, which `mesh` has, by a plan
    such as transformers has for each family.

    tensors: name -> (full shape, dtype). plan: name of a parameter or of its module, `*` for any
    number, -> style, e.g. {"layers.*.self_attn.q_proj": "colwise"} (`model.tp_plan`, or the
    config's `base_model_tp_plan`); what it does not name, every rank holds whole. LayoutMismatch
    for an unknown style.

    FSDP cuts dim 0 of what tensor parallelism has left of a tensor. key_value_heads: of the model;
    of more ranks than these, neighbouring ones hold the same one.
    """
    layouts, cut_by_shape = {}, dict[tuple[str, int], Cut]()
    *outer, ranks = mesh.shape
    heads = min(ranks, key_value_heads or ranks)
    by_heads = Mesh((*outer, heads, ranks // heads), mesh.ranks)
    for name, (shape, dtype) in tensors.items():
        like = _generic(name), len(shape)
        if like not in cut_by_shape:
            cut_by_shape[like] = cut_of(*like, plan)
        dim, parts = cut_by_shape[like]
        cuts = (None, 0 if shape else None, dim)
        if heads < ranks and KEYS_AND_VALUES.search(name):
            shards = Shards.cut(
                shape, by_heads, (*cuts, None), order=(0, 2, 3, 1), parts=(1, 1, parts, 1)
            )
        else:
            shards = Shards.cut(shape, mesh, cuts, order=(0, 2, 1), parts=(1, 1, parts))
        layouts[name] = TensorLayout(name=name, shape=shape, dtype=dtype, shards=shards, into=name)
    return Layout(tensors=layouts, aliases=dict(aliases or {}))


def cut_of(name: str, dims: int, plan: Mapping[str, str]) -> Cut:
    """How a plan deals out a parameter of so many dimensions. LayoutMismatch for an unknown
    style.
    """
    style = _style(name, plan)
    style = LIKE.get(style, style)
    if style not in STYLES and style not in UNCUT:
        raise LayoutMismatch(
            f"the plan cuts tensor '{name}' in a way that is not known; found style '{style}'; "
            f"use one of {sorted({*STYLES, *LIKE, *UNCUT})}, or describe it by Layout.cut"
        )
    bias = style == "packed_rowwise" or (style == "rowwise" and name.endswith("bias"))
    if style in UNCUT or dims == 0 or (dims == 1 and bias):
        return WHOLE
    dim, parts = STYLES[style]
    return dim % dims, parts if dims > 1 else 1


def _style(name: str, plan: Mapping[str, str]) -> str:
    """The style of a parameter: its own, or its module's; keys may lack the model's prefix."""
    generic = _generic(name)
    for pattern in (generic, generic.rpartition(".")[0]):
        for key, style in plan.items():
            if f".{pattern}".endswith(f".{_generic(key)}"):
                return style
    return "replicate"


@functools.lru_cache(maxsize=4096)
def _generic(name: str) -> str:
    return re.sub(r"\d+", "*", name)
