"""Turns that episodes ask a generator for: what is asked, and in which queues they are admitted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dataflow.staleness import Bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn of a rollout that an episode makes: a group of one, admitted as the group of the
    rollout.
    """

    number: int
    """By which the batch that it came with knows it."""
    queue: str
    """In which it waits to be admitted, in the order of its rollout's group."""
    seed: int
    limit: int
    """Most tokens of the conversation and the turn."""
    temperature: float | None
    """At which it is sampled; None: as the generator samples when it starts."""
    stop: tuple[str, ...] = ()
    """Strings at which it ends; none: the generator's own."""


def with_turns(bounds: Mapping[str, Bound], episodes: Iterable[str]) -> dict[str, Bound]:
    """Bounds by source and, for each queue of turns, that of the source whose rollouts they belong
    to.
    """
    turns = {
        queue_of(episode, source): bound for episode in episodes for source, bound in bounds.items()
    }
    return {**bounds, **turns}


def no_turns(queues: Iterable[str]) -> set[str]:
    """Those queues in which prompts wait, and no turns."""
    return {queue for queue in queues if "/" not in queue}


def queue_of(episode: str, source: str) -> str:
    """In which the turns of one source's rollouts wait."""
    return f"{episode}/{source}"
