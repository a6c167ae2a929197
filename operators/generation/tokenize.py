"""Turns prompts (text, or chat messages as JSON) into token ids, or into what is wrong with them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dataflow.errors import RecordError
from dataflow.model import Model
from dataflow.node import Generate
from dataflow.records import AnyArray
from dataflow.scoring.failure import TOO_LONG, UNUSABLE, RolloutFailure

_LOOKED_BYTES = 8 << 20
"""Of prompts that are made tokens of to know how many are too long: a second or two."""
_LAID_OUT_BYTES = 256
"""That a template may put around a prompt."""
_LEAST_CONTEXT = 512
"""Tokens that every model of any use has."""


def encode(
    tokenizer: Any, prompts: Sequence[str | None], *, node: str, chat: bool, context_tokens: int,
    vocabulary: float = math.inf, tools: Sequence[Any] = (),
) -> list[AnyArray | str]:  # fmt: skip
    """For each prompt its tokens, int64 [1 .. context_tokens - 1], or its failure as text.

    node: whose failure that is. chat: the prompts are JSON lists of {"role", "content"}, laid out by the tokenizer's
    chat template. vocabulary: tokens that the model knows, where that is told. tools: definitions that the template is
    to tell of.
    """
    found: list[AnyArray | str] = ["" for _ in prompts]
    texts: dict[int, str] = {}
    for place, prompt in enumerate(prompts):
        try:
            texts[place] = _chat_text(tokenizer, prompt, tools) if chat else _text(prompt)
        except Exception as error:
            found[place] = str(RolloutFailure(node, UNUSABLE, str(error)))
    if texts:
        rows = tokenizer(list(texts.values()), add_special_tokens=not chat)["input_ids"]
        for place, ids in zip(texts, rows, strict=True):
            found[place] = _checked(ids, context_tokens, vocabulary, node)
    return found


def too_long(taker: Generate, prompts: pa.ChunkedArray) -> str:
    """How many prompts have no room in the context of what takes them, as a sentence; empty where all have some.

    Only prompts of as many bytes are made tokens of, and of very many some. Raises RecordError where none has room.
    """
    from operators.models.borders import longest
    from operators.models.loading import load_configs, load_tokenizer

    model, declared = taker.uses or getattr(taker, "model", None), taker.traits.context_tokens
    bytes_of = pc.binary_length(prompts).to_numpy()
    if not isinstance(model, Model) or int(bytes_of.max()) + _LAID_OUT_BYTES < (declared or _LEAST_CONTEXT):
        return ""
    most = longest(model, load_configs(model)[0], declared)
    if most is None:
        return ""
    may_be = np.flatnonzero(bytes_of + _LAID_OUT_BYTES >= most)
    step = max(1, -(-int(bytes_of[may_be].sum()) // _LOOKED_BYTES))
    looked = may_be if step == 1 else np.random.default_rng(0).choice(may_be, -(-len(may_be) // step), replace=False)
    texts = prompts.take(pa.array(looked)).to_pylist()
    tokens = encode(load_tokenizer(model), texts, node=taker.name, chat=bool(taker.traits.chat), context_tokens=most)
    count = [RolloutFailure.read(each).cause for each in tokens if isinstance(each, str)].count(TOO_LONG)
    if not count:
        return ""
    number, about = round(count * len(may_be) / len(looked)), "about " if step > 1 else ""
    said = (
        f"{about}{number} of {len(prompts)} prompts can never be trained: they are too long for '{taker.name}', whose "
        f"context is {most} tokens, completion included; shorten them, leave them out with rows=, or raise "
        f"context_tokens"
    )
    if count == len(prompts):
        raise RecordError(said)
    return said


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


def unknown_token(ids: Sequence[int] | AnyArray, vocabulary: float, node: str) -> str | None:
    """The failure of tokens of which the model does not know one; None where it knows them all."""
    largest = max(ids, default=0)
    if largest < vocabulary:
        return None
    why = (
        f"the text has token {largest}, but the model knows {vocabulary}: its tokenizer makes more than it has "
        f"embeddings for; leave what becomes that token out, or give the model the tokenizer that it was trained with"
    )
    return str(RolloutFailure(node, UNUSABLE, why))


def _checked(ids: list[int], context_tokens: int, vocabulary: float, node: str) -> AnyArray | str:
    if not ids:
        why = "the prompt is empty: the tokenizer made 0 tokens of it; give every row a text"
        return str(RolloutFailure(node, UNUSABLE, why))
    if len(ids) >= context_tokens:
        why = (
            f"the prompt is too long: it has {len(ids)} tokens and the context has room for {context_tokens} "
            f"with the completion; shorten it, or raise context_tokens"
        )
        return str(RolloutFailure(node, TOO_LONG, why))
    return unknown_token(ids, vocabulary, node) or np.asarray(ids, dtype=np.int64)
