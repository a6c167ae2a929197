"""Turns prompts (text, or chat messages as JSON) into token ids, or into what is wrong with
them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dataflow.errors import RecordError
from dataflow.model import Model
from dataflow.node import Generate
from dataflow.records import CHAT_TEMPLATE_KWARGS, PROMPT, TOOLS, AnyArray
from dataflow.scoring.failure import TOO_LONG, UNUSABLE, RolloutFailure
from operators.chat.chat_template import ChatTemplate, Message, ids_behind, text_ids

_LOOKED_BYTES = 8 << 20
"""Of prompts that are made tokens of to know how many are too long: a second or two."""
_LAID_OUT_BYTES = 256
"""That a template may put around a prompt."""
_LEAST_CONTEXT = 512
"""Tokens that every model of any use has."""

T = TypeVar("T", bound=ChatTemplate)


@dataclass(frozen=True)
class RowLayout:
    """A row's own chat options, as JSON; null for none. Raises ValueError when it is read."""

    tools: str | None = None
    """Definitions of tools."""
    options: str | None = None
    """Of the chat template."""

    @classmethod
    def of_rows(cls, records: pa.RecordBatch | pa.Table) -> list[RowLayout]:
        """Of each row, in its columns `tools` and `chat_template_kwargs`, where it has them as
        text.
        """
        columns = [
            (
                records.column(name).to_pylist()
                if name in records.schema.names
                and pa.types.is_string(records.schema.field(name).type)
                else [None] * records.num_rows
            )
            for name in (TOOLS, CHAT_TEMPLATE_KWARGS)
        ]
        return [cls(*values) for values in zip(*columns, strict=True)]

    def of(self, template: T, tools: Sequence[Message]) -> tuple[T, Sequence[Message]]:
        """The template with the row's own options, and the tools that it lists. tools: the
        episode's, of which a row may choose some.
        """
        own: list[Message] = _read(TOOLS, self.tools, list) or []
        unknown = [
            name for name in map(_name_of, own) if tools and name not in set(map(_name_of, tools))
        ]
        if unknown:
            raise ValueError(
                f"the row has tools that its episode has not; found {unknown} in column '{TOOLS}';"
                " leave them out, or give them to the episode"
            )
        return template.given(_read(CHAT_TEMPLATE_KWARGS, self.options, dict) or {}), own or tools


def encode(
    tokenizer: Any,
    prompts: Sequence[str | None],
    layouts: Sequence[RowLayout],
    *,
    node: str,
    template: ChatTemplate | None,
    context_tokens: int,
    vocabulary: float = math.inf,
    tools: Sequence[Message] = (),
) -> list[AnyArray | str]:
    """For each prompt its tokens, int64 [1 .. context_tokens - 1], or its failure as text.

    node: whose failure that is. layouts: what each row says of how it is laid out. template: lays
    the prompts out, which are JSON lists of {"role", "content"}; None: they are texts. What the
    assistant has begun to say is gone on with. vocabulary: tokens that the model knows, where that
    is told. tools: definitions that the template is to tell of.
    """
    encoded: list[AnyArray | str] = ["" for _ in prompts]
    texts: dict[int, tuple[str, str]] = {}
    for place, (prompt, layout) in enumerate(zip(prompts, layouts, strict=True)):
        try:
            texts[place] = (
                (_text(prompt), "")
                if template is None
                else _laid_out(prompt, *layout.of(template, tools))
            )
        except Exception as error:
            encoded[place] = str(RolloutFailure(node, UNUSABLE, str(error)))
    rows = text_ids(tokenizer, [text for text, _ in texts.values()], begins=template is None)
    for (place, (_, begun)), ids in zip(texts.items(), rows, strict=True):
        encoded[place] = _checked(
            ids + ids_behind(tokenizer, begun), context_tokens, vocabulary, node
        )
    return encoded


