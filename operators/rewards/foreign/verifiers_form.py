"""`from_verifiers`: a reward function or a rubric of verifiers (up to 0.2) as a scorer."""

import inspect
import json
from collections.abc import Callable
from typing import Any

from dataflow.errors import GraphError
from dataflow.records import COMPLETION, PROMPT
from dataflow.scorer import Scorer
from dataflow.scoring.signature import Noted, where_defined
from operators.rewards.foreign.adapting import (
    CallLimits,
    adapted,
    both_forms,
    gives_of,
    is_async,
    name_of,
    note_of,
    taken_by,
)

_OWN = ("prompt", "completion", "answer", "state", "info", "task", "parser")
_OF_GROUPS = ("prompts", "completions", "answers", "states", "infos", "tasks")


def from_verifiers(
    rewards: Any, *, name: str = "reward", note: bool = False, limits: CallLimits = CallLimits()
) -> Scorer[..., Any]:
    """A scorer that calls a reward function, or the functions of a rubric, as verifiers up to 0.2 did for each rollout.

    A function gets, as far as it takes them, `prompt`, `completion` (both as messages where the prompt is a chat),
    `answer`, `info`, `task`, `parser` (the rubric's), other columns of the data, and `state`, a dict of all of them. A
    rubric's rewards are added by its weights, without those that are None; a function that raises is a failure, which
    verifiers counts as 0. note: whether each function's reward is kept, as JSON in the column `<name>_note`.
    Raises GraphError for functions of a trace (verifiers v1), which are rewards of an environment, and of groups.

    >>> def exact(completion, answer, **kwargs):
    ...     return 1.0 if completion == answer else 0.0
    >>> reward = from_verifiers(exact)
    >>> sorted(reward.reads()), reward(prompt="2+2=", completion="4", answer="4")
    (['answer', 'completion', 'prompt'], 1.0)
    """
    functions, weights, parser = _parts(rewards)
    taken = {function: taken_by(function, "verifiers") for function in functions}
    for function, keywords in taken.items():
        _refuse(function, keywords.needed)
    reads = [PROMPT, COMPLETION]
    for keywords in taken.values():
        reads += [each for each in ("answer", "info", "task") if each in keywords.needed]
        reads += keywords.columns(*_OWN)

    def asked(columns: dict[str, Any]) -> dict[str, Any]:
        prompt, completion = both_forms(columns.pop(PROMPT), columns.pop(COMPLETION))
        info = columns.pop("info", None)
        given = {
            **columns, "prompt": prompt, "completion": completion, "answer": columns.get("answer", ""),
            "info": json.loads(info) if isinstance(info, str) and info else info or {},
            "task": columns.get("task", "default"), "parser": parser,
        }  # fmt: skip
        turns = [completion] if isinstance(completion, str) else [each["content"] for each in completion]
        given["state"] = {each: value for each, value in given.items() if each != "parser"} | {
            "responses": turns, "turn": len(turns),
        }  # fmt: skip
        return given

    def told(values: dict[str, float | None]) -> Any:
        found = [
            weight * value for weight, value in zip(weights, values.values(), strict=True) if value is not None
        ]  # fmt: skip
        total = sum(found) if found else None
        return Noted(total, note_of(values)) if note else total

    async def call_async(**columns: Any) -> Any:
        given = asked(columns)
        values = {}
        for label, function in labels.items():
            returned = function(**taken[function].chosen(given))
            values[label] = await returned if inspect.isawaitable(returned) else returned
        return told(values)

    def call(**columns: Any) -> Any:
        given = asked(columns)
        return told({label: function(**taken[function].chosen(given)) for label, function in labels.items()})

    labels = {f"{name_of(function)}{f'_{at}' * (at > 0)}": function for at, function in _numbered(functions)}
    one = functions[0]
    return adapted(
        call_async if any(map(is_async, functions)) else call, one, reads=reads, gives=gives_of(note, False), per="row",
        name=name, limits=limits,
    )  # fmt: skip


def _parts(rewards: Any) -> tuple[list[Callable[..., Any]], list[float], Any]:
    """The functions of a rubric, their weights, and its parser; of a function itself and 1."""
    functions = getattr(rewards, "funcs", getattr(rewards, "reward_funcs", None))
    weights = getattr(rewards, "weights", getattr(rewards, "reward_weights", None))
    if functions is None:
        return [rewards], [1.0], None
    functions = list(functions)
    weights = [1.0] * len(functions) if weights is None else [float(weight) for weight in weights]
    if not functions or len(weights) != len(functions):
        raise GraphError(
            f"a rubric has {len(functions)} reward functions and {len(weights)} weights; give it as many of both, and "
            f"one at least"
        )
    return functions, weights, getattr(rewards, "parser", None)


def _refuse(function: Any, needed: tuple[str, ...]) -> None:
    """GraphError for what needs more than a rollout's columns."""
    if "trace" in needed or "self" in needed:
        raise GraphError(
            f"'{name_of(function)}' ({where_defined(function)}) takes {list(needed)}: it is a reward of verifiers v1, "
            f"which is part of an environment and judges its trace; run the environment, or write a function of "
            f"prompt, completion and answer"
        )
    if any(each in _OF_GROUPS for each in needed):
        raise GraphError(
            f"'{name_of(function)}' ({where_defined(function)}) takes {list(needed)}, those of a whole group; write it "
            f'as a @scorer(per="group")'
        )


def _numbered(functions: list[Any]) -> list[tuple[int, Any]]:
    """Each with how many of the same name stand before it."""
    seen: dict[str, int] = {}
    found = []
    for function in functions:
        found.append((seen.get(name_of(function), 0), function))
        seen[name_of(function)] = found[-1][0] + 1
    return found
