"""How much of a stranger's call is taken in before anything is built of it, and how its JSON is
read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from dataflow.system.text import strict_json
from operators.serving.errors import ApiError


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What one call may ask for; what it asks beyond is refused before it costs more than reading
    it.
    """

    body_bytes: int = 8 << 20
    """Of a body."""
    bodies_bytes: int = 64 << 20
    """Of all bodies that are being read."""
    body_s: float = 60.0
    """For a body to arrive."""
    values: int = 1 << 18
    """Values in a body's JSON: brackets, braces and commas are counted, those in texts too."""
    messages: int = 4096
    rollouts: int = 1024
    """Prompts times n."""
    stops: int = 16
    """Stop strings."""
    stop_characters: int = 256
    """Of each."""
    name_characters: int = 256
    """Of a model's, user's or session's name."""
    samples: bool = True
    """Whether a call says how it is sampled; in a run the run does, and what calls wish for is read
    and set aside."""
    characters_per_token: int = 16
    """A prompt's text, tools and messages as JSON have at most so many for each token of the
    context."""


def read_json(text: str, most_values: int) -> Any:
    """The values of a JSON text.

    Raises ValueError where it is none, has too many values or nests too deep, and for what no file
    and no answer can hold: a lone surrogate, which is half of a character, and numbers that are not
    finite.
    """
    values = 1 + sum(map(text.count, "[{,"))
    if values > most_values:
        raise ValueError(
            f"it may have {values} values, and at most {most_values} are taken; send less at once"
        )
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("its brackets nest too deep") from error
    strict_json(value)
    return value


class Budget:
    """Bytes of bodies that are being read: a caller who would exceed the total is asked to come
    again.
    """

    def __init__(self, most: int) -> None:
        """Begin with none taken."""
        self._most, self.taken = most, 0

    def take(self, size: int) -> None:
        """Raises ApiError (429)."""
        if self.taken + size > self._most:
            raise ApiError(
                429,
                f"{self.taken} bytes of calls are being read, of at most {self._most}; try again"
                " later",
                code="overloaded",
            )
        self.taken += size

    def give(self, size: int) -> None:
        """So many are not needed any more."""
        self.taken -= size
