"""What the world says as tokens behind the policy's: as plain text, or with a chat template's delimiters around it."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from dataflow.records import AnyArray
from operators.chat.chat_format import ChatError, ChatFormat
from operators.chat.conversation import Conversation
from operators.episodes.dialogue import SaidTurn

KEPT_TEXTS = 4096
"""Short texts whose tokens are kept: worlds repeat themselves."""


class Words(Protocol):
    """Turns what the world says in one dialogue into tokens."""

    def given(self, prompt: AnyArray, turns: Sequence[SaidTurn], heard: Sequence[str]) -> AnyArray:
        """Tokens between the policy's last turn and its next, int32. Raises ChatError where there are none."""


class PlainWords:
    """Each text encoded alone."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._encode = functools.lru_cache(KEPT_TEXTS)(self._encoded)

    def given(self, prompt: AnyArray, turns: Sequence[SaidTurn], heard: Sequence[str]) -> AnyArray:
        """As `Words.given`."""
        return np.concatenate([np.zeros(0, np.int32), *(self._encode(text) for text in heard)])

    def _encoded(self, text: str) -> AnyArray:
        return np.asarray(self._tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)


class ChatWords:
    """What was heard as a message of the user's, laid out by a chat template behind what was sampled."""

    def __init__(self, form: ChatFormat, prompt: str) -> None:
        """prompt: messages as JSON."""
        self._form, self._messages = form, json.loads(prompt)
        self._talk: Conversation | None = None
        self._had: list[SaidTurn] = []
        """The turns that it has."""
        self._heard: tuple[str, ...] = ()
        """What was heard after them."""

    def given(self, prompt: AnyArray, turns: Sequence[SaidTurn], heard: Sequence[str]) -> AnyArray:
        """As `Words.given`."""
        talk = self._up_to(turns)
        if heard:
            talk.hear({"role": "user", "content": "".join(heard)})
        self._heard = tuple(heard)
        known = [prompt, *(part for turn in turns for part in (turn.given, turn.tokens.ids))]
        before, ids = np.concatenate(known), talk.prompt()
        if not np.array_equal(ids[: len(before)], before):
            raise ChatError(
                f"the chat template of '{self._form.name}' lays out what was said before otherwise once the world has "
                f"spoken; found so behind {len(turns)} turns; let the policy speak first, or give it another template"
            )
        return ids[len(before) :]

    def _up_to(self, turns: Sequence[SaidTurn]) -> Conversation:
        """The conversation with these turns: that of the last time where it goes on from there."""
        had, talk = len(self._had), self._talk
        goes_on = all(one is other for one, other in zip(self._had, turns, strict=False)) and had <= len(turns)
        if talk is None or not goes_on or (had == len(turns) and self._heard) or len(turns) > had + 1:
            talk, had, self._heard = Conversation(self._form, self._messages), 0, ()
        for turn in turns[had:]:
            if self._heard != turn.heard:
                talk.hear({"role": "user", "content": "".join(turn.heard)})
            self._heard = ()
            talk.say(turn.tokens, text=turn.text)
        self._talk, self._had = talk, list(turns)
        return talk
