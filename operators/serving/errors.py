"""The answer to a call that cannot be served, and how much of a stranger's call is taken in
before anything is built of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from dataflow.system.text import strict_json

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
}
"""Type by status; everything else is a server_error."""


CALL_TIMEOUT_S = 600.0
"""For a call, where the server is told no other time."""


class ApiError(Exception):
    """A call that is refused or has failed: `status` over HTTP, and a message in three parts."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        """Say what is wrong, which field it is about, and a code that programs may ask for."""
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def body(self) -> dict[str, Any]:
        """The JSON of the answer."""
        kind = TYPES.get(self.status, "server_error")
        return {
            "error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        }


def bad(param: str, message: str, code: str = "invalid_value") -> ApiError:
    """A field that cannot be right."""
    return ApiError(400, message, param=param, code=code)


def too_long(message: str, param: str) -> ApiError:
    """A prompt, or prompt and completion, for which the context has no room."""
    return ApiError(400, message, param=param, code="context_length_exceeded")


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
