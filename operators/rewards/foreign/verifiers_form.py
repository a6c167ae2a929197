"""`from_verifiers`: a reward function or a rubric of verifiers (its API up to 0.2) as a scorer."""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from dataflow.errors import GraphError
from dataflow.records import COMPLETION, PROMPT
from dataflow.scorer import Scorer
from dataflow.scoring.signature import Noted, where_defined
from dataflow.scoring.values import listed
from operators.rewards.foreign.adapting import (
    CallLimits,
    Keywords,
    adapted_call,
    both_forms,
    gives_of,
    is_async,
    name_of,
    note_of,
    plain,
    taken_by,
)

_OWN = ("prompt", "completion", "answer", "state", "info", "task", "parser")
_OF_GROUPS = {
    "prompts": "prompt",
    "completions": "completion",
    "answers": "answer",
    "states": "state",
    "infos": "info",
    "tasks": "task",
}
"""What a function of a whole group is given, and what that is of one rollout."""


@dataclass(frozen=True, kw_only=True)
class RubricPart:
    """One function of a rubric."""

    function: Callable[..., Any]
    weight: float = 1.0
    objects: Mapping[str, Any] = field(default_factory=dict)
    """What the rubric itself gives by name: its parser, a judge, helpers."""
    keywords: Keywords = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "keywords", taken_by(self.function, "verifiers"))

    @property
    def is_of_group(self) -> bool:
        """Whether it judges all rollouts of a prompt at once: it takes them by their plurals, or
        returns a list.
        """
        try:
            returned = typing.get_type_hints(self.function).get("return")
        except Exception:
            returned = None
        return any(map(self.keywords.wants, _OF_GROUPS)) or list in (
            returned,
            typing.get_origin(returned),
        )

    def reads(self) -> list[str]:
        """Columns that it needs."""
        needed = [_OF_GROUPS.get(column, column) for column in self.keywords.needed]
        own = [column for column in ("answer", "info", "task") if column in needed]
        return own + [column for column in needed if column not in (*_OWN, *self.objects)]

    def arguments(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """What it is called with: of one rollout, or of all of a group."""
        if not self.is_of_group:
            return self.keywords.chosen({**rows[0], **self.objects})
        plurals = {many: [row[single] for row in rows] for many, single in _OF_GROUPS.items()}
        return self.keywords.chosen({**plurals, **self.objects})


def from_verifiers(
    rewards: Any, *, name: str = "reward", note: bool = False, limits: CallLimits = CallLimits()
) -> Scorer[..., Any]:
    """A scorer that calls a reward function, or the functions of a rubric, as verifiers' API up to
    0.2 does.

    A function gets, as far as it takes them, `prompt`, `completion` (both as messages where the
    prompt is a chat), `answer`, `info`, `task`, other columns of the data, `state`, a dict of all
    of them that the functions of a rubric share, and what the rubric gives by name (`parser`, a
    judge, helpers). One of a whole group gets their plurals. A rubric's rewards are added by its
    weights, without those that are None; a function that raises is a failure, which verifiers
    counts as 0. note: whether each function's reward is kept, as JSON in the column `<name>_note`.
    Raises GraphError for functions of a trace (verifiers v1), which are rewards of an environment.

    >>> def exact(completion, answer, **kwargs):
    ...     return 1.0 if completion == answer else 0.0
    >>> reward = from_verifiers(exact)
    >>> sorted(reward.reads()), reward(prompt="2+2=", completion="4", answer="4")
    (['answer', 'completion', 'prompt'], 1.0)
    """
    parts = list(_parts(rewards))
    if not parts:
        raise GraphError("a rubric has no reward functions; found 0; give it one at least")
    for part in parts:
        _refuse(part.function, part.keywords.needed)
    reads = [PROMPT, COMPLETION, *(column for part in parts for column in part.reads())]
    of_group = any(part.is_of_group for part in parts)
    labels = _labels(parts)

    def asked(columns: dict[str, Any]) -> list[dict[str, Any]]:
        if not of_group:
            return [_row(columns)]
        lists = {column: plain(values) for column, values in columns.items()}
        return [
            _row({column: values[at] for column, values in lists.items()})
            for at in range(len(lists[PROMPT]))
        ]

    def told(values: dict[str, list[Any]], rows: int) -> Any:
        totals: list[Any] = [
            _total(parts, [of_part[row] for of_part in values.values()]) for row in range(rows)
        ]
        if note:
            noted = [
                note_of({label: of_part[row] for label, of_part in values.items()})
                for row in range(rows)
            ]
            totals = [Noted(value, text) for value, text in zip(totals, noted, strict=True)]
        return totals if of_group else totals[0]

    def calls(rows: list[dict[str, Any]]) -> Iterator[tuple[str, bool, Callable[[], Any]]]:
        """Each call to be made, under which label, and whether it gives the values of all rows."""
        for part, label in zip(parts, labels, strict=True):
            for some in [rows] if part.is_of_group else [[row] for row in rows]:
                make = partial(part.function, **part.arguments(some))
                yield label, part.is_of_group, make

    async def call_async(**columns: Any) -> Any:
        rows = asked(columns)
        values: dict[str, list[Any]] = {label: [] for label in labels}
        for label, gives_all, make in calls(rows):
            returned = make()
            returned = await returned if inspect.isawaitable(returned) else returned
            values[label] += listed(returned, len(rows)) if gives_all else [returned]
        return told(values, len(rows))

    def call(**columns: Any) -> Any:
        rows = asked(columns)
        values: dict[str, list[Any]] = {label: [] for label in labels}
        for label, gives_all, make in calls(rows):
            values[label] += listed(make(), len(rows)) if gives_all else [make()]
        return told(values, len(rows))

    return adapted_call(
        call_async if any(is_async(part.function) for part in parts) else call,
        parts[0].function,
        reads=reads,
        gives=gives_of(note, of_group),
        per="group" if of_group else "row",
        name=name,
        limits=limits,
    )


def _row(columns: dict[str, Any]) -> dict[str, Any]:
    """What the functions are given of a rollout, by name."""
    prompt, completion = both_forms(columns[PROMPT], columns[COMPLETION])
    info = columns.get("info")
    arguments = {
        **columns,
        "prompt": prompt,
        "completion": completion,
        "answer": columns.get("answer", ""),
        "info": json.loads(info) if isinstance(info, str) and info else info or {},
        "task": columns.get("task", "default"),
        "parser": None,
    }
    turns = (
        [completion]
        if isinstance(completion, str)
        else [message["content"] for message in completion]
    )
    state = {name: value for name, value in arguments.items() if name != "parser"}
    return {**arguments, "state": {**state, "responses": turns, "turn": len(turns)}}


def _total(parts: Sequence[RubricPart], values: Sequence[float | None]) -> float | None:
    terms = [
        part.weight * value for part, value in zip(parts, values, strict=True) if value is not None
    ]
    return sum(terms) if terms else None


def _parts(rewards: Any) -> Iterator[RubricPart]:
    """The functions of a rubric, or of several that are one; a function by itself."""
    rubrics = getattr(rewards, "rubrics", None)
    if rubrics is not None:
        for rubric in rubrics:
            yield from _parts(rubric)
        return
    functions = getattr(rewards, "funcs", getattr(rewards, "reward_funcs", None))
    weights = getattr(rewards, "weights", getattr(rewards, "reward_weights", None))
    if functions is None:
        yield RubricPart(function=rewards)
        return
    weights = [1.0] * len(functions) if weights is None else [float(weight) for weight in weights]
    if len(weights) != len(functions):
        raise GraphError(
            f"a rubric has {len(functions)} reward functions and {len(weights)} weights; give it as"
            " many of both, and one at least"
        )
    objects = {
        "parser": getattr(rewards, "parser", None),
        **(getattr(rewards, "class_objects", None) or {}),
    }
    for function, weight in zip(functions, weights, strict=True):
        yield RubricPart(function=function, weight=weight, objects=objects)


def _refuse(function: Any, needed: tuple[str, ...]) -> None:
    """GraphError for what needs more than a rollout's columns."""
    if "trace" in needed or "self" in needed:
        raise GraphError(
            f"'{name_of(function)}' ({where_defined(function)}) takes {list(needed)}: it is a"
            " reward of verifiers v1, which is part of an environment and judges its trace; run"
            " the environment, or write a function of prompt, completion and answer"
        )


def _labels(parts: Sequence[RubricPart]) -> list[str]:
    """Labels of the functions; equal names get numbers."""
    counts: dict[str, int] = {}
    labels = []
    for part in parts:
        name = name_of(part.function)
        labels.append(f"{name}_{counts[name]}" if name in counts else name)
        counts[name] = counts.get(name, 0) + 1
    return labels
