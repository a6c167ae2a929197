"""`tool_use`: the episode in which the policy calls tools until it has an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from operators.chat.text_calls import TextCalls
from operators.episodes.declaration import Episode


async def _until_an_answer(chat: Any) -> str:
    """The policy calls tools until it has an answer."""
    return str(await chat.use_tools())


def tool_use(
    tools: Sequence[Any],
    *,
    calls: TextCalls | None = None,
    name: str = "tool_use",
    max_turns: int = 8,
    **limits: Any,
) -> Episode:
    """Turns and calls, until the policy says something in which no call stands: that is the column
    of its name.

    Args:
        tools: functions with type hints and a docstring, toolsets (`operators.tools`).
        calls: how calls are written, where the chat template does not say.
        name: of the node, and of the column with the answer; it is empty where the policy ran out
            of turns.
        max_turns: of the policy, its answer counted.
        limits: the others of `@episode`.

    >>> from dataflow import Graph, Model
    >>> from operators import Generator, Prompts, tool_use
    >>> def add(a: int, b: int) -> int:
    ...     '''Adds two numbers.
    ...
    ...     Args:
    ...         a: One.
    ...         b: The other.
    ...     '''
    ...     return a + b
    >>> generator = Generator(Model("policies/sums"), chat=True)
    >>> prompts = Prompts([{"prompt": [{"role": "user", "content": "2+2?"}]}])
    >>> rollouts = tool_use([add], name="answer")(generator, Graph("sums").source(prompts))
    >>> "answer" in rollouts.columns
    True
    """
    return Episode(
        function=_until_an_answer,
        name=name,
        tools=tuple(tools),
        calls=calls,
        max_turns=max_turns,
        **limits,
    )
