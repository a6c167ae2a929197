"""Calls of tools as plain text: for policies whose chat template has no place for them, or that
have none.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dataflow.system.text import strict_json
from operators.chat.tool_calls import BrokenCall, CallFormat, between


@dataclass(frozen=True, kw_only=True)
class TextCalls:
    """A call as Python writes it, between two marks: `<call>add(2, b=3)</call>`; what it came to,
    laid out.

    >>> calls = TextCalls(begin="[", end="]", result="{}#")
    >>> calls.format().read("so [add(2, 3)]").message["tool_calls"][0]["function"]
    {'name': 'add', 'arguments': '{"0": 2, "1": 3}'}
    >>> calls.laid_out("5")
    '5#'
    """

    begin: str = "<call>"
    end: str = "</call>"
    result: str = "<result>{}</result>"
    """What the policy hears; {} stands for what the tool gave."""

    def format(self) -> CallFormat:
        """How such calls are read. Arguments without a name get that of the parameter at their
        place.
        """
        return CallFormat("text", (self.begin,), between(self.begin, self.end, _python))

    def laid_out(self, content: str) -> str:
        """A result as the policy reads it."""
        return self.result.replace("{}", content)

    def faults(self) -> list[str]:
        """What cannot be right."""
        faults = []
        if not self.begin or not self.end:
            faults.append(
                f"TextCalls(begin={self.begin!r}, end={self.end!r}) marks no call; give both a text"
            )
        if "{}" not in self.result:
            faults.append(
                f"TextCalls(result={self.result!r}) leaves the result out; put {{}} where it is to"
                " stand"
            )
        return faults


def _python(inside: str, parameters: Mapping[str, Any]) -> tuple[str, str, str | None]:
    """name(value, key=value): plain values alone."""
    try:
        call = ast.parse(inside.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise BrokenCall(
                f"a call is no name(...); found {inside[:80]!r}; write the tool's name and its"
                " arguments"
            )
        names = list((parameters.get(call.func.id) or {}).get("properties") or ())
        arguments = {
            names[at] if at < len(names) else str(at): ast.literal_eval(value)
            for at, value in enumerate(call.args)
        }
        for keyword in call.keywords:
            if keyword.arg is None or keyword.arg in arguments:
                raise BrokenCall(
                    f"a call names no argument, or one twice; found {inside[:80]!r}; name each once"
                )
            arguments[keyword.arg] = ast.literal_eval(keyword.value)
        return call.func.id, strict_json(arguments), None
    except BrokenCall:
        raise
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise BrokenCall(
            f"a call cannot be read: {error}; found {inside[:80]!r}; write name(value, key=value)"
        ) from error
