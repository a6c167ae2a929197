"""What the adapters share: what a foreign function takes, a scorer around it, prompts and
completions as messages.
"""

import ast
import inspect
import json
import textwrap
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dataflow.errors import GraphError
from dataflow.records import AnyArray
from dataflow.scorer import (
    DEFAULT_MEMORY_MB,
    DEFAULT_RETRIES,
    DEFAULT_TIMEOUT_S,
    Per,
    Scorer,
    scorer,
)
from dataflow.scoring.signature import Noted, code_of, shaped, where_defined
from operators.chat.chat_template import beginning_of


@dataclass(frozen=True, kw_only=True)
class CallLimits:
    """What one call may take; as the knobs of `scorer`."""

    timeout_s: float = DEFAULT_TIMEOUT_S
    memory_mb: int | None = DEFAULT_MEMORY_MB
    concurrency: int = 1
    processes: int = 1
    retries: int = DEFAULT_RETRIES
    world: tuple[type[BaseException], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Keywords:
    """The keywords that a function takes."""

    needed: tuple[str, ...]
    """Parameters without a default, and what it takes by name out of its `**keywords`."""
    optional: frozenset[str]
    """Parameters with one."""
    takes_all: bool
    """Whether it has `**keywords`."""

    def wants(self, name: str) -> bool:
        """Whether it names this keyword."""
        return name in self.needed or name in self.optional

    def accepts(self, name: str) -> bool:
        """Whether it can be called with this keyword."""
        return self.takes_all or self.wants(name)

    def chosen(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Those of these keywords that it can be called with."""
        return (
            dict(arguments)
            if self.takes_all
            else {name: arguments[name] for name in arguments if self.wants(name)}
        )

    def columns(self, *own: str) -> list[str]:
        """What it needs beside what its own system gives it: columns of the data."""
        return [name for name in self.needed if name not in own]


def taken_by(function: Callable[..., Any], system: str) -> Keywords:
    """What a function takes; GraphError for what is no function, or takes something by position
    alone.
    """
    if not callable(function):
        raise GraphError(
            f"a reward function of {system} is called, but {function!r:.60} is a"
            f" {type(function).__name__}, which cannot be; name the function"
        )
    needed: list[str] = []
    optional: set[str] = set()
    catch_all = ""
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
            raise GraphError(
                f"'{name_of(function)}' ({where_defined(function)}) takes '{parameter}' by"
                f" position, but {system} gives keywords; let it take what it needs by name"
            )
        if parameter.kind is parameter.VAR_KEYWORD:
            catch_all = parameter.name
        elif parameter.default is parameter.empty:
            needed.append(parameter.name)
        else:
            optional.add(parameter.name)
    if catch_all:
        needed += [name for name in _named_in(function, catch_all) if name not in needed]
    return Keywords(needed=tuple(needed), optional=frozenset(optional), takes_all=bool(catch_all))


def name_of(function: Any) -> str:
    """What it is called."""
    return getattr(function, "__name__", type(function).__name__)


def is_async(function: Any) -> bool:
    """Whether a call gives a coroutine."""
    method = getattr(function, "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(method)


def adapted(
    function: Any,
    asked: Callable[[dict[str, Any]], tuple[dict[str, Any], Any]],
    told: Callable[[Any, Any], Any] = lambda returned, _: returned,
    **knobs: Any,
) -> Scorer[..., Any]:
    """A scorer that calls `function`; knobs: as of `adapted_call`.

    asked: from the columns of a row, or of rows, to the keywords of the call, and to what `told`
    needs to know of it. told: from what the call returned to the scorer's value.
    """

    def call(**columns: Any) -> Any:
        arguments, context = asked(columns)
        return told(function(**arguments), context)

    async def call_async(**columns: Any) -> Any:
        arguments, context = asked(columns)
        return told(await function(**arguments), context)

    return adapted_call(call_async if is_async(function) else call, function, **knobs)


def adapted_call(
    call: Callable[..., Any],
    function: Any,
    *,
    reads: Collection[str],
    gives: Any,
    per: Per,
    name: str,
    limits: CallLimits,
) -> Scorer[..., Any]:
    """A scorer that calls `call`, which calls `function`: it reads these columns, and gets all
    others that rows have.

    Errors and pictures name the file and line of `function`.
    """
    others = inspect.Parameter("columns", inspect.Parameter.VAR_KEYWORD)
    adapted_function = shaped(call, dict.fromkeys(reads, Any), gives, others)
    adapted_function.__name__ = adapted_function.__qualname__ = name_of(function)
    adapted_function.__doc__ = inspect.getdoc(function)
    if code_of(function) is not None:
        adapted_function.__wrapped__ = function
    return scorer(name=name, per=per, rest=True, **vars(limits))(adapted_function)


def note_of(facts: Mapping[str, Any]) -> str | None:
    """Facts as the text of a note; None for none."""
    return json.dumps(facts, ensure_ascii=False, default=str) if facts else None


def gives_of(note: bool, has_lists: bool) -> Any:
    """What a call is annotated to return."""
    if has_lists:
        return list[Noted] if note else list[float]
    return Noted if note else float


def messages_of(prompt: str) -> list[dict[str, Any]] | None:
    """The chat messages that a prompt is made of; None for a plain text.

    >>> messages_of('[{"role": "user", "content": "2+2="}]')
    [{'role': 'user', 'content': '2+2='}]
    >>> messages_of("[1, 2] has how many numbers?")
    """
    if not prompt.startswith("["):
        return None
    try:
        messages = json.loads(prompt)
    except ValueError:
        return None
    is_chat = (
        isinstance(messages, list)
        and messages
        and all(isinstance(message, dict) and "role" in message for message in messages)
    )
    return messages if is_chat else None


def both_forms(prompt: str, completion: str) -> tuple[Any, Any]:
    """A prompt and its completion, both as messages where the prompt is a chat, else both as texts.
    What the assistant had begun to say at the prompt's end belongs to the completion, as TRL has
    it.

    >>> prompt = '[{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "It "}]'
    >>> both_forms(prompt, "is 4")
    ([{'role': 'user', 'content': '2+2='}], [{'role': 'assistant', 'content': 'It is 4'}])
    """
    messages = messages_of(prompt)
    if messages is None:
        return prompt, completion
    begun = beginning_of(messages)
    return messages[: -1 if begun is not None else None], [
        {"role": "assistant", "content": (begun or "") + completion}
    ]


def ids_of(tokens: AnyArray, mask: AnyArray) -> tuple[list[int], list[int]]:
    """The ids of the prompt, and those from the first that the policy chose on."""
    chosen = mask.nonzero()[0]
    first = int(chosen[0]) if len(chosen) else len(tokens)
    return tokens[:first].tolist(), tokens[first:].tolist()


def rows_of(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Columns of several rows, row by row."""
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def plain(values: Any) -> list[Any]:
    """A column as a list of Python's own values."""
    return values.tolist() if isinstance(values, np.ndarray) else list(values)


def nested(row: Mapping[str, Any], path: str) -> Any:
    """The value at `column.key.key`; ValueError where it is not there."""
    value: Any = row
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise ValueError(
                f"the row has nothing at '{path}': it has {list(row)}; name another place"
            )
        value = value[part]
    return value


def _named_in(function: Any, catch_all: str) -> list[str]:
    """The names that a function takes out of its `**rest` by `rest["name"]`, read from its source;
    empty where there is none.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return []
    return [
        node.slice.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript)
        and isinstance(node.value, ast.Name)
        and node.value.id == catch_all
        and isinstance(node.ctx, ast.Load)
        and isinstance(node.slice, ast.Constant)
        and isinstance(node.slice.value, str)
    ]
