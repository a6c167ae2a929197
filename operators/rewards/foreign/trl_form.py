"""`from_trl`: a reward function of TRL's trainers as a scorer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dataflow.records import COMPLETION, MASK, PROMPT, TOKENS, VERSIONS
from dataflow.scorer import Scorer
from dataflow.scoring.signature import Noted
from dataflow.scoring.values import listed
from operators.rewards.foreign.adapting import (
    CallLimits,
    adapted,
    both_forms,
    gives_of,
    ids_of,
    is_async,
    note_of,
    plain,
    taken_by,
)

_OWN = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")


@dataclass(frozen=True)
class TrainerProgress:
    """The `trainer_state` that a reward function receives."""

    global_step: int
    """Version of the newest weights behind these rollouts."""


def from_trl(
    function: Callable[..., Any],
    *,
    name: str = "reward",
    note: bool = False,
    limits: CallLimits = CallLimits(),
) -> Scorer[..., Any]:
    """A scorer that calls a reward function as TRL does: once for all rollouts that arrived
    together.

    It gets, as far as it takes them, `prompts`, `completions`, `completion_ids`, `trainer_state`
    (its `global_step` alone), `log_extra`, `log_metric`, and the columns of the data, each as a
    list. Where the prompts are chats, prompts and completions are lists of messages. None says that
    it does not apply to a completion. note: whether what it logs is kept, as JSON in the column
    `<name>_note`. Raises GraphError for what cannot be called by keywords.

    >>> def ends_well(completions, answer, **kwargs):
    ...     pairs = zip(completions, answer)
    ...     return [float(text.endswith(end)) if end else None for text, end in pairs]
    >>> reward = from_trl(ends_well)
    >>> reward.name, sorted(reward.reads())
    ('reward', ['answer', 'completion', 'prompt'])
    """
    keywords = taken_by(function, "TRL")
    reads = [PROMPT, COMPLETION, *keywords.columns(*_OWN)]
    reads += [TOKENS, MASK] if keywords.wants("completion_ids") else []
    reads += [VERSIONS] if keywords.wants("trainer_state") else []

    def asked(columns: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        engine = {
            column: columns.pop(column, None)
            for column in (PROMPT, COMPLETION, TOKENS, MASK, VERSIONS)
        }
        forms = [both_forms(*pair) for pair in zip(engine[PROMPT], engine[COMPLETION], strict=True)]
        facts: list[dict[str, Any]] = [{} for _ in forms]

        def log_extra(column: str, values: Sequence[Any]) -> None:
            for row, value in zip(facts, values, strict=True):
                row[column] = value

        def log_metric(metric: str, value: float) -> None:
            for row in facts:
                row[metric] = value

        arguments: dict[str, Any] = {
            **{column: plain(values) for column, values in columns.items()},
            "log_extra": log_extra,
            "log_metric": log_metric,
            "prompts": [prompt for prompt, _ in forms],
            "completions": [completion for _, completion in forms],
        }
        if engine[TOKENS] is not None:
            arguments["completion_ids"] = [
                ids_of(*pair)[1] for pair in zip(engine[TOKENS], engine[MASK], strict=True)
            ]
        if engine[VERSIONS] is not None:
            newest = max((int(row.max()) for row in engine[VERSIONS] if len(row)), default=0)
            arguments["trainer_state"] = TrainerProgress(max(0, newest))
        return keywords.chosen(arguments), facts

    def told(returned: Any, facts: list[dict[str, Any]]) -> Any:
        if not note or returned is None:
            return returned
        return [
            Noted(value, note_of(row))
            for value, row in zip(listed(returned, len(facts)), facts, strict=True)
        ]

    def call(**columns: Any) -> Any:
        arguments, facts = asked(columns)
        return told(function(**arguments), facts)

    async def call_async(**columns: Any) -> Any:
        arguments, facts = asked(columns)
        return told(await function(**arguments), facts)

    return adapted(
        call_async if is_async(function) else call,
        function,
        reads=reads,
        gives=gives_of(note, True),
        per="batch",
        name=name,
        limits=limits,
    )
