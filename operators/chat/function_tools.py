"""Python functions as tools: their definitions from type hints and docstring, calls checked before
they are made.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from operators.chat.chat_format import ChatError, Message


def definition_of(function: Callable[..., Any]) -> Message:
    """A tool's definition: name, description and the JSON schema of its parameters, read by
    transformers.

    Raises ChatError for parameters without a type hint or a line in a docstring of Google's form.
    """
    from transformers.utils.chat_template_utils import get_json_schema

    name = getattr(function, "__name__", str(function))
    try:
        return dict(get_json_schema(function))
    except Exception as error:
        raise ChatError(
            f"'{name}' cannot be a tool: {error}; found it in"
            f" {getattr(function, '__module__', '?')}; "
            f'give every parameter a type hint and a line under "Args:" in its docstring'
        ) from error


def definitions_of(functions: Sequence[Callable[..., Any]]) -> list[Message]:
    """Definitions of several, whose names differ. Raises ChatError."""
    definitions = [definition_of(function) for function in functions]
    names = [definition["function"]["name"] for definition in definitions]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ChatError(
            f"two tools have one name; found {twice} twice; rename one of the functions"
        )
    return definitions


def arguments_of(call: Message, tools: Sequence[Message]) -> dict[str, Any]:
    """The arguments of a call by name. Raises ValueError, whose text the model reads, for a call
    that does not fit.
    """
    function = call["function"]
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    if function["name"] not in schemas:
        raise ValueError(
            f"there is no tool '{function['name']}'; there are {sorted(schemas)}; call one of these"
        )
    arguments = function["arguments"]
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    schema = schemas[function["name"]]
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    missing = [name for name in required if name not in arguments]
    if missing:
        raise ValueError(
            f"'{function['name']}' needs {missing}; found {sorted(arguments)}; give each of them"
        )
    unknown = [name for name in arguments if properties and name not in properties]
    if unknown:
        raise ValueError(
            f"'{function['name']}' has no {unknown}; it has {sorted(properties)}; leave them out"
        )
    return dict(arguments)


def result_of(call: Message, content: str) -> Message:
    """What the world answers to a call."""
    return {
        "role": "tool",
        "tool_call_id": call["id"],
        "name": call["function"]["name"],
        "content": content,
    }
