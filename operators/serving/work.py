"""What passes between a server and what draws for it: a thread around an engine, or the generator
of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dataflow.records import AnyArray
from dataflow.tokens.rollout_tokens import RolloutTokens
from operators.serving.errors import ApiError


@dataclass(frozen=True)
class News:
    """A rollout as it is now, complete from its first token on; the last news of it has a
    reason.
    """

    position: int
    tokens: RolloutTokens
    """Of the completion."""
    reason: int | None = None
    """STOPPED, TOO_LONG, BROKEN, ABORTED, or None while it goes on."""
    error: str | None = None
    alternatives: Sequence[Sequence[tuple[int, float]]] = ()
    """By token the likeliest ids and their log-probabilities, where they were asked for."""
    refusal: ApiError | None = None
    """What the caller is told of one that was not drawn, where its reason does not say."""


@dataclass(eq=False, kw_only=True)
class Work:
    """A prompt and the rollouts wanted of it."""

    prompt: AnyArray
    """Token ids, int64 [at least 1]."""
    limit: int
    """Most tokens of prompt and completion together."""
    seeds: Sequence[int]
    """One for each rollout."""
    sampling: Any
    stop: Any
    """A `StopStrings`, or None."""
    tell: Callable[[News], None]
    """Hears of every rollout; called on the engine's thread, and returns soon."""
    session: str | None = None
    """Of its call."""
    most: int | None = None
    """Tokens of a completion, as its call says; None: it does not."""
    alternatives: int = 0
    """Likeliest tokens that are wanted beside each one."""
    streams: bool = False
    """Whether it hears of tokens before a rollout ends."""
    begun: int = field(default=0, init=False)
    """Rollouts that were given to the engine."""
    tickets: dict[int, int] = field(default_factory=dict, init=False)
    """Position by ticket, of those that are live."""
    why: str | None = field(default=None, init=False)
    """Why it was cancelled."""


class ServedEngine(Protocol):
    """What a server has to know of the engine that draws for it."""

    @property
    def context_tokens(self) -> int:
        """Most tokens of prompt and completion."""

    @property
    def version(self) -> int:
        """Of its weights."""

    @property
    def live(self) -> int:
        """Rollouts that are being drawn."""


class Draws(Protocol):
    """What draws the works of a service; called on the event loop."""

    failure: str | None
    """Why it draws no more."""

    @property
    def engine(self) -> ServedEngine:
        """That it draws with."""

    @property
    def waiting(self) -> int:
        """Prompts that are not wholly started."""

    def start(self) -> None:
        """Begin to draw."""

    def submit(self, works: Sequence[Work]) -> None:
        """Take prompts, all of them or none. Raises RunError, ApiError."""

    def check_room(self, prompts: int = 1) -> None:
        """Refuse what `submit` would refuse, before anything is made of it. Raises RunError."""

    def cancel(self, work: Work, why: str) -> None:
        """Nobody waits for a work any more."""

    def close(self, timeout_s: float = 30.0) -> None:
        """End all that is under way."""
