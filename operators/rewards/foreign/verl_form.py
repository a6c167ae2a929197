"""`from_verl`: a `compute_score` of verl as a scorer."""

from collections.abc import Callable, Mapping
from typing import Any

from dataflow.records import COMPLETION
from dataflow.scorer import Scorer
from dataflow.scoring.signature import Noted
from dataflow.scoring.values import listed
from operators.rewards.foreign.adapting import (
    CallLimits,
    adapted,
    gives_of,
    is_async,
    nested,
    note_of,
    taken_by,
)

_OWN = ("data_source", "solution_str", "ground_truth", "extra_info")
_OWN_OF_MANY = ("data_sources", "solution_strs", "ground_truths", "extra_infos")


def from_verl(
    function: Callable[..., Any],
    *,
    name: str = "reward",
    ground_truth: str = "reward_model.ground_truth",
    note: bool = False,
    limits: CallLimits = CallLimits(),
) -> Scorer[..., Any]:
    """A scorer that calls a `compute_score` as verl does, once for each rollout, or its form for
    many at once.

    It gets, as far as it takes them, `data_source`, `solution_str`, `ground_truth` and `extra_info`
    (or `data_sources`, `solution_strs`, ...), of the columns of verl's data; other parameters keep
    their defaults. It gives a number, or a dict with `score`. ground_truth: where a row has it, as
    column.key. note: whether the rest of the dict is kept, as JSON in the column `<name>_note`.
    Raises GraphError for what cannot be called by keywords.

    >>> def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    ...     return {"score": float(solution_str == ground_truth), "length": len(solution_str)}
    >>> reward = from_verl(compute_score)
    >>> sorted(reward.reads())
    ['completion', 'data_source', 'reward_model']
    >>> reward(completion="4", data_source="sums", reward_model={"ground_truth": "4"})
    1.0
    """
    keywords = taken_by(function, "verl")
    is_many = keywords.wants("solution_strs")
    source, truth, extra = (
        ("data_sources", "ground_truths", "extra_infos") if is_many else (_OWN[0], *_OWN[2:])
    )
    reads = [COMPLETION]
    reads += ["data_source"] if source in keywords.needed else []
    reads += [ground_truth.partition(".")[0]] if keywords.accepts(truth) else []
    reads += keywords.columns(*(_OWN_OF_MANY if is_many else _OWN))

    def asked(columns: Mapping[str, Any]) -> dict[str, Any]:
        arguments = {
            **{column: columns[column] for column in keywords.columns(*_OWN)},
            "solution_str": columns[COMPLETION],
            "extra_info": dict(columns.get("extra_info") or {}),
        }
        if "data_source" in columns:
            arguments["data_source"] = columns["data_source"]
        if keywords.accepts("ground_truth"):
            arguments["ground_truth"] = nested(columns, ground_truth)
        return {keyword: value for keyword, value in arguments.items() if keywords.accepts(keyword)}

    def asked_of_many(columns: Mapping[str, Any]) -> dict[str, Any]:
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        arguments = {
            source: [row.get("data_source") for row in rows],
            "solution_strs": columns[COMPLETION],
            truth: [nested(row, ground_truth) for row in rows if keywords.accepts(truth)],
            extra: [dict(row.get("extra_info") or {}) for row in rows],
        }
        return {keyword: value for keyword, value in arguments.items() if keywords.accepts(keyword)}

    def told(returned: Any, columns: Mapping[str, Any]) -> Any:
        if not is_many:
            return _told(returned, note)
        return [_told(value, note) for value in listed(returned, len(columns[COMPLETION]))]

    ask = asked_of_many if is_many else asked

    def call(**columns: Any) -> Any:
        return told(function(**ask(columns)), columns)

    async def call_async(**columns: Any) -> Any:
        return told(await function(**ask(columns)), columns)

    return adapted(
        call_async if is_async(function) else call,
        function,
        reads=reads,
        gives=gives_of(note, is_many),
        per="batch" if is_many else "row",
        name=name,
        limits=limits,
    )


def _told(returned: Any, note: bool) -> Any:
    facts: dict[str, Any] = {}
    if isinstance(returned, Mapping):
        if "score" not in returned:
            raise ValueError(
                f"a dict without 'score' was returned: it has {list(returned)}; put the reward"
                " there"
            )
        facts = {key: value for key, value in returned.items() if key != "score"}
        returned = returned["score"]
    return Noted(returned, note_of(facts)) if note else returned
