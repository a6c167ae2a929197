"""`environment`: an environment of another system, by its name, as an episode."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import urllib.request
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import SplitResult, urlsplit

from dataflow.errors import GraphError, RecordError, WorldFailed, is_whole
from dataflow.records import PROMPT
from dataflow.runtime import Context, Runtime
from dataflow.system.text import sound
from operators.chat.conversation import Past
from operators.environments.session import (
    InvalidAction,
    Seen,
    Session,
    at_once,
    checked_reward,
    look_of,
    made,
    missing,
    seed_of,
    split,
    started,
)
from operators.episodes.chat import Chat, EpisodeOver
from operators.episodes.declaration import Episode
from operators.prompts import Prompts
from operators.rewards.foreign.adapting import messages_of
from operators.session_pool import Away, NoRoom, SessionPool, until_loop_ends

# The episode that plays an environment: it sees, the policy says, it acts, until the environment
# is over.

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

    def heard(self, observation: Seen) -> str:
        """The observation as text for the policy."""
        if self.wording is None or isinstance(observation.raw, InvalidAction):
            return sound(observation.text)
        return sound(self.wording(observation.raw)) if observation.raw is not None else ""


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

        Raises EpisodeOver where the policy had no turn left before there was any.
        """
        facts = json.loads(task)
        pool = self._pool()
        async with pool.lend() as session:
            observation = await self._asked(lambda: session.reset(facts, seed_of(facts)), "begin")
            if observation.terminated or observation.truncated:
                raise WorldFailed(
                    f"'{self._name}' is over before the policy has said anything; found task"
                    f" {task:.100}; leave it out"
                )
            first = self._play.heard(observation)
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
                observation = await self._turn(chat, session)
                reward = checked_reward(observation.reward, self._name)
                if reward is not None:
                    rewards.append(reward)
                    chat.reward(reward)
                chat.hear(self._play.heard(observation))
                if observation.terminated or observation.truncated:
                    break
        except EpisodeOver:
            return float(total(rewards)) if rewards else None
        if not rewards:
            raise WorldFailed(
                f"'{self._name}' is over and has given no reward; found none in {chat.turns} turns;"
                " what nobody has scored is no 0: score the rollout with a @scorer of its own, or"
                " mend the environment"
            )
        if observation.truncated:
            chat.cut_off()
        return float(total(rewards))

    async def _turn(self, chat: Chat, session: Session) -> Seen:
        text = await chat.say()
        try:
            try:
                action = (self._play.action or session.read)(text)
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
        """The environment's answer. Raises InvalidAction, or WorldFailed for any other
        exception.
        """
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
            self._pools[loop] = pool, loop.create_task(until_loop_ends(pool.close))
        return self._pools[loop][0]


def stands_in(text: str, prompt: str) -> bool:
    """Whether a prompt already holds a text: the policy does not read it twice.

    >>> stands_in("2+2=", "What is 2+2= ?"), stands_in("a", '[{"role": "user", "content": "b"}]')
    (True, False)
    """
    messages = messages_of(prompt)
    return any(
        text in content
        for content in ([prompt] if messages is None else [str(m.get("content")) for m in messages])
    )


# Where the prompts of an environment come from: seeds, of which it makes tasks, or rows, each of
# which is one.

TASK = "task"
"""Column that says, as JSON, what an environment is reset with."""


class SeededTasks(Sequence[dict[str, str]]):
    """Rows {"prompt", "task"}, made as they are read: one for each seed, with the environment's
    first text.
    """

    def __init__(self, play: Play, seeds: range, intro: str) -> None:
        self._play, self._seeds, self._intro = play, seeds, intro

    def __len__(self) -> int:
        return len(self._seeds)

    def __getitem__(self, at: Any) -> Any:
        """The row at a place. Raises RecordError where the environment cannot make it."""
        if isinstance(at, slice):
            return SeededTasks(self._play, self._seeds[at], self._intro)
        return next(
            iter(SeededTasks(self._play, range(self._seeds[at], self._seeds[at] + 1), self._intro))
        )

    def __iter__(self) -> Iterator[dict[str, str]]:
        with self._session() as session:
            for seed in self._seeds:
                yield {
                    PROMPT: self._intro + self._first(session, seed),
                    TASK: json.dumps({"seed": seed}),
                }

    @contextlib.contextmanager
    def _session(self) -> Iterator[Session | None]:
        """One that makes all tasks; none of a server, which is asked when an episode begins."""
        name = self._play.environment
        if split(name)[0].is_served:
            yield None
            return
        try:
            session = made(name, self._play.options)
        except Exception as error:
            is_missing = isinstance(error, ImportError)
            way = "install what it imports" if is_missing else "give it other options"
            raise RecordError(
                f"environment '{name}' cannot be made; found {type(error).__name__}: {error}; {way}"
            ) from error
        try:
            yield session
        finally:
            at_once(session.close())

    def _first(self, session: Session | None, seed: int) -> str:
        """The first text for the policy, of a seed's task."""
        if session is None:
            return ""
        try:
            return self._play.heard(at_once(session.reset({"seed": seed}, seed)))
        except Exception as error:
            raise RecordError(
                f"environment '{self._play.environment}' makes no task of seed {seed}; found"
                f" {type(error).__name__}: {error}; give it other options or seeds"
            ) from error


