"""What the policy said in a turn: its text, and the calls of tools that stand in it."""

from __future__ import annotations

from typing import Any

from operators.chat.tool_calls import ReadTurn


class Reply(str):
    """The text of a turn, without its end token; with the calls that were read in it.

    >>> from operators.chat.text_calls import TextCalls
    >>> text = "so <call>add(a=2, b=3)</call>"
    >>> reply = Reply(text, TextCalls().format().read(text))
    >>> reply == text, reply.content, reply.tool_calls[0]["function"]["name"]
    (True, 'so', 'add')
    """

    tool_calls: tuple[dict[str, Any], ...]
    """As OpenAI has them: {"id", "type", "function": {"name", "arguments"}}."""
    broken: tuple[str, ...]
    """Why what looks like a call is none."""
    content: str
    """What is no call."""

    def __new__(cls, text: str, read: ReadTurn | None = None) -> Reply:
        """read: the turn as a message; None: where there are no tools."""
        reply = super().__new__(cls, text)
        message = {} if read is None else read.message
        reply.tool_calls = tuple(message.get("tool_calls") or ())
        reply.broken = () if read is None else read.broken
        reply.content = str(message.get("content", text))
        return reply
