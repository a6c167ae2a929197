"""Reward functions of other systems as scorers, unchanged: an adapter for each form of call."""

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from dataflow.errors import GraphError
from dataflow.records import (
    COMPLETION,
    FINISH_REASON,
    LOGPROBS,
    MASK,
    POSITION,
    PROMPT,
    TOKENS,
    VERSIONS,
)
from dataflow.scorer import Scorer
from dataflow.scoring.signature import Noted, where_defined
from dataflow.scoring.values import listed
from operators.rewards.foreign.adapting import (
    CallLimits,
    adapted,
    both_forms,
    gives_of,
    ids_of,
    messages_of,
    name_of,
    nested,
    note_of,
    plain,
    rows_of,
    taken_by,
)

_OWN_OF_AREAL = ("prompt", "completions", "prompt_ids", "completion_ids")


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
    reads = [PROMPT, COMPLETION, TOKENS, MASK, *keywords.columns(*_OWN_OF_AREAL)]

    def asked(columns: dict[str, Any]) -> tuple[dict[str, Any], None]:
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
        return keywords.chosen({**columns, **own}), None

    return adapted(
        function,
        asked,
        reads=reads,
        gives=float,
        per="row",
        name=name,
        limits=limits,
    )


_OWN_OF_OPENRLHF = ("queries", "prompts", "labels")


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
    reads = [PROMPT, COMPLETION, label, *keywords.columns(*_OWN_OF_OPENRLHF)]

    def asked(columns: dict[str, Any]) -> tuple[dict[str, Any], int]:
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
        return keywords.chosen(arguments), len(prompts)

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
                    key: listed(_as_list(values), rows)
                    for key, values in logged.items()
                    if values is not None
                }
                facts = [
                    dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)
                ]
        values = listed(_as_list(returned), rows)
        if not note:
            return values
        return [
            Noted(value, note_of(facts[at]) if facts else None) for at, value in enumerate(values)
        ]

    return adapted(
        function,
        asked,
        told,
        reads=reads,
        gives=gives_of(note, True),
        per="batch",
        name=name,
        limits=limits,
    )


def _as_list(values: Any) -> Any:
    """A tensor or an array as a list; anything else as it is."""
    return values.tolist() if hasattr(values, "tolist") else values


_ENGINE_OF_SLIME = (PROMPT, COMPLETION, TOKENS, MASK, LOGPROBS, FINISH_REASON, POSITION)


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
        engine = {column: row.pop(column) for column in _ENGINE_OF_SLIME}
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

    def asked(columns: dict[str, Any]) -> tuple[dict[str, Any], int]:
        if not is_many:
            return {"args": options, "sample": sample(columns)}, 1
        samples = [sample(row) for row in rows_of(columns)]
        return {"args": options, "samples": samples}, len(samples)

    def told(returned: Any, rows: int) -> Any:
        if not is_many:
            return _sample_reward(returned, reward_key, note)
        return [_sample_reward(value, reward_key, note) for value in listed(returned, rows)]

    return adapted(
        function,
        asked,
        told,
        reads=[*_ENGINE_OF_SLIME, label],
        gives=gives_of(note, is_many),
        per="batch" if is_many else "row",
        name=name,
        limits=limits,
    )


def _sample_reward(returned: Any, reward_key: str, note: bool) -> Any:
    facts: dict[str, Any] = {}
    if isinstance(returned, Mapping):
        if reward_key not in returned:
            raise ValueError(
                f"a dict was returned, with {list(returned)}; say with reward_key= which is the"
                " reward"
            )
        facts, returned = dict(returned), returned[reward_key]
    return Noted(returned, note_of(facts)) if note else returned


_OWN_OF_TRL = (
    "prompts",
    "completions",
    "completion_ids",
    "trainer_state",
    "log_extra",
    "log_metric",
)


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
    reads = [PROMPT, COMPLETION, *keywords.columns(*_OWN_OF_TRL)]
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

    return adapted(
        function,
        asked,
        told,
        reads=reads,
        gives=gives_of(note, True),
        per="batch",
        name=name,
        limits=limits,
    )


_OWN_OF_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
_OWN_OF_VERLS_MANY = ("data_sources", "solution_strs", "ground_truths", "extra_infos")


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
        ("data_sources", "ground_truths", "extra_infos")
        if is_many
        else (_OWN_OF_VERL[0], *_OWN_OF_VERL[2:])
    )
    reads = [COMPLETION]
    reads += ["data_source"] if source in keywords.needed else []
    reads += [ground_truth.partition(".")[0]] if keywords.accepts(truth) else []
    reads += keywords.columns(*(_OWN_OF_VERLS_MANY if is_many else _OWN_OF_VERL))

    def accepted(arguments: Mapping[str, Any]) -> dict[str, Any]:
        return {keyword: value for keyword, value in arguments.items() if keywords.accepts(keyword)}

    def asked(columns: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
        arguments = {
            **{column: columns[column] for column in keywords.columns(*_OWN_OF_VERL)},
            "solution_str": columns[COMPLETION],
            "extra_info": dict(columns.get("extra_info") or {}),
        }
        if "data_source" in columns:
            arguments["data_source"] = columns["data_source"]
        if keywords.accepts("ground_truth"):
            arguments["ground_truth"] = nested(columns, ground_truth)
        return accepted(arguments), 1

    def asked_of_many(columns: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
        rows = rows_of(columns)
        arguments = {
            source: [row.get("data_source") for row in rows],
            "solution_strs": columns[COMPLETION],
            truth: [nested(row, ground_truth) for row in rows if keywords.accepts(truth)],
            extra: [dict(row.get("extra_info") or {}) for row in rows],
        }
        return accepted(arguments), len(rows)

    def told(returned: Any, rows: int) -> Any:
        if not is_many:
            return _computed_score(returned, note)
        return [_computed_score(value, note) for value in listed(returned, rows)]

    return adapted(
        function,
        asked_of_many if is_many else asked,
        told,
        reads=reads,
        gives=gives_of(note, is_many),
        per="batch" if is_many else "row",
        name=name,
        limits=limits,
    )


def _computed_score(returned: Any, note: bool) -> Any:
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