def row_of(play: Play, intro: str, columns: Sequence[str]) -> Callable[[Any], dict[str, Any]]:
    """A function from a row of a file to a prompt whose task is the row."""
    system, _ = split(play.environment)

    def row(source_row: Any) -> dict[str, Any]:
        if not isinstance(source_row, Mapping):
            raise TypeError(f"a task is an object, but this is a {type(source_row).__name__}")
        prompt: Any = source_row
        for part in system.prompt_at:
            prompt = prompt.get(part) if isinstance(prompt, Mapping) else None
        if intro:
            prompt = (
                intro + (prompt or "")
                if not isinstance(prompt, list)
                else [{"role": "system", "content": intro}, *prompt]
            )
        excluded = () if system.reads_prompt else (PROMPT,)
        task = {key: value for key, value in source_row.items() if key not in excluded}
        chosen = {key: source_row[key] for key in columns if key in source_row}
        return {**chosen, PROMPT: prompt, TASK: json.dumps(task, ensure_ascii=False, default=str)}

    return row


# Addresses of servers of environments: what cannot be one, and whether anybody is there when a
# run begins.

_PORTS = {"ws": 80, "http": 80, "wss": 443, "https": 443}
_LOOK_S = 5.0


def address_fault(name: str, url: str, schemes: tuple[str, ...]) -> str | None:
    """What is wrong where the address of an environment's server cannot be one; None where it can.

    >>> address_fault("openenv:h:80", "h:80", ("ws",))
    "environment 'openenv:h:80' is asked at an address, but got 'h:80'; write one of ws://HOST:PORT"
    >>> address_fault("openenv:ws://h", "ws://h", ("ws",)) is None
    True
    """
    try:
        parts = urlsplit(url)
        is_one = parts.scheme in schemes and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_one = False
    if is_one:
        return None
    return (
        f"environment '{name}' is asked at an address, but got {url!r}; write one of "
        f"{', '.join(f'{scheme}://HOST:PORT' for scheme in schemes)}"
    )


def absence(name: str, url: str) -> str | None:
    """What is wrong where nobody is at the address of an environment's server, as far as this
    machine can tell; None where somebody is, answers slowly, or is reached through a proxy.
    """
    parts = urlsplit(url)
    if _has_proxy(parts):
        return None
    host, port = str(parts.hostname), parts.port or _PORTS[parts.scheme]
    try:
        with socket.create_connection((host, port), timeout=_LOOK_S):
            return None
    except TimeoutError:
        return None
    except socket.gaierror as error:
        reason, do = f"no machine by the name {host!r} ({error.strerror})", "correct the address"
    except OSError as error:
        reason = f"nobody at {host!r}, port {port} ({error.strerror})"
        do = "start it before the run, or correct the address"
    return f"the server of environment '{name}' is not there; found {reason}; {do}"


