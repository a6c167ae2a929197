"""Penalties of length and of distance from a reference policy, and `combine`: several columns
into one, by weights."""

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from dataflow.errors import GraphError, is_whole
from dataflow.records import Array
from dataflow.scorer import Scorer, scorer
from dataflow.scoring.signature import shaped


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

    none: Mapping[str, float] = MappingProxyType({})
    knob = inspect.Parameter("weights", inspect.Parameter.KEYWORD_ONLY, default=none)
    return shaped(weighted_sum, dict.fromkeys(columns, float | None), float, knob)  # type: ignore[no-any-return]


@scorer(isolate=False)
def kl_penalty(logprobs: Array, ref_logprobs: Array, mask: Array, beta: float = 0.02) -> float:
    """Minus `beta` times how much likelier the rollout is to the policy than to the reference, in
    nats.

    -beta * (log mu(y|x) - log ref(y|x)): the KL term in the reward of InstructGPT (arXiv
    2203.02155, equation 2), whose mean over rollouts is -beta * KL(mu || ref). Assumes both
    log-probabilities at the same temperature. logprobs, ref_logprobs, mask: [tokens of the
    rollout], summed where the mask is true.

    >>> import numpy as np
    >>> kl_penalty(np.array([0.0, -1.0]), np.array([0.0, -3.0]), np.array([0, 1]), beta=0.5)
    -1.0
    """
    chosen = np.asarray(mask, bool)
    gap = np.asarray(logprobs, np.float64)[chosen] - np.asarray(ref_logprobs, np.float64)[chosen]
    return -beta * float(gap.sum())


def overlong(max_tokens: int, buffer_tokens: int, name: str = "overlong") -> Scorer[..., float]:
    """A scorer that writes DAPO's soft punishment of long completions, from 0 down to -1, as column
    `name`.

    arXiv 2503.14476, equation 13: 0 up to max_tokens - buffer_tokens, from there linearly to -1 at
    max_tokens, and -1 beyond. max_tokens: the generator's. buffer_tokens: the last tokens, in which
    it rises. Raises GraphError for a buffer that is empty or longer than the whole.

    >>> import numpy as np
    >>> overlong(max_tokens=100, buffer_tokens=20)(np.ones(90))
    -0.5
    """
    for knob, value in (("max_tokens", max_tokens), ("buffer_tokens", buffer_tokens)):
        if not is_whole(value, 1):
            raise GraphError(
                f"overlong has {knob}={value!r}, which is no number of tokens; give 1 or more"
            )
    if buffer_tokens > max_tokens:
        raise GraphError(
            f"overlong punishes the last {buffer_tokens} tokens (buffer_tokens) of {max_tokens}"
            " (max_tokens), which are fewer; lower buffer_tokens, or raise max_tokens to the"
            " generator's"
        )
    return _overlong.renamed(name).configured(max_tokens=max_tokens, buffer_tokens=buffer_tokens)


@scorer(isolate=False, name="overlong")
def _overlong(mask: Array, max_tokens: int = 1, buffer_tokens: int = 1) -> float:
    """How far a completion has come into the buffer before the limit, from 0 to -1."""
    over = int(np.count_nonzero(mask)) - (max_tokens - buffer_tokens)
    return -min(1.0, max(0, over) / buffer_tokens)
