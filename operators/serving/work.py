"""What passes between a server and the thread that drives the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dataflow.records import AnyArray
from dataflow.tokens.rollout_tokens import RolloutTokens


@dataclass(frozen=True)
class News:
    """A rollout as it is now, complete from its first token on; the last news of it has a reason."""

    position: int
    tokens: RolloutTokens
    """Of the completion."""
    reason: int | None = None
    """STOPPED, TOO_LONG, BROKEN, ABORTED, or None while it goes on."""
    error: str | None = None
    alternatives: Sequence[Sequence[tuple[int, float]]] = ()
    """By token the likeliest ids and their log-probabilities, where they were asked for."""


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
