"""OpenAI's chats and completions."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from operators.serving.apis.api import Api
from operators.serving.calls import ServedCall
from operators.serving.requests import parse
from operators.serving.responses import DONE, Chunks, event, whole
from operators.serving.text import Vocabulary


class ToldChunks:
    """Chunks as events."""

    def __init__(self, call: ServedCall, vocabulary: Vocabulary) -> None:
        """Nothing sent yet."""
        self._chunks = Chunks(call, vocabulary)

    def new(self) -> Iterator[str]:
        """Events since the last call."""
        yield from map(event, self._chunks.new())

    def last(self) -> Iterator[str]:
        """Events after all else."""
        yield from map(event, self._chunks.last())


CHAT_COMPLETIONS = Api("/v1/chat/completions", partial(parse, "chat"), whole, ToldChunks, done=DONE)
COMPLETIONS = Api("/v1/completions", partial(parse, "completion"), whole, ToldChunks, done=DONE)
