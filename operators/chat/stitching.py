"""Ids of a text that holds earlier turns: theirs as they were sampled, the rest encoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from operators.chat.chat_format import ChatFormat, Message


@dataclass(frozen=True)
class Said:
    """A turn of the policy's."""

    message: Message
    ids: tuple[int, ...]
    text: str
    """Of the ids, special tokens too."""
    tail: str
    """What of it ended the turn: an end token, a stop string, or nothing."""


def stitched(form: ChatFormat, text: str, said: Sequence[Said]) -> list[int]:
    """Ids that spell the text; turns that stand in it, in their order, keep theirs."""
    ids: list[int] = []
    at = 0
    for turn in said:
        laid_out, ended = turn.text, turn.tail != "" and form.closing.startswith(turn.tail)
        if _ends(form, turn.ids):
            laid_out, ended = turn.text.removesuffix(turn.tail) + form.ending, True
        begin = text.find(laid_out if ended else laid_out + form.closing, at)
        if begin < 0 or not turn.text:
            continue
        ids += form.encode(text[at:begin], behind_end=_ends(form, ids))
        ids += turn.ids
        at = begin + len(laid_out)
    return ids + form.encode(text[at:], behind_end=_ends(form, ids))


def _ends(form: ChatFormat, ids: Sequence[int]) -> bool:
    return bool(ids) and ids[-1] == form.end
