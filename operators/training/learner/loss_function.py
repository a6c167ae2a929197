"""What a loss function asks for: parameters without defaults are columns, those with defaults are
knobs.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dataflow.errors import hint

COMPUTED = ("new_logprobs", "new_values", "mask", "entropy", "rollout_index", "group_index")
"""What the trainer computes by itself, each [T]; log-probabilities, values and entropy have a
gradient."""
WITH_GRADIENT = ("new_logprobs", "new_values", "entropy")


@dataclass(frozen=True, kw_only=True)
class LossFunction:
    """A loss, read once."""

    call: Callable[..., Any]
    """As the user gave it."""
    name: str
    where: str
    """file:line of the function."""
    columns: tuple[str, ...] = ()
    """Columns of the rows that it reads."""
    computed: tuple[str, ...] = ()
    """What it reads of COMPUTED."""
    knobs: dict[str, Any] = field(default_factory=dict)
    """Its knobs with the values in force."""
    faults: tuple[str, ...] = ()
    """Why it cannot be used, each in three parts."""


def read_loss(loss: Any, node: str) -> LossFunction:
    """Look at a loss function, or a partial of one, without calling it."""
    function = loss
    while isinstance(function, functools.partial):
        function = function.func
    if not callable(loss):
        return LossFunction(
            call=loss,
            name=repr(loss),
            where="",
            faults=(
                f"'{node}' needs a loss function, but loss is {loss!r}; give operators.losses.aipo",
            ),
        )
    name, where = getattr(function, "__name__", type(function).__name__), _where(function)
    names = inspect.signature(function).parameters
    try:
        parameters = inspect.signature(loss).parameters
    except (TypeError, ValueError):
        bound = {key for key in _keywords(loss) if key not in names}
        return LossFunction(
            call=loss,
            name=name,
            where=where,
            faults=(_unknown(node, name, where, bound, list(names)),),
        )
    columns, computed, knobs, faults = [], [], {}, []
    for parameter in parameters.values():
        if parameter.kind in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
            parameter.POSITIONAL_ONLY,
        ):
            faults.append(
                f"'{node}' calls its loss '{name}' ({where}) by parameter names, but it has"
                f" '{parameter}'; name each column as a parameter"
            )
        elif parameter.default is not parameter.empty:
            knobs[parameter.name] = parameter.default
        elif parameter.name in COMPUTED:
            computed.append(parameter.name)
        else:
            columns.append(parameter.name)
    if bound := set(_keywords(loss)) - set(names):
        faults.append(_unknown(node, name, where, bound, list(names)))
    if not set(computed) & set(WITH_GRADIENT):
        faults.append(
            f"loss '{name}' ({where}) of '{node}' has no gradient: it reads {columns + computed};"
            " give it a parameter 'new_logprobs', the trainer's log-probabilities (a critic's:"
            " 'new_values')"
        )
    return LossFunction(
        call=loss,
        name=name,
        where=where,
        columns=tuple(columns),
        computed=tuple(computed),
        knobs=knobs,
        faults=tuple(faults),
    )


def _keywords(loss: Any) -> dict[str, Any]:
    keywords: dict[str, Any] = {}
    while isinstance(loss, functools.partial):
        keywords = {**loss.keywords, **keywords}
        loss = loss.func
    return keywords


def _unknown(node: str, name: str, where: str, bound: set[str], knobs: list[str]) -> str:
    return "\n".join(
        f"loss '{name}' ({where}) of '{node}' has no knob '{knob}'{hint(knob, knobs)}"
        for knob in sorted(bound)
    )


def _where(function: Any) -> str:
    function = inspect.unwrap(function)
    code = getattr(
        function if inspect.isroutine(function) else type(function).__call__, "__code__", None
    )
    return f"{code.co_filename}:{code.co_firstlineno}" if code else "built in"