def _has_proxy(parts: SplitResult) -> bool:
    """Whether a client would ask a proxy of its environment instead."""
    return bool(urllib.request.getproxies()) and not urllib.request.proxy_bypass(
        str(parts.hostname)
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class PlayedEnvironment(Episode):
    """An episode that plays an environment."""

    play: Play = field(repr=False)
    """How it is played."""

    def build(self, context: Context) -> Runtime:
        """As any episode's. Raises GraphError where a run begins and nobody is at the address of a
        server; later it may be away for a while.
        """
        system, place = split(self.play.environment)
        gone = (
            absence(self.play.environment, place)
            if system.is_served and not context.life.attempt
            else None
        )
        if gone is not None:
            raise GraphError(gone)
        return super().build(context)

    @property
    def can_look(self) -> bool:
        """Where its system can tell; a custom `action` reads anything."""
        return self.play.action is None and look_of(self.play.environment) is not None

    async def look(self) -> str | None:
        look = look_of(self.play.environment)
        place = split(self.play.environment)[1]
        fault = None if look is None else await asyncio.to_thread(look, place, **self.play.options)
        return None if fault is None else f"environment '{self.play.environment}' {fault}"

    def tasks(
        self,
        source: Any,
        *,
        intro: str = "",
        columns: Sequence[str] = (),
        chat: bool = False,
        **knobs: Any,
    ) -> Prompts:
        """Prompts for it: `g.source(world.tasks(range(1000)))`.

        Args:
            source: a range of seeds, of each of which the environment makes a task, so that train
                and held-out are two ranges; or rows, as `Prompts` takes them (a file, an id on the
                hub, an iterable): each whole is a task.
            intro: text in front of what the environment says first; of a server, which is asked
                only when an episode begins, the whole prompt.
            columns: of the rows, kept beside the task.
            knobs: the others of `Prompts`.
        """
        system, _ = split(self.play.environment)
        if not isinstance(source, range):
            rows = row_of(self.play, intro, columns)
            return Prompts(source, rows=rows, columns=(TASK, *columns), chat=chat, **knobs)
        if not system.has_seeds:
            raise GraphError(
                f"environment '{self.play.environment}' makes no tasks of seeds, but got {source};"
                " give rows, or a file of them"
            )
        if system.is_served and not intro:
            raise GraphError(
                f"environment '{self.play.environment}' is asked when an episode begins, and gives"
                " no prompt; give intro=, a text for all of them"
            )
        return Prompts(SeededTasks(self.play, source, intro), columns=(TASK,), chat=chat, **knobs)


def environment(
    name: str,
    *,
    options: Mapping[str, Any] = {},
    column: str = "reward",
    max_turns: int = 32,
    max_tokens: int | None = None,
    past: Past = "sampled",
    wording: Callable[[Any], str] | None = None,
    action: Callable[[str], Any] | None = None,
    invalid: Any = AGAIN,
    invalid_reward: float | None = None,
    total: Callable[[Sequence[float]], float] = sum,
    sessions: int | None = None,
    ahead: int = 1,
    uses: int | None = None,
    tries: int = 3,
    timeout_s: float = 30.0,
    patience_s: float = 300.0,
    memory_mb: int | None = 1024,
    processes: int = 1,
    isolate: bool = True,
) -> PlayedEnvironment:
    """An environment as an episode, as it is: `environment("gymnasium:CartPole-v1")(generator,
    g.source(prompts))`.

    The system in front of the name is gymnasium, textarena, reasoning-gym, skyrl-gym, openenv or
    nemo-gym; behind it stands what the system calls the environment, or where its server is. Its
    prompts are its `tasks`, or others with a column `task`: JSON of what the environment is reset
    with. Raises GraphError for a name that no system has, for what is no address of a server, and
    where the package of a system is not installed.

    Args:
        options: of the environment, and of its adapter (docs/environments.md).
        column: that it writes, and its name in the graph: the total of all rewards.
        wording: from what the environment shows to what the policy hears.
        action: from what the policy says to an action; raises ValueError where it is none.
        invalid: what that leads to: "again" (the policy hears why and has another turn), "end", or
            an action that is taken instead.
        invalid_reward: of such a turn; None: none.
        total: from the rewards of the turns to that of the episode; `max`, or a function of one's
            own.
        sessions: environments at once, in all processes: as many episodes begin; None: 1 of a
            server, else 128.
        ahead: sessions that a process starts before they are asked for.
        uses: episodes that a session is used for; None: without end. After a failure it is not used
            again.
        tries: how often an episode is begun where the environment fails.
        timeout_s: seconds for one answer of the environment.
        patience_s: seconds that an episode waits for a server which has no room for it.

    >>> from operators.environments import environment
    >>> world = environment("nemo-gym:http://127.0.0.1:8000", sessions=4)
    >>> world.name, world.concurrency, sorted(world.signature.annotations)
    ('reward', 4, ['prompt', 'task'])
    """
    system, place = split(name)
    wrong = missing(name) or (
        address_fault(name, place, system.schemes) if system.is_served else None
    )
    if wrong is not None:
        raise GraphError(wrong)
    sessions = sessions if sessions is not None else 1 if system.is_served else 128
    if not is_whole(sessions, processes):
        raise GraphError(
            f"environment '{name}' has {processes} processes and sessions={sessions!r}; give each a"
            " session at least"
        )
    for knob, value in {"ahead": ahead, "uses": 1 if uses is None else uses}.items():
        if not is_whole(value, knob == "uses"):
            raise GraphError(
                f"environment '{name}' has {knob}={value!r}, which is no number of sessions; give a"
                " larger one"
            )
    per_process = sessions // processes
    play = Play(
        environment=name,
        options=dict(options),
        sessions=per_process,
        ahead=min(ahead, per_process),
        uses=uses,
        step_s=timeout_s,
        patience_s=patience_s if system.is_served else timeout_s,
        wording=wording,
        action=action,
        invalid=invalid,
        invalid_reward=invalid_reward,
        total=total,
    )
    return PlayedEnvironment(
        name=column,
        function=function_of(play),
        play=play,
        max_turns=max_turns,
        max_tokens=max_tokens,
        past=past,
        tries=tries,
        timeout_s=timeout_s + patience_s if system.is_served else timeout_s,
        memory_mb=memory_mb,
        concurrency=per_process,
        processes=processes,
        isolate=isolate,
    )