def too_long(taker: Generate, table: pa.Table) -> str:
    """How many prompts have no room in the context of what takes them, as a sentence; empty where
    all have some.

    Only prompts of as many bytes are made tokens of, and of very many some. Raises RecordError
    where none has room.
    """
    from operators.models.borders import longest
    from operators.models.loading import load_configs, load_tokenizer

    model, declared = (
        taker.uses or getattr(taker, "model", None),
        taker.traits.sampling.context_tokens,
    )
    bytes_of = _bytes_of(table)
    if not isinstance(model, Model) or int(bytes_of.max()) + _LAID_OUT_BYTES < (
        declared or _LEAST_CONTEXT
    ):
        return ""
    most = longest(model, load_configs(model)[0], declared)
    if most is None:
        return ""
    may_be = np.flatnonzero(bytes_of + _LAID_OUT_BYTES >= most)
    step = max(1, -(-int(bytes_of[may_be].sum()) // _LOOKED_BYTES))
    looked = (
        may_be
        if step == 1
        else np.random.default_rng(0).choice(may_be, -(-len(may_be) // step), replace=False)
    )
    rows, tokenizer = table.take(pa.array(looked)), load_tokenizer(model)
    template = ChatTemplate(tokenizer, **taker.traits.chat_options) if taker.traits.chat else None
    texts, layouts = rows.column(PROMPT).to_pylist(), RowLayout.of_rows(rows)
    tokens = encode(
        tokenizer, texts, layouts, node=taker.name, template=template, context_tokens=most
    )
    count = [RolloutFailure.read(text).cause for text in tokens if isinstance(text, str)].count(
        TOO_LONG
    )
    if not count:
        return ""
    number, about = round(count * len(may_be) / len(looked)), "about " if step > 1 else ""
    sentence = (
        f"{about}{number} of {len(table)} prompts can never be trained: they are too long for"
        f" '{taker.name}', whose context is {most} tokens, completion included; shorten them, leave"
        " them out with rows=, or raise context_tokens"
    )
    if count == len(table):
        raise RecordError(sentence)
    return sentence


def _bytes_of(table: pa.Table) -> AnyArray:
    """Of each row the bytes that its prompt is made of."""
    names = [name for name in (PROMPT, TOOLS) if name in table.schema.names]
    texts = [
        table.column(name) for name in names if pa.types.is_string(table.schema.field(name).type)
    ]
    lengths = [pc.fill_null(pc.binary_length(text), 0).to_numpy() for text in texts]
    total: AnyArray = np.stack(lengths).sum(axis=0)
    return total


def _laid_out(
    prompt: str | None, template: ChatTemplate, tools: Sequence[Message]
) -> tuple[str, str]:
    try:
        messages = json.loads(_text(prompt))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"the prompt is not chat messages in JSON ({error}); found {_text(prompt)[:80]!r}; "
            f'give a list of {{"role", "content"}}, or turn off the chat knob'
        ) from error
    return template.begun(messages, tools)


def _name_of(tool: Message) -> Any:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return function.get("name") if isinstance(function, Mapping) else None


def _read(column: str, text: str | None, kind: type) -> Any:
    """The value of a row's own column. Raises ValueError for one of another kind."""
    try:
        value = None if text is None else json.loads(text)
    except json.JSONDecodeError:
        value = text
    if value is not None and not isinstance(value, kind):
        raise ValueError(
            f"column '{column}' holds no JSON {'list' if kind is list else 'object'}; found"
            f" {str(text)[:80]!r}; mend the row"
        )
    return value


def _text(prompt: str | None) -> str:
    if prompt is None:
        raise ValueError("the prompt is null; give every row a text")
    return prompt


def unknown_token(ids: Sequence[int] | AnyArray, vocabulary: float, node: str) -> str | None:
    """The failure of tokens of which the model does not know one; None where it knows them all."""
    largest = max(ids, default=0)
    if largest < vocabulary:
        return None
    why = (
        f"the text has token {largest}, but the model knows {vocabulary}: its tokenizer makes more"
        " than it has embeddings for; leave what becomes that token out, or give the model the"
        " tokenizer that it was trained with"
    )
    return str(RolloutFailure(node, UNUSABLE, why))


def _checked(ids: list[int], context_tokens: int, vocabulary: float, node: str) -> AnyArray | str:
    if not ids:
        why = "the prompt is empty: the tokenizer made 0 tokens of it; give every row a text"
        return str(RolloutFailure(node, UNUSABLE, why))
    if len(ids) >= context_tokens:
        why = (
            f"the prompt is too long: it has {len(ids)} tokens and the context has room for"
            f" {context_tokens} with the completion; shorten it, or raise context_tokens"
        )
        return str(RolloutFailure(node, TOO_LONG, why))
    return unknown_token(ids, vocabulary, node) or np.asarray(ids, dtype=np.int64)
