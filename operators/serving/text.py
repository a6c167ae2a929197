"""Text of a completion while it grows: whole characters only, and never a part of a stop string."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from operators.chat.chat_template import special_tokens

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_BROKEN = "\ufffd"

WINDOW = 16
"""Tokens that are decoded again with each new one, at most (more where a character is
incomplete)."""


class Vocabulary:
    """A tokenizer, with what is asked about single tokens kept."""

    def __init__(self, tokenizer: Any) -> None:
        """Wrap a tokenizer that only this thread uses."""
        self.tokenizer = tokenizer
        self._kinds: dict[int, tuple[bool, bool]] = {}
        self._shown: frozenset[int] = frozenset()
        self.special = special_tokens(tokenizer)
        """Ids of special tokens, by their text."""
        self._hidden = frozenset(self.special.values())

    def show(self, text: str) -> None:
        """Special tokens that stand in this text are a part of the text of tokens from now on."""
        self._shown = frozenset(token for name, token in self.special.items() if name in text)

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Text of tokens, without special tokens unless asked for (or shown)."""
        if self._shown and not special:
            tokens, special = (
                [token for token in tokens if token not in self._hidden or token in self._shown],
                True,
            )
        return self.tokenizer.decode(  # type: ignore[no-any-return]
            list(tokens), skip_special_tokens=not special, clean_up_tokenization_spaces=False
        )

    def is_hidden(self, token: int) -> bool:
        """Whether the token is a special one, which has no part in the text."""
        return self._kind(token)[0]

    def is_byte(self, token: int) -> bool:
        """Whether the token is a byte of a character that the vocabulary lacks; a run of them is
        read as one.
        """
        return self._kind(token)[1]

    def _kind(self, token: int) -> tuple[bool, bool]:
        if token not in self._kinds:
            hidden = not self.decode([token]) and bool(self.decode([token], special=True))
            byte = bool(_BYTE_TOKEN.fullmatch(str(self.tokenizer.convert_ids_to_tokens(token))))
            self._kinds[token] = hidden, byte
        return self._kinds[token]


class Detokenizer:
    """Text of tokens that come one at a time; all pieces together are the text of all tokens.

    It decodes a window that begins a piece earlier, since many decoders treat the beginning of a
    text otherwise.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Begin with no token."""
        self._vocabulary = vocabulary
        self._window: list[int] = []
        self._piece = 0
        self._known = 0
        self._before = ""

    def push(self, token: int) -> str:
        """What is certain of the text now and was not before; "" while a character is
        incomplete.
        """
        if self._vocabulary.is_hidden(token):
            return ""
        self._window.append(token)
        whole = self._vocabulary.decode(self._window)
        if whole.endswith(_BROKEN) or self._vocabulary.is_byte(token):
            return ""
        new = whole[len(self._before) :]
        self._piece, self._known, self._before = self._known, len(self._window), whole
        if self._known > WINDOW:
            self._window = self._window[self._piece :]
            self._piece, self._known = 0, len(self._window)
            self._before = self._vocabulary.decode(self._window)
        return new

    def finish(self) -> str:
        """What remains when no token comes any more: an incomplete character is a replacement
        character.
        """
        return self._vocabulary.decode(self._window)[len(self._before) :]


def held_back(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of `text` could be the beginning of a stop string."""
    longest = max((len(stop) for stop in stops), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-size:]) for stop in stops if len(stop) > size):
            return size
    return 0


class Transcript:
    """The text of one completion: `text` may be shown, and only ever grows."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        stops: Sequence[str] = (),
        begun: Sequence[int] = (),
        ends: Sequence[str] = (),
    ) -> None:
        """The text ends before the first of `stops`, which the caller asked for, or of `ends`.
        begun: tokens that it begins with, in which no stop is looked for.
        """
        self._detokenizer, self._special = Detokenizer(vocabulary), vocabulary.special
        self._asked, self._stops = tuple(stops), (*stops, *ends)
        self._longest = max((len(stop) for stop in self._stops), default=0)
        self._all = "".join(map(self._detokenizer.push, begun))
        self._begun = self._shown = len(self._all)
        self._cut = False
        self._last: int | None = None
        self.offsets: list[int] = []
        """By token, how many characters are certain before it."""

    @property
    def text(self) -> str:
        """What may be shown now."""
        return self._all[: self._shown]

    @property
    def stopped_by(self) -> str | None:
        """What was asked for that the text ends before."""
        if not self._cut:
            return next(
                (stop for stop in self._asked if self._special.get(stop, -1) == self._last), None
            )
        behind = self._all[self._shown :]
        return next((stop for stop in self._asked if behind.startswith(stop)), None)

    def push(self, token: int) -> None:
        """One more token, which is not an end token."""
        self.offsets.append(len(self._all))
        self._add(self._detokenizer.push(token))
        if not self._cut:
            self._shown = len(self._all) - held_back(self._all[self._begun :], self._stops)

    def finish(self, last: int | None = None) -> None:
        """No token comes any more. last: that at which the rollout stopped."""
        self._last = last
        self._add(self._detokenizer.finish())
        if not self._cut:
            self._shown = len(self._all)

    def end_of(self, tokens: int) -> int:
        """How many characters are certain after so many of the first tokens."""
        return self.offsets[tokens] if tokens < len(self.offsets) else len(self._all)

    def whole_tokens(self) -> int:
        """How many of the first tokens have all their text in `text`."""
        return sum(self.end_of(count) <= self._shown for count in range(1, len(self.offsets) + 1))

    def _add(self, new: str) -> None:
        since = max(self._begun, len(self._all) - self._longest + 1)
        self._all += new
        if new and not self._cut:
            places = [at for at in (self._all.find(stop, since) for stop in self._stops) if at >= 0]
            if places:
                self._cut, self._shown = True, min(places)
