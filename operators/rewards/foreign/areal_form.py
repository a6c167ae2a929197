"""`from_areal`: a `reward_fn` of AReaL as a scorer."""

from collections.abc import Callable
from typing import Any

from dataflow.records import COMPLETION, MASK, PROMPT, TOKENS
from dataflow.scorer import Scorer
from operators.rewards.foreign.adapting import CallLimits, adapted, ids_of, is_async, taken_by

_OWN = ("prompt", "completions", "prompt_ids", "completion_ids")


def from_areal(
    function: Callable[..., Any], *, name: str = "reward", limits: CallLimits = CallLimits()
) -> Scorer[..., Any]:
    """A scorer that calls a `reward_fn(prompt, completions, prompt_ids, completion_ids, **row)` as
    AReaL does.

    Once for each rollout: `completions` is one text in spite of its name. Of the data's columns it
    gets those that it takes. Raises GraphError for what cannot be called by keywords.

    >>> def reward_fn(prompt, completions, prompt_ids, completion_ids, answer, **kwargs):
    ...     return int(completions == answer)
    >>> sorted(from_areal(reward_fn).reads())
    ['answer', 'completion', 'mask', 'prompt', 'tokens']
    """
    keywords = taken_by(function, "AReaL")
    reads = [PROMPT, COMPLETION, TOKENS, MASK, *keywords.columns(*_OWN)]

    def asked(columns: dict[str, Any]) -> dict[str, Any]:
        prompt, completion, tokens, mask = (
            columns.pop(column) for column in (PROMPT, COMPLETION, TOKENS, MASK)
        )
        prompt_ids, completion_ids = ids_of(tokens, mask)
        own = {
            "prompt": prompt,
            "completions": completion,
            "prompt_ids": prompt_ids,
            "completion_ids": completion_ids,
        }
        return keywords.chosen({**columns, **own})

    def call(**columns: Any) -> Any:
        return function(**asked(columns))

    async def call_async(**columns: Any) -> Any:
        return await function(**asked(columns))

    return adapted(
        call_async if is_async(function) else call,
        function,
        reads=reads,
        gives=float,
        per="row",
        name=name,
        limits=limits,
    )
