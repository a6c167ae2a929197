"""`combine`: several columns of rewards and penalties into one, by weights."""

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from dataflow.errors import GraphError
from dataflow.scorer import Scorer, scorer


def combine(weights: Mapping[str, float], name: str = "reward") -> Scorer[..., float | None]:
    """A scorer that reads these columns and writes their weighted sum as column `name`.

    As DeepSeek-R1 adds a format reward to that of accuracy (arXiv 2501.12948, section 2.2.2). A
    column that the rows do not have, or that holds no numbers, is refused when the graph is built.
    What does not apply to a row (None) is left out of its sum, as if it were not there; where none
    applies, the sum does not either. Raises GraphError for no columns, a weight that is no finite
    number, and a name that no parameter could have.

    >>> reward = combine({"accuracy": 1.0, "overlong": 0.5})
    >>> reward(accuracy=1.0, overlong=-1.0), reward(accuracy=None, overlong=-1.0)
    (0.5, -0.5)
    """
    head = f"combine(name={name!r})"
    if not isinstance(weights, Mapping) or not weights:
        raise GraphError(
            f'{head} needs weights by column, but got {weights!r}; give it {{"accuracy": 1.0, ...}}'
        )
    for column, weight in weights.items():
        if not isinstance(column, str) or not column.isidentifier():
            raise GraphError(
                f"{head} got {column!r} as a column, which is no name; give the name of a column"
            )
        if (
            isinstance(weight, bool)
            or not isinstance(weight, int | float)
            or not math.isfinite(weight)
        ):
            raise GraphError(
                f"{head} got the weight {weight!r} for '{column}', which is no finite number;"
                " give one"
            )
    combined: Scorer[..., float | None] = scorer(name=name, isolate=False)(
        _weighted_sum(tuple(weights))
    )
    return combined.configured(weights=dict(weights))


@functools.cache
def _weighted_sum(columns: tuple[str, ...]) -> Callable[..., float | None]:
    """A function whose parameters are these columns and the knob `weights`; the same for the same
    columns.
    """

    def weighted_sum(weights: Mapping[str, float], **values: float | None) -> float | None:
        """The sum of the columns that apply, each times its weight."""
        terms = [
            weights[column] * value for column in columns if (value := values[column]) is not None
        ]
        return math.fsum(terms) if terms else None

    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(column, kind, annotation=float | None) for column in columns]
    none: Mapping[str, float] = MappingProxyType({})
    parameters.append(
        inspect.Parameter("weights", kind, default=none, annotation=Mapping[str, float])
    )
    function: Any = weighted_sum
    function.__signature__ = inspect.Signature(parameters, return_annotation=float | None)
    function.__annotations__ = dict.fromkeys(columns, float | None) | {"return": float}
    return weighted_sum
