"""Tasks of reasoning-gym: a question, answers, and what they are worth."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

from operators.environments.session import Seen

_ITEMS = 1 << 30


def make(name: str, *, attempts: int = 1, seed: int = 0, **options: Any) -> ReasoningGymSession:
    """The tasks of `create_dataset(name, seed=seed, **options)`; the seed of a row is the number of
    its item.

    attempts: answers that the policy has; after one that is not wholly right it hears what it was
    worth.
    """
    return ReasoningGymSession(_items(name, seed, json.dumps(options, sort_keys=True)), attempts)


@functools.lru_cache(maxsize=8)
def _items(name: str, seed: int, options: str) -> Any:
    """A data set, whose items are made when they are asked for: one for all sessions of a
    process.
    """
    import reasoning_gym

    return reasoning_gym.create_dataset(
        name, **{"size": _ITEMS, **json.loads(options), "seed": seed}
    )


class ReasoningGymSession:
    """One task at a time."""

    def __init__(self, items: Any, attempts: int) -> None:
        self._items, self._attempts, self._left = items, attempts, attempts
        self._entry: dict[str, Any] = {}

    async def reset(self, task: Mapping[str, Any], seed: int) -> Seen:
        self._entry, self._left = self._items[seed], self._attempts
        question = self._entry["question"]
        return Seen(raw=question, text=question)

    def read(self, text: str) -> str:
        """What stands between <answer> and </answer>, or all of the turn."""
        from reasoning_gym.utils import extract_answer

        return str(extract_answer(text) or text).strip()

    async def step(self, action: str) -> Seen:
        """As `Session.step`; the reward is that of the last answer."""
        worth = float(self._items.score_answer(answer=action, entry=self._entry))
        self._left -= 1
        if worth >= 1.0 or not self._left:
            return Seen(reward=worth, terminated=True)
        text = f"That is not right ({worth:g} of 1). Try again."
        return Seen(raw=text, text=text)

    async def close(self) -> None: ...
