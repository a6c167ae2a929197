"""Reads an episode's function: its columns, its knobs, and what it returns."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from dataflow.annotations import arrow_type
from dataflow.errors import GraphError
from dataflow.scoring.signature import where_defined

NOTHING: Mapping[Any, Any] = {float: None, int: None, bool: None, str: ""}
"""What may be returned, and what stands for it where a function was cut off: nobody has said what
that is worth."""


@dataclass(frozen=True, kw_only=True)
class EpisodeSignature:
    """What an episode's function reads, takes and returns."""

    annotations: Mapping[str, Any]
    """Its columns, as annotated; Any where they are not."""
    defaults: Mapping[str, Any]
    """Its knobs."""
    output: pa.DataType | None
    """Arrow type of the column that it writes; None: it returns nothing."""
    nothing: Any
    """What the column says of an episode that was over before the function returned."""


def read_episode(function: Callable[..., Any]) -> EpisodeSignature:
    """Its signature; GraphError where it cannot be an episode."""
    if not inspect.iscoroutinefunction(function):
        raise GraphError(
            "@episode needs an async function, but got"
            f" {getattr(function, '__qualname__', function)!r} ({where_defined(function)}); write"
            " `async def name(chat, columns): ...`, and `await chat.say()` in it"
        )
    head = f"episode '{function.__name__}' ({where_defined(function)})"
    try:
        hints = typing.get_type_hints(function)
    except Exception as error:
        raise GraphError(
            f"{head} has an annotation that cannot be read ({type(error).__name__}: {error});"
            " import the name where the module really runs, or leave the annotation out"
        ) from error
    parameters = list(inspect.signature(function).parameters.values())
    odd = [p.name for p in parameters if p.kind not in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if odd or not parameters or parameters[0].kind is not parameters[0].POSITIONAL_OR_KEYWORD:
        raise GraphError(
            f"{head} takes {[str(p) for p in parameters]}, but is called with a chat and columns by"
            f" name; write `async def {function.__name__}(chat, column: type, knob: type = value)`"
        )
    columns = {p.name: hints.get(p.name, Any) for p in parameters[1:] if p.default is p.empty}
    defaults = {p.name: p.default for p in parameters[1:] if p.default is not p.empty}
    returned = hints.get("return", type(None))
    if returned is not type(None) and returned not in NOTHING:
        raise GraphError(
            f"{head} returns {returned!r}, which no column of an episode holds; annotate it ->"
            " float, int, bool or str, or -> None and let a @scorer read the rollout"
        )
    output = None if returned is type(None) else arrow_type(returned)
    return EpisodeSignature(
        annotations=columns, defaults=defaults, output=output, nothing=NOTHING.get(returned)
    )
