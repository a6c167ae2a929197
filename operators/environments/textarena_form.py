"""Games of TextArena: one seat is the policy's, the others are an opponent's."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from operators.environments.session import Seen


def make(
    name: str,
    *,
    players: int = 1,
    seat: int = 0,
    opponent: Callable[[str], str] | None = None,
    **options: Any,
) -> TextArenaSession:
    """`textarena.make(name, **options)`, without the wrapper that repeats all that was said before.

    Args:
        players: seats of the game.
        seat: of the policy's.
        opponent: what the others say to what they see.
    """
    import textarena

    if players > 1 and opponent is None:
        raise ValueError(
            f"{name} has {players} players; give one for the others as options['opponent']"
        )
    return TextArenaSession(_new_only(textarena.make(name, **options)), players, seat, opponent)


class TextArenaSession:
    """One game, in this process."""

    def __init__(
        self, env: Any, players: int, seat: int, opponent: Callable[[str], str] | None
    ) -> None:
        self._env, self._players, self._seat, self._opponent = env, players, seat, opponent
        self._random: Any = None

    async def reset(self, task: Mapping[str, Any], seed: int) -> Seen:
        self._random = random.Random(seed).getstate()
        with self._own_numbers():
            self._env.reset(num_players=self._players, seed=seed)
            return self._seen(done=False)

    def read(self, text: str) -> str:
        """The turn unchanged."""
        return text

    async def step(self, action: str) -> Seen:
        """As `Session.step`; what the rules do not allow is the game's to answer."""
        with self._own_numbers():
            done, _ = self._env.step(action=action)
            return self._seen(done)

    async def close(self) -> None: ...

    def _seen(self, done: bool) -> Seen:
        """What the policy sees when it is its turn again, or at the end, with what the game was
        worth to it.
        """
        player, observation = self._env.get_observation()
        while not done and player != self._seat:
            assert self._opponent is not None, "there are others"
            done, _ = self._env.step(action=self._opponent(self._text(observation)))
            player, observation = self._env.get_observation()
        text = self._text(observation) if player == self._seat else ""
        if not done:
            return Seen(raw=text, text=text)
        rewards, facts = self._env.close()
        reason = (facts or {}).get(self._seat, {}).get("reason") or ""
        text = f"{text}\n{reason}".strip("\n")
        return Seen(raw=text, text=text, reward=(rewards or {}).get(self._seat), terminated=True)

    def _text(self, observation: Any) -> str:
        """Messages as a text, without the player's own; other senders' names stand in front."""
        if isinstance(observation, str):
            return observation
        messages = [
            (sender, text)
            for sender, text, _ in observation or ()
            if sender != self._env.state.current_player_id
        ]
        return "\n".join(
            text if sender < 0 else f"[Player {sender}] {text}" for sender, text in messages
        )

    @contextlib.contextmanager
    def _own_numbers(self) -> Iterator[None]:
        """The games of a process draw from one generator, Python's own: each begins where it
        stopped, not where another did, so that a game with a seed is the same game however many are
        played beside it.
        """
        outside = random.getstate()
        random.setstate(self._random)
        try:
            yield
        finally:
            self._random = random.getstate()
            random.setstate(outside)


def _new_only(env: Any) -> Any:
    """The same game without the wrapper whose observations are the whole conversation, which a chat
    has already.
    """
    import textarena
    from textarena.wrappers import LLMObservationWrapper

    if type(env) is LLMObservationWrapper:
        return _new_only(env.env)
    if isinstance(env, textarena.Wrapper):
        env.env = _new_only(env.env)
    return env
