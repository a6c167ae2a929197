"""The interface of an environment to an episode: sessions that are reset, stepped and closed."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from dataflow.errors import WorldFailed

ANSWER_BYTES = 8 << 20
"""Most that a server may answer to one request; longer than what an episode may hear, as JSON makes
texts longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What an environment answers to a reset or a step."""

    text: str = ""
    """What the policy hears of it; empty: nothing."""
    raw: Any = None
    """The same as the environment gave it, for `wording`."""
    reward: float | None = None
    """None: the environment said none."""
    terminated: bool = False
    """Whether the task is over."""
    truncated: bool = False
    """Whether the environment has cut it off."""


class InvalidAction(ValueError):
    """The policy's text is no action of this environment; the message, which the policy may read,
    says why.
    """


class Session(Protocol):
    """One environment at work, for one episode at a time."""

    async def reset(self, task: Mapping[str, Any], seed: int) -> Seen:
        """Begin again. task: from the row. The same task and seed give the same world."""

    def read(self, text: str) -> Any:
        """The action that a turn of the policy's stands for. Raises InvalidAction where it is
        none.
        """

    async def step(self, action: Any) -> Seen:
        """Act. Raises InvalidAction where the environment itself calls it none."""

    async def close(self) -> None:
        """Give back what it holds."""


def seed_of(task: Mapping[str, Any]) -> int:
    """The seed that a task names, or one that its text makes: all rollouts of a prompt meet the
    same world.

    >>> seed_of({"seed": 7}), seed_of({"question": "2+2="}) == seed_of({"question": "2+2="})
    (7, True)
    """
    seed = task.get("seed")
    return (
        seed
        if isinstance(seed, int)
        else zlib.crc32(json.dumps(task, sort_keys=True).encode()) >> 2
    )


def checked_reward(value: Any, name: str) -> float | None:
    """A reward as a number; WorldFailed for what is none, or not finite."""
    if value is None:
        return None
    try:
        reward = float(value)
    except (TypeError, ValueError):
        reward = math.nan
    if not math.isfinite(reward):
        raise WorldFailed(
            f"'{name}' gave a reward that is no finite number; found {value!r:.60}; look at what"
            " it is"
        )
    return reward


def worded(raw: Any) -> str:
    """An observation as text: texts as they are, all else as JSON, the one text of an object alone.

    >>> worded({"response": "hello", "tools": []}), worded([0.123456, 2])
    ('hello', '[0.1235, 2]')
    """
    if isinstance(raw, str):
        return raw
    raw = _plain(raw)
    if isinstance(raw, dict):
        values = [value for value in raw.values() if value not in (None, "", [], {})]
        if len(values) == 1 and isinstance(values[0], str):
            return values[0]
    return json.dumps(raw, ensure_ascii=False, default=str)


def _plain(value: Any) -> Any:
    """Arrays and numbers of numpy's as Python's, of fractions four digits."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value
