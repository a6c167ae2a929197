"""What of a model begins at some position: rope factors, settled for a run; windows and scales,
moved into a proof.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from dataflow.model import Model
from operators.models.folders import ModelError

if TYPE_CHECKING:
    import torch

MOVED = 3
"""Where borders lie in a proof, so that even the product of two lies within its sequences."""
BORDER = re.compile(
    r"(window|chunk|floor|topk|block_size|local_attention)(?!.*(layers|pattern|group))"
)
"""In configs and modules, names of a number of tokens from which on a token is computed, or seen,
otherwise."""
SCALED = "llama_4_scaling_beta"
"""Of rope parameters, what makes queries grow beyond their `original_max_position_embeddings`."""
CHANGING = ("dynamic", "longrope")
"""Kinds of rope whose factors the longest position of a forward pass decides."""


def longest(model: Model, config: Any, declared: int | None = None) -> int | None:
    """Most tokens of a sequence: what an operator declares, else its model, else the config; None
    where none does.

    Raises ModelError for a length beyond the positions that the model has, or that its rope was
    settled for.
    """
    text = config.get_text_config()
    own = getattr(text, "max_position_embeddings", None)
    most = model.context_tokens or own
    if own and (declared or most) > own and not getattr(text, "rope_parameters", None):
        raise ModelError(
            f"model '{model.name}' has an embedding for each of {own} positions, and none beyond;"
            f" found context_tokens={declared or most}; lower it"
        )
    if declared and most and declared > most and (model.context_tokens or changing_rope(text)):
        raise ModelError(
            f"model '{model.name}' takes {most} tokens, by which all of a run compute, but one"
            f" operator is to take context_tokens={declared}; lower it, or give every operator"
            f" Model(..., context_tokens={declared})"
        )
    return declared or most


def changing_rope(config: Any) -> set[str]:
    """Kinds of rope, of all layers of a text config, whose factors depend on the longest
    position.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = {
        rope.get("rope_type", "")
        for rope in (parameters, *parameters.values())
        if isinstance(rope, dict)
    }
    return kinds & set(CHANGING)


def settle_rope(module: Any, name: str, context_tokens: int | None) -> None:
    """Give a loaded module one set of rope factors, that of its longest sequence, whatever else is
    in a forward pass.

    context_tokens: of that sequence; None: as many as the config says. Raises ModelError where that
    leaves open which set it is.
    """
    most = (
        context_tokens
        or getattr(module.config.get_text_config(), "max_position_embeddings", None)
        or 0
    )
    for rotary in module.modules():
        kinds = getattr(rotary, "rope_type", None)
        for layer_type, kind in (kinds if isinstance(kinds, dict) else {None: kinds}).items():
            if kind not in CHANGING:
                continue
            alone, beside = _first(rotary, layer_type, 2), _first(rotary, layer_type, most)
            if not alone.equal(beside) and context_tokens is None:
                raise ModelError(
                    f"model '{name}' has other rope factors ({kind}) for long sequences than for"
                    f" short ones; found no length to choose by, and up to {most} tokens may come;"
                    " give Model(..., context_tokens=N), the most that prompt and completion have"
                    " together"
                )
            rotary.rope_type = (
                "default" if layer_type is None else rotary.rope_type | {layer_type: "default"}
            )
            if not _first(rotary, layer_type, 2).equal(beside):
                raise ModelError(
                    f"model '{name}' has rope factors ({kind}) that change with the longest"
                    f" position of a forward pass; found that {type(rotary).__name__} cannot keep"
                    " to one set; give Model(..., context_tokens=N) below the length from which on"
                    " they change"
                )


def _first(rotary: Any, layer_type: str | None, most: int) -> torch.Tensor:
    """Its angles at position 1 in a pass over positions below `most`."""
    import torch

    like = next(rotary.buffers())
    positions = torch.tensor([[1, max(1, most - 1)]], device=like.device)
    angles = rotary(like, positions, **({} if layer_type is None else {"layer_type": layer_type}))
    return torch.stack(angles if isinstance(angles, tuple) else (angles,))[:, :, :1]


def late_borders(module: Any, most: int | None = None) -> dict[str, float]:
    """By name, what begins beyond MOVED in a sequence of `most` tokens; None: of any length."""
    borders = {name: value for _, name, value in _borders(module)}
    return {name: value for name, value in sorted(borders.items()) if most is None or value <= most}


@contextlib.contextmanager
def moved_borders(module: Any, names: Collection[str]) -> Iterator[None]:
    """The same module with these borders at MOVED, so that a short sequence lies on both sides of
    each.
    """
    before = [border for border in _borders(module) if border[1] in names]
    try:
        for holder, name, _ in before:
            holder[name] = MOVED
        yield
    finally:
        for holder, name, value in before:
            holder[name] = value


def _borders(module: Any) -> Iterator[tuple[dict[str, Any], str, float]]:
    """Where borders beyond MOVED are written: the holder, the name in it, the value."""
    modules = list(module.modules())
    configs = {id(part.config): part.config for part in modules if hasattr(part, "config")}
    for holder in [*modules, *configs.values()]:
        for name, value in vars(holder).items():
            if BORDER.search(name) and type(value) in (int, float) and value > MOVED:
                yield vars(holder), name, value
    for config in configs.values():
        parameters = getattr(config, "rope_parameters", None) or {}
        if SCALED in parameters and parameters["original_max_position_embeddings"] > MOVED:
            yield (
                parameters,
                "original_max_position_embeddings",
                parameters["original_max_position_embeddings"],
            )
