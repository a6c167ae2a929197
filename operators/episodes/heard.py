"""The world's text between two turns of the policy: strings, and tools' answers as messages."""

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
        piece if isinstance(piece, str) else str(piece.get("content") or "") for piece in heard
    )


def messages_of(heard: Iterable[Heard]) -> list[Message]:
    """It as messages: texts that follow each other are one of the user's.

    >>> messages_of(["a", "b", {"role": "tool", "content": "5"}])
    [{'role': 'user', 'content': 'ab'}, {'role': 'tool', 'content': '5'}]
    """
    messages: list[Message] = []
    texts: list[str] = []
    for piece in [*heard, None]:
        if isinstance(piece, str):
            texts.append(piece)
            continue
        if texts:
            messages.append({"role": "user", "content": "".join(texts)})
            texts = []
        if piece is not None:
            messages.append(piece)
    return messages


def written(heard: Sequence[Heard]) -> list[str]:
    """It as lines of JSON, for a file."""
    return [json.dumps(piece) for piece in heard]


def read(lines: Iterable[str]) -> tuple[Heard, ...]:
    """What `written` made of it."""
    return tuple(json.loads(line) for line in lines)
