"""What the world says between two turns of the policy: texts, and what tools answered as
messages.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from operators.chat.chat_format import Message

Heard: TypeAlias = str | Message
"""A text, or the message of a tool's, which the chat template lays out in its own way."""


def text_of(heard: Iterable[Heard]) -> str:
    """All of it as text.

    >>> text_of(["so ", {"role": "tool", "content": "5"}])
    'so 5'
    """
    return "".join(
        each if isinstance(each, str) else str(each.get("content") or "") for each in heard
    )


def messages_of(heard: Iterable[Heard]) -> list[Message]:
    """It as messages: texts that follow each other are one of the user's.

    >>> messages_of(["a", "b", {"role": "tool", "content": "5"}])
    [{'role': 'user', 'content': 'ab'}, {'role': 'tool', 'content': '5'}]
    """
    found: list[Message] = []
    texts: list[str] = []
    for each in [*heard, None]:
        if isinstance(each, str):
            texts.append(each)
            continue
        if texts:
            found.append({"role": "user", "content": "".join(texts)})
            texts = []
        if each is not None:
            found.append(each)
    return found


def written(heard: Sequence[Heard]) -> list[str]:
    """It as lines of JSON, for a file."""
    return [json.dumps(each) for each in heard]


def read(lines: Iterable[str]) -> tuple[Heard, ...]:
    """What `written` made of it."""
    return tuple(json.loads(line) for line in lines)
