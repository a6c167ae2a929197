"""How attention heads are dealt out to ranks that share out each layer: no torch.

Ranks in order take queries in order, and with them the keys and values that these attend to: a rank
has whole heads of both, or, where there are more ranks than key/value heads, neighbouring ranks
have the same one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from operators.models.folders import ModelError

KEYS_AND_VALUES = ("k_proj", "v_proj")
"""Last names of the projections whose rows are key/value heads."""


@dataclass(frozen=True)
class Heads:
    """Those of a model over so many ranks."""

    queries: int
    keys: int
    """Key/value heads."""
    ranks: int

    @property
    def copies(self) -> int:
        """Neighbouring ranks that hold the same key/value head."""
        return max(1, self.ranks // self.keys)

    @property
    def groups(self) -> int:
        """Queries of a rank that attend to each of its key/value heads."""
        return self.queries // self.ranks // max(1, self.keys // self.ranks)

    def rows(self, rows: int, rank: int) -> tuple[int, int]:
        """Which of the rows [0, rows) of a projection to keys or values a rank holds: [first,
        last).
        """
        share = rows * self.copies // self.ranks
        first = rank // self.copies * share
        return first, first + share


def heads_of(model: Any, ranks: int, name: str) -> Heads:
    """The heads of a model of transformers, dealt out to so many ranks.

    Raises:
        ModelError: transformers has no tensor-parallel plan for it, its heads cannot be dealt out
            evenly, or its keys and values, of which there are less than ranks, are not projections
            of their own.
    """
    plan: Mapping[str, str] = getattr(model, "tp_plan", None) or {}
    kind = type(model).__name__
    if not plan:
        raise ModelError(
            f"model '{name}' cannot be shared out to {ranks} ranks: transformers has no"
            f" tensor-parallel plan for {kind}; use tensor_parallel=1, or a family with"
            " base_model_tp_plan in its config (Llama, Qwen2, Qwen3, Mistral, Gemma, Mixtral and"
            " others)"
        )
    queries, keys = (
        int(model.config.get_text_config().num_attention_heads),
        key_value_heads(model.config),
    )
    if not _divide(queries, keys, ranks):
        fitting = " or ".join(
            str(size) for size in range(1, queries + 1) if _divide(queries, keys, size)
        )
        raise ModelError(
            f"model '{name}' cannot be dealt out to {ranks} ranks: it has {queries} attention heads"
            f" and {keys} key/value heads, and {ranks} does not divide the first, or neither"
            f" divides nor is divided by the second; use tensor_parallel={fitting}"
        )
    heads = Heads(queries, keys, ranks)
    if heads.copies > 1 and {place.rpartition(".")[2] for place in shared_places(plan)} != {
        *KEYS_AND_VALUES
    }:
        raise ModelError(
            f"model '{name}' cannot be dealt out to {ranks} ranks: {kind} has {keys} key/value"
            f" heads, and no projections {' and '.join(KEYS_AND_VALUES)} by heads that several"
            f" ranks could hold alike; use tensor_parallel={keys} or less"
        )
    return heads


def key_value_heads(config: Any) -> int:
    """Those of a model of transformers, by its config."""
    text = config.get_text_config()
    return int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)


def shared_places(plan: Mapping[str, str]) -> list[str]:
    """Of a plan of transformers, the places of projections to key/value heads."""
    return [
        place
        for place, style in plan.items()
        if place.rpartition(".")[2] in KEYS_AND_VALUES and style == "colwise"
    ]


def place_of(name: str) -> str:
    """What a plan calls a module or a parameter: any layer of the same kind."""
    return re.sub(r"\d+", "*", name)


def settle_groups(model: Any, heads: Heads) -> None:
    """Tell the attention of each layer of a rank's slice how many of its queries attend to each
    key/value head.
    """
    for module in model.modules():
        if hasattr(module, "num_key_value_groups"):
            module.num_key_value_groups = heads.groups


def _divide(queries: int, keys: int, ranks: int) -> bool:
    return not queries % ranks and not (keys % ranks and ranks % keys)
