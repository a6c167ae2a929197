"""Turns prompts (text, or chat messages as JSON) into token ids, or into what is wrong with them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from dataflow.records import AnyArray


def encode(
    tokenizer: Any, prompts: Sequence[str | None], *, chat: bool, context_tokens: int, tools: Sequence[Any] = ()
) -> list[AnyArray | str]:
    """For each prompt its tokens, int64 [1 .. context_tokens - 1], or a message in three parts.

    chat: the prompts are JSON lists of {"role", "content"}, laid out by the tokenizer's chat template.
    tools: definitions that the template is to tell of.
    """
    found: list[AnyArray | str] = ["" for _ in prompts]
    texts: dict[int, str] = {}
    for place, prompt in enumerate(prompts):
        try:
            texts[place] = _chat_text(tokenizer, prompt, tools) if chat else _text(prompt)
        except Exception as error:
            found[place] = str(error)
    if texts:
        rows = tokenizer(list(texts.values()), add_special_tokens=not chat)["input_ids"]
        for place, ids in zip(texts, rows, strict=True):
            found[place] = _checked(ids, context_tokens)
    return found


def _text(prompt: str | None) -> str:
    if prompt is None:
        raise ValueError("the prompt is null; give every row a text")
    return prompt


def _chat_text(tokenizer: Any, prompt: str | None, tools: Sequence[Any]) -> str:
    try:
        messages = json.loads(_text(prompt))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"the prompt is not chat messages in JSON ({error}); found {_text(prompt)[:80]!r}; "
            f'give a list of {{"role", "content"}}, or turn off the chat knob'
        ) from error
    return tokenizer.apply_chat_template(  # type: ignore[no-any-return]
        messages, tools=list(tools) or None, tokenize=False, add_generation_prompt=True
    )


def _checked(ids: list[int], context_tokens: int) -> AnyArray | str:
    if not ids:
        return "the prompt is empty: the tokenizer made 0 tokens of it; give every row a text"
    if len(ids) >= context_tokens:
        return (
            f"the prompt is too long: it has {len(ids)} tokens and the context has room for {context_tokens} "
            f"with the completion; shorten it, or raise context_tokens"
        )
    return np.asarray(ids, dtype=np.int64)
