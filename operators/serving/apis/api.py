"""The interface of an API to the routes: bodies become requests, calls become JSON, streams become
events.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from operators.serving.bounds import Bounds
from operators.serving.calls import ServedCall
from operators.serving.errors import ApiError, bad
from operators.serving.requests import Request
from operators.serving.text import Vocabulary


class Told(Protocol):
    """A call's stream of events, as its news come."""

    def new(self) -> Iterator[str]:
        """Events since the last call."""

    def last(self) -> Iterator[str]:
        """Events after all else, where the call ended well."""


@dataclass(frozen=True)
class Api:
    """One of them."""

    path: str
    parse: Callable[[Any, Bounds], Request]
    """Raises ApiError."""
    whole: Callable[[ServedCall, Vocabulary], Mapping[str, Any]]
    stream: Callable[[ServedCall, Vocabulary], Told]
    failed: Callable[[ApiError], Mapping[str, Any]] = lambda error: error.body
    """The JSON of an error."""
    event: Callable[[Mapping[str, Any]], str] = lambda body: (
        f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
    )
    """An error within a stream."""
    done: str = ""
    """What every stream ends with."""


def named_event(body: Mapping[str, Any]) -> str:
    """A server-sent event that has the name of its type."""
    return f"event: {body['type']}\ndata: {json.dumps(body, ensure_ascii=False)}\n\n"


def only_fields(body: Any, allowed: Mapping[str, Any]) -> dict[str, Any]:
    """What a body gives, nulls left out. Raises ApiError for no object, and for fields (or values)
    that are not allowed.

    allowed: by field None for any value, the values that may stand there, or what says whether one
    may.
    """
    if not isinstance(body, dict):
        raise ApiError(
            400,
            f"the body is no JSON object; found {type(body).__name__}; send {{...}}",
            code="invalid_json",
        )
    fields = {name: value for name, value in body.items() if value is not None}
    for name, value in fields.items():
        fits = allowed.get(name, ())
        if fits is not None and not (fits(value) if callable(fits) else value in fits):
            raise bad(
                name[:80],
                f"'{name[:80]}' is not supported here with this value; found {str(value)[:80]!r};"
                " leave it out",
                "unsupported_parameter",
            )
    return fields


def is_search(tool: Any) -> bool:
    """Whether a tool is a web search that the API's own server would run: there is none here, and
    the policy does not see it.
    """
    return isinstance(tool, dict) and str(tool.get("type")).startswith("web_search")


def texts_of(where: str, content: Any, kinds: tuple[str, ...] = ("text",)) -> str:
    """A text, or blocks of text, as one. Raises ApiError."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad(
            where,
            f"'{where}' is no text and no list of blocks; found {str(content)[:80]!r}; mend it",
        )
    for block in content:
        if (
            not isinstance(block, dict)
            or block.get("type") not in kinds
            or not isinstance(block.get("text"), str)
        ):
            raise bad(
                where,
                f"'{where}' may have blocks of type {kinds[0]}; found {str(block)[:80]!r}; send"
                " text",
                "unsupported_content",
            )
    return "".join(block["text"] for block in content)
