"""The answer to a call that cannot be served: an HTTP status and an error in OpenAI's shape."""

from __future__ import annotations

from typing import Any

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
