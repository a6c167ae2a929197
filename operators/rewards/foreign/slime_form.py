"""`from_slime`: a `custom_rm` of slime as a scorer."""

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from dataflow.errors import GraphError
from dataflow.records import COMPLETION, FINISH_REASON, LOGPROBS, MASK, POSITION, PROMPT, TOKENS
from dataflow.scorer import Scorer
from dataflow.scoring.signature import Noted, where_defined
from dataflow.scoring.values import listed
from operators.rewards.foreign.adapting import (
    CallLimits,
    adapted,
    gives_of,
    ids_of,
    is_async,
    messages_of,
    name_of,
    note_of,
    taken_by,
)

_ENGINE = (PROMPT, COMPLETION, TOKENS, MASK, LOGPROBS, FINISH_REASON, POSITION)


class SampleStatus(enum.Enum):
    """How a sample ended."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"


@dataclass
class Sample:
    """A rollout as slime's reward functions see one."""

    Status = SampleStatus

    prompt: Any
    """A text, or messages."""
    response: str
    label: Any
    tokens: list[int]
    response_length: int
    loss_mask: list[int]
    rollout_log_probs: list[float]
    status: SampleStatus
    index: int
    """Its place in the group."""
    metadata: dict[str, Any] = field(default_factory=dict)
    reward: Any = None


def from_slime(
    function: Callable[..., Any],
    *,
    name: str = "reward",
    label: str = "label",
    reward_key: str = "",
    args: Mapping[str, Any] | None = None,
    note: bool = False,
    limits: CallLimits = CallLimits(concurrency=64),
) -> Scorer[..., Any]:
    """A scorer that calls a `custom_rm(args, sample)` as slime does, or its form of many, `(args,
    samples)`.

    label: the column that is the sample's `label`; the data's other columns are in its `metadata`.
    reward_key: which value is the reward, where a dict is returned. args: what `args` has beside
    it. note: whether that dict is kept, as JSON in the column `<name>_note`.
    Raises GraphError for a function that takes anything else.

    >>> async def custom_rm(args, sample):
    ...     return float(sample.response == sample.label)
    >>> sorted(from_slime(custom_rm, label="answer").reads())[:2]
    ['answer', 'completion']
    """
    needed = [parameter for parameter in taken_by(function, "slime").needed if parameter != "args"]
    if needed not in (["sample"], ["samples"]):
        raise GraphError(
            f"'{name_of(function)}' ({where_defined(function)}) takes {needed} beside args, but"
            " slime gives a reward function (args, sample), or (args, samples); write it so"
        )
    is_many = needed == ["samples"]
    options = SimpleNamespace(**{"reward_key": reward_key or None, **(args or {})})

    def sample(columns: Mapping[str, Any]) -> Sample:
        row = dict(columns)
        engine = {column: row.pop(column) for column in _ENGINE}
        _, ids = ids_of(engine[TOKENS], engine[MASK])
        metadata = row.pop("metadata", None)
        return Sample(
            prompt=messages_of(engine[PROMPT]) or engine[PROMPT],
            response=engine[COMPLETION],
            label=row.pop(label),
            tokens=engine[TOKENS].tolist(),
            response_length=len(ids),
            loss_mask=engine[MASK][len(engine[MASK]) - len(ids) :].astype(int).tolist(),
            rollout_log_probs=engine[LOGPROBS][len(engine[LOGPROBS]) - len(ids) :].tolist(),
            status=(
                SampleStatus.TRUNCATED
                if engine[FINISH_REASON] == "length"
                else SampleStatus.COMPLETED
            ),
            index=int(engine[POSITION]),
            metadata={**row, **(metadata if isinstance(metadata, dict) else {})},
        )

    def asked(columns: dict[str, Any]) -> dict[str, Any]:
        if not is_many:
            return {"args": options, "sample": sample(columns)}
        rows = zip(*columns.values(), strict=True)
        return {
            "args": options,
            "samples": [sample(dict(zip(columns, row, strict=True))) for row in rows],
        }

    def told(returned: Any, columns: Mapping[str, Any]) -> Any:
        if not is_many:
            return _told(returned, reward_key, note)
        return [
            _told(value, reward_key, note) for value in listed(returned, len(columns[COMPLETION]))
        ]

    def call(**columns: Any) -> Any:
        return told(function(**asked(columns)), columns)

    async def call_async(**columns: Any) -> Any:
        return told(await function(**asked(columns)), columns)

    return adapted(
        call_async if is_async(function) else call,
        function,
        reads=[*_ENGINE, label],
        gives=gives_of(note, is_many),
        per="batch" if is_many else "row",
        name=name,
        limits=limits,
    )


def _told(returned: Any, reward_key: str, note: bool) -> Any:
    facts: dict[str, Any] = {}
    if isinstance(returned, Mapping):
        if reward_key not in returned:
            raise ValueError(
                f"a dict was returned, with {list(returned)}; say with reward_key= which is the"
                " reward"
            )
        facts, returned = dict(returned), returned[reward_key]
    return Noted(returned, note_of(facts)) if note else returned
