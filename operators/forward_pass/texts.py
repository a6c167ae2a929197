"""Texts as a judge reads them: prompt and completion laid out, cut into steps, found again in
tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from dataflow.records import AnyArray
from operators.chat.chat_template import ChatTemplate, beginning_of


@dataclass(frozen=True)
class Laid:
    """A text and where the completion stands in it."""

    text: str
    begin: int
    """Its first character."""


def lay_out(
    template: ChatTemplate | None, prompt: str | None, completion: str | None, *, suffix: str
) -> Laid:
    """Prompt, completion and suffix; by a chat template, if any.

    Then the prompt is a list of {"role", "content"} as JSON, or the user's words. Raises ValueError
    when there is no text, and when the template does not keep the completion as it is.
    """
    if prompt is None or completion is None:
        raise ValueError(
            f"the {'prompt' if prompt is None else 'completion'} is null; give every row a text"
        )
    if template is None:
        return Laid(prompt + completion + suffix, len(prompt))
    messages = _messages(prompt)
    begun = beginning_of(messages)
    said = messages if begun is None else messages[:-1]
    turn = {"role": "assistant", "content": (begun or "") + completion}
    text = template.render([*said, turn], opens=False)
    begin = text.rfind(completion)
    if begin < 0:
        raise ValueError(
            f"the judge's chat template changes the completion {completion[:40]!r}, found"
            f" {text[-80:]!r}; use chat=False"
        )
    return Laid(text + suffix, begin)


def step_ends(completion: str, cut: str) -> list[int]:
    """The end of each step, in characters: behind each `cut`, and at the end; a step without a word
    is none."""
    ends: list[int] = []
    begin = 0
    while begin < len(completion):
        at = completion.find(cut, begin)
        end = len(completion) if at < 0 else at + len(cut)
        if completion[begin:end].replace(cut, "").strip():
            ends.append(end)
        begin = end
    return ends


def tokens_at(token_ends: AnyArray, characters: AnyArray) -> AnyArray:
    """For each number of characters the first token with which so many are there. token_ends:
    [tokens], characters up to each token's end; 0 for tokens that stand for no text."""
    return np.searchsorted(np.maximum.accumulate(token_ends), characters)


def read_ends(tokenizer: Any, tokens: list[int], characters: list[int]) -> list[int]:
    """For each number of characters, ascending, the first of the tokens with which so many are
    there.

    Raises ValueError when all of them together are fewer.
    """
    found: list[int] = []
    low = 0
    for wanted in characters:
        high = len(tokens)
        if len(tokenizer.decode(tokens, skip_special_tokens=True)) < wanted:
            raise ValueError(
                "the tokens hold less text than the completion; give policy=Model(...), whose"
                " tokens they are"
            )
        while low < high:
            middle = (low + high) // 2
            if len(tokenizer.decode(tokens[: middle + 1], skip_special_tokens=True)) < wanted:
                low = middle + 1
            else:
                high = middle
        found.append(low)
    return found


def _messages(prompt: str) -> list[dict[str, Any]]:
    try:
        found = json.loads(prompt)
    except json.JSONDecodeError:
        found = None
    return found if isinstance(found, list) else [{"role": "user", "content": prompt}]
