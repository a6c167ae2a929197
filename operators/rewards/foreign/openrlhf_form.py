"""`from_openrlhf`: a `reward_func` of OpenRLHF as a scorer."""

from collections.abc import Callable, Mapping
from typing import Any

from dataflow.records import COMPLETION, PROMPT
from dataflow.scorer import Scorer
from dataflow.scoring.signature import Noted
from dataflow.scoring.values import listed
from operators.rewards.foreign.adapting import (
    CallLimits,
    adapted,
    gives_of,
    is_async,
    note_of,
    plain,
    taken_by,
)

_OWN = ("queries", "prompts", "labels")


def from_openrlhf(
    function: Callable[..., Any],
    *,
    name: str = "reward",
    label: str = "label",
    note: bool = False,
    limits: CallLimits = CallLimits(),
) -> Scorer[..., Any]:
    """A scorer that calls a `reward_func(queries, prompts, labels)` as OpenRLHF does: once for many
    rollouts.

    `queries` are prompts and completions as one text each. It gives a tensor or list of rewards, or
    a dict with `rewards`. label: the column that is `labels`. note: whether the dict's `scores` and
    `extra_logs` are kept, as JSON in the column `<name>_note`.
    Raises GraphError for what cannot be called by keywords.

    >>> def reward_func(queries, prompts, labels, **kwargs):
    ...     return {"rewards": [float(query.endswith(end)) for query, end in zip(queries, labels)]}
    >>> reward = from_openrlhf(reward_func)
    >>> sorted(reward.reads()), reward(prompt=["2+2="], completion=["4"], label=["4"])
    (['completion', 'label', 'prompt'], [1.0])
    """
    keywords = taken_by(function, "OpenRLHF")
    reads = [PROMPT, COMPLETION, label, *keywords.columns(*_OWN)]

    def asked(columns: dict[str, Any]) -> dict[str, Any]:
        prompts, completions = plain(columns[PROMPT]), plain(columns[COMPLETION])
        arguments = {
            column: plain(values)
            for column, values in columns.items()
            if column not in (PROMPT, COMPLETION)
        } | {
            "queries": [
                prompt + completion for prompt, completion in zip(prompts, completions, strict=True)
            ],
            "prompts": prompts,
            "labels": plain(columns[label]),
        }
        return keywords.chosen(arguments)

    def told(returned: Any, rows: int) -> Any:
        facts: list[dict[str, Any]] | None = None
        if isinstance(returned, Mapping):
            if "rewards" not in returned:
                raise ValueError(
                    f"a dict without 'rewards' was returned: it has {list(returned)}; put them"
                    " there"
                )
            logged = {"scores": returned.get("scores"), **(returned.get("extra_logs") or {})}
            returned = returned["rewards"]
            if note:
                lists = {
                    key: listed(_plain(values), rows)
                    for key, values in logged.items()
                    if values is not None
                }
                facts = [
                    dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)
                ]
        values = listed(_plain(returned), rows)
        if not note:
            return values
        return [
            Noted(value, note_of(facts[at]) if facts else None) for at, value in enumerate(values)
        ]

    def call(**columns: Any) -> Any:
        return told(function(**asked(columns)), len(columns[PROMPT]))

    async def call_async(**columns: Any) -> Any:
        return told(await function(**asked(columns)), len(columns[PROMPT]))

    return adapted(
        call_async if is_async(function) else call,
        function,
        reads=reads,
        gives=gives_of(note, True),
        per="batch",
        name=name,
        limits=limits,
    )


def _plain(values: Any) -> Any:
    """A tensor or an array as a list; anything else as it is."""
    return values.tolist() if hasattr(values, "tolist") else values
