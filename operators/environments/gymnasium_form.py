"""Environments of Gymnasium: the action space says how actions are parsed from a turn."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dataflow.system.text import strict_json
from operators.environments.session import InvalidAction, Seen, worded

_NUMBER = re.compile(r"-?\d+")


def make(name: str, *, actions: Sequence[str] = (), **options: Any) -> GymnasiumSession:
    """`gymnasium.make(name, **options)`.

    actions: words for the actions of a discrete space, in its order; none: its numbers.
    """
    import gymnasium

    return GymnasiumSession(gymnasium.make(name, **options), tuple(actions))


def fault(name: str, **options: Any) -> str | None:
    """Why no text could be an action of it; None where some could."""
    try:
        session = make(name, **options)
    except Exception as error:
        return (
            f"cannot be made; found {type(error).__name__}: {error}; correct its name or options="
        )
    try:
        session.read("")
    except (InvalidAction, TypeError) as error:
        return None if isinstance(error, InvalidAction) else str(error)
    finally:
        session._env.close()
    return None


class GymnasiumSession:
    """One environment, in this process."""

    def __init__(self, env: Any, actions: tuple[str, ...]) -> None:
        self._env, self._actions = env, actions

    async def reset(self, task: Mapping[str, Any], seed: int) -> Seen:
        """As `Session.reset`; the task's `options` are those of Gymnasium."""
        observation, _ = self._env.reset(seed=seed, options=task.get("options"))
        return Seen(raw=observation, text=worded(observation))

    def read(self, text: str) -> Any:
        """The last word of `actions`, or the last number, in a turn; the last list of numbers for a
        space of arrays.
        """
        from gymnasium import spaces

        space = self._env.action_space
        match space:
            case spaces.Discrete() if self._actions:
                places = {word: text.rfind(word) for word in self._actions}
                word = max(places, key=lambda action: (places[action], len(action)))
                action: Any = (
                    int(space.start) + self._actions.index(word) if places[word] >= 0 else None
                )
                expected = f"one of {', '.join(self._actions)}"
            case spaces.Discrete():
                numbers = _NUMBER.findall(text)
                action = int(numbers[-1]) if numbers else None
                expected = f"a number from {space.start} to {space.start + space.n - 1}"
            case spaces.Text():
                action, expected = text.strip(), str(space)
            case spaces.Box() | spaces.MultiDiscrete() | spaces.MultiBinary():
                action, expected = _array(text, space), f"a list of numbers for {space}"
            case _:
                raise TypeError(
                    f"has actions of {space}, which no text is read as; give environment(...,"
                    " action=function)"
                )
        if action is None or not space.contains(action):
            raise InvalidAction(f"That is no action; say {expected}.")
        return action

    async def step(self, action: Any) -> Seen:
        observation, reward, terminated, truncated, _ = self._env.step(action)
        return Seen(
            raw=observation,
            text=worded(observation),
            reward=reward,
            terminated=bool(terminated),
            truncated=bool(truncated),
        )

    async def close(self) -> None:
        self._env.close()


def _array(text: str, space: Any) -> Any:
    """The last list in a text as an array of a space; None where there is none."""
    import numpy as np

    for list_text in reversed(re.findall(r"\[[^\[\]]*\]", text)):
        try:
            numbers = json.loads(list_text)
            strict_json(numbers)
            return np.asarray(numbers, space.dtype).reshape(space.shape)
        except (ValueError, TypeError, OverflowError):
            continue
    return None
