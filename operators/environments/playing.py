"""The episode that plays an environment: it sees, the policy says, it acts, until the environment
is over."""

from __future__ import annotations

import asyncio
import json
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from dataflow.errors import WorldFailed
from dataflow.system.text import sound
from operators.environments.session import InvalidAction, Seen, Session, checked_reward, seed_of
from operators.environments.systems import started
from operators.episodes.chat import Chat, EpisodeOver
from operators.rewards.foreign.adapting import messages_of
from operators.session_pool import Away, NoRoom, SessionPool

T = TypeVar("T")
_PAUSE_S = 0.5
AGAIN, END = "again", "end"
"""What an invalid action leads to: the policy hears why, and has another turn; or the episode
ends."""


@dataclass(frozen=True, kw_only=True)
class Play:
    """How an environment is played."""

    environment: str
    """System and name."""
    options: Mapping[str, Any]
    """For what makes it."""
    sessions: int
    """At once in a process."""
    ahead: int
    """Of these, started before they are asked for."""
    uses: int | None
    """Episodes of one session; None: without end."""
    step_s: float
    """Seconds for one answer of the environment."""
    patience_s: float
    """Seconds until it has room."""
    wording: Callable[[Any], str] | None
    """From what it shows to what the policy hears; None: as the adapter has it."""
    action: Callable[[str], Any] | None
    """From what the policy says to an action, ValueError where it is none; None: as the adapter has
    it."""
    invalid: Any
    """AGAIN, END, or the action that is taken instead."""
    invalid_reward: float | None
    """Of a turn that is none."""
    total: Callable[[Sequence[float]], float]
    """From the rewards of all turns to the column."""

    def heard(self, seen: Seen) -> str:
        """What the policy hears of it."""
        if self.wording is None or isinstance(seen.raw, InvalidAction):
            return sound(seen.text)
        return sound(self.wording(seen.raw)) if seen.raw is not None else ""


_FUNCTIONS: dict[str, Callable[..., Coroutine[Any, Any, float]]] = {}
"""By all that a `Play` says: who declares the same environment twice has one operator."""


def function_of(play: Play) -> Callable[..., Coroutine[Any, Any, float]]:
    """It as the function of an episode."""
    key = repr(play)
    if key not in _FUNCTIONS:
        player = Player(play)

        async def reward(chat: Any, prompt: str, task: str) -> float:
            return await player.play(chat, prompt, task)

        reward.__doc__ = f"What {play.environment} gives the policy for an episode."
        _FUNCTIONS[key] = reward
    return _FUNCTIONS[key]


class Player:
    """Plays episodes, with a pool of sessions in each event loop."""

    def __init__(self, play: Play) -> None:
        self._play, self._name = play, play.environment
        self._pools: weakref.WeakKeyDictionary[
            Any, tuple[SessionPool[Session], asyncio.Task[None]]
        ] = weakref.WeakKeyDictionary()

    async def play(self, chat: Chat, prompt: str, task: str) -> float:
        """One episode. task: JSON of an object, which the session is reset with. Returns the total
        of the rewards.

        Raises EpisodeOver where the policy had no turn left before there was any."""
        facts = json.loads(task)
        pool = self._pool()
        async with pool.lend() as session:
            seen = await self._asked(lambda: session.reset(facts, seed_of(facts)), "begin")
            if seen.terminated or seen.truncated:
                raise WorldFailed(
                    f"'{self._name}' is over before the policy has said anything; found task"
                    f" {task:.100}; leave it out"
                )
            first = self._play.heard(seen)
            if first and not stands_in(first, prompt):
                chat.hear(first)
            value = await self._turns(chat, session)
        if value is None:  # what nobody has scored is no 0, which may be the best there is
            raise EpisodeOver(
                f"the policy has no turn left, and '{self._name}' has given no reward"
            )
        return value

    async def _turns(self, chat: Chat, session: Session) -> float | None:
        rewards: list[float] = []
        total = self._play.total
        try:
            while True:
                seen = await self._turn(chat, session)
                reward = checked_reward(seen.reward, self._name)
                if reward is not None:
                    rewards.append(reward)
                    chat.reward(reward)
                chat.hear(self._play.heard(seen))
                if seen.terminated or seen.truncated:
                    break
        except EpisodeOver:
            return float(total(rewards)) if rewards else None
        if not rewards:
            raise WorldFailed(
                f"'{self._name}' is over and has given no reward; found none in {chat.turns} turns;"
                " what nobody has scored is no 0: score the rollout with a @scorer of its own, or"
                " mend the environment"
            )
        if seen.truncated:
            chat.cut_off()
        return float(total(rewards))

    async def _turn(self, chat: Chat, session: Session) -> Seen:
        said = await chat.say()
        try:
            try:
                action = (self._play.action or session.read)(said)
            except ValueError as error:
                if self._play.invalid in (AGAIN, END):
                    raise InvalidAction(str(error)) from error
                chat.invalid(str(error))
                action = self._play.invalid
            return await self._asked(lambda: session.step(action), "go on")
        except InvalidAction as error:
            chat.invalid(str(error))
            worth, is_end = self._play.invalid_reward, self._play.invalid == END
            return Seen(
                text=str(error),
                raw=error,
                reward=0.0 if is_end and worth is None else worth,
                terminated=is_end,
            )

    async def _asked(self, call: Callable[[], Awaitable[T]], doing: str) -> T:
        """What the environment answers. Raises InvalidAction, or WorldFailed for whatever else it
        raises."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        while True:
            limit = asyncio.timeout(self._play.step_s)
            try:
                async with limit:
                    return await call()
            except (InvalidAction, WorldFailed):
                raise
            except NoRoom as error:
                if loop.time() - began_s > self._play.patience_s:
                    raise WorldFailed(
                        f"'{self._name}' had no room for {self._play.patience_s:g} s; found"
                        f" {error}; let it serve more sessions, or ask for fewer with sessions="
                    ) from error
            except Away as error:
                if loop.time() - began_s > self._play.step_s:
                    raise WorldFailed(
                        f"'{self._name}' could not {doing}; found {error.__cause__!r}"
                    ) from error
            except Exception as error:
                late = f"no answer within {self._play.step_s:g} s" if limit.expired() else ""
                raise WorldFailed(
                    f"'{self._name}' could not {doing}; found"
                    f" {late or f'{type(error).__name__}: {error}'}"
                ) from error
            await asyncio.sleep(_PAUSE_S)

    def _pool(self) -> SessionPool[Session]:
        """The sessions of this event loop, which closes them at its end."""
        loop = asyncio.get_running_loop()
        if loop not in self._pools:
            play = self._play
            pool = SessionPool(
                lambda: started(play.environment, play.options),
                name=play.environment,
                most=play.sessions,
                ahead=play.ahead,
                uses=play.uses,
                patience_s=play.patience_s,
                start_s=play.step_s,
            )
            self._pools[loop] = pool, loop.create_task(pool.kept())
        return self._pools[loop][0]


def stands_in(text: str, prompt: str) -> bool:
    """Whether a prompt says a text already: what a source has put there is not heard a second time.

    >>> stands_in("2+2=", "What is 2+2= ?"), stands_in("a", '[{"role": "user", "content": "b"}]')
    (True, False)
    """
    messages = messages_of(prompt)
    return any(
        text in each
        for each in ([prompt] if messages is None else [str(m.get("content")) for m in messages])
    )
