"""What tools with a state are to an episode: declared once, opened for each rollout, closed behind
it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from operators.chat.chat_format import Message


class TookTooLong(Exception):
    """A call passed its time limit and was ended; the model is told."""


class ToolSession(Protocol):
    """What one rollout has of a toolset."""

    async def call(
        self, name: str, arguments: Mapping[str, Any], *, timeout_s: float, characters: int
    ) -> str:
        """A call's result for the model; text beyond `characters` may be cut. Raises WorldFailed
        where the session itself is broken, so that the result is unknown; TookTooLong and other
        exceptions are told to the model.

        Raises WorldFailed where the session itself is broken, so that nobody knows what the call
        would have come to; TookTooLong, and whatever else it raises, is told to the model.
        """

    async def close(self) -> None:
        """Give back all that it has."""


@runtime_checkable
class Toolset(Protocol):
    """Tools that share a session."""

    @property
    def is_shared(self) -> bool:
        """Whether one session serves all rollouts of a process at once; the other numbers count for
        nothing then.
        """

    @property
    def at_once(self) -> int:
        """Most sessions that are alive at a time in a process."""

    @property
    def ahead(self) -> int:
        """Sessions that are kept ready before anybody asks."""

    @property
    def uses(self) -> int | None:
        """For how many rollouts a session serves, one after the other; None: as many as come."""

    def faults(self) -> Sequence[str]:
        """What cannot be right, in three parts each; quick, and asked on every machine."""

    def definitions(self) -> Sequence[Message]:
        """Its tools as OpenAI has them; asked once, in the worker. Raises GraphError."""

    async def open(self) -> ToolSession:
        """A session of its own. Raises WorldFailed."""
