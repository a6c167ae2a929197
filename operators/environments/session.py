"""The interface of an environment to an episode, and the systems that are known: the module that
speaks to each, the package it needs, what its rows are."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import math
import threading
import zlib
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from dataflow.errors import GraphError, WorldFailed, nearest

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


T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class System:
    """One of them."""

    module: str
    """With `make` where environments run in this process, and `connect` where a server has them;
    with `fault`, where something can be known of an environment before anybody plays."""
    package: str
    """As it is imported."""
    extra: str
    """That installs it."""
    schemes: tuple[str, ...] = ()
    """Of the addresses at which a server has the environments, which says how many there are, and
    may be away."""
    has_seeds: bool = True
    """Whether a number makes a task, and no row is needed."""
    prompt_at: tuple[str, ...] = ("prompt",)
    """Where a row has its prompt."""
    reads_prompt: bool = False
    """Whether a reset needs the prompt, too."""

    @property
    def is_served(self) -> bool:
        """Whether a server has them."""
        return bool(self.schemes)


_HERE = "operators.environments"
SYSTEMS: dict[str, System] = {
    "gymnasium": System(module=f"{_HERE}.gymnasium_form", package="gymnasium", extra="gymnasium"),
    "textarena": System(module=f"{_HERE}.textarena_form", package="textarena", extra="textarena"),
    "reasoning-gym": System(
        module=f"{_HERE}.reasoning_gym_form", package="reasoning_gym", extra="reasoning-gym"
    ),
    "openenv": System(
        module=f"{_HERE}.openenv_wire",
        package="websockets",
        extra="openenv",
        schemes=("ws", "wss", "http", "https"),
    ),
    "nemo-gym": System(
        module=f"{_HERE}.nemo_gym_wire",
        package="httpx",
        extra="nemo-gym",
        schemes=("http", "https"),
        has_seeds=False,
        prompt_at=("responses_create_params", "input"),
    ),
    "skyrl-gym": System(
        module=f"{_HERE}.skyrl_gym_form",
        package="skyrl_gym",
        extra="skyrl-gym",
        has_seeds=False,
        reads_prompt=True,
    ),
}


def split(name: str) -> tuple[System, str]:
    """The system that a name begins with, and what it calls the environment. GraphError for
    another.
    """
    system, colon, environment = name.partition(":")
    if system not in SYSTEMS or not colon or not environment:
        raise GraphError(
            "an environment is named by its system and its name there, but got"
            f" {name!r}{nearest(system, SYSTEMS)}; "
            f"write one of {list(SYSTEMS)}, a colon and the name, as in"
            ' environment("gymnasium:CartPole-v1")'
        )
    return SYSTEMS[system], environment


def missing(name: str) -> str | None:
    """What is wrong where the package of an environment's system is not installed; None where it
    is.
    """
    system, _ = split(name)
    if importlib.util.find_spec(system.package) is not None:
        return None
    return (
        f"environment '{name}' imports '{system.package}', which is not installed; "
        f'pip install "dataflow-rl[{system.extra}]"'
    )


def made(name: str, options: Mapping[str, Any]) -> Session:
    """A session of an environment that runs in this process."""
    system, environment = split(name)
    session: Session = _module(system).make(environment, **options)
    return session


async def started(name: str, options: Mapping[str, Any]) -> Session:
    """A session: of a server, or made in a thread, so that nobody waits for it but who wants it."""
    system, environment = split(name)
    if system.is_served:
        session: Session = await _module(system).connect(environment, **options)
        return session
    sessions: list[Session] = []
    lock, is_wanted = threading.Lock(), True

    def make() -> None:
        session = made(name, options)
        with lock:
            if is_wanted:
                sessions.append(session)
        if not sessions:
            at_once(session.close())

    try:
        await asyncio.to_thread(make)
    except asyncio.CancelledError:
        with lock:
            is_wanted = False
        for session in sessions:
            at_once(session.close())
        raise
    return sessions[0]


def at_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """What a coroutine returns that waits for nothing: one of a session in this process."""
    try:
        coroutine.send(None)
    except StopIteration as over:
        value: T = over.value
        return value
    coroutine.close()
    raise RuntimeError("it waits for something, which only an episode can")


def look_of(name: str) -> Callable[..., str | None] | None:
    """The function that, from name and options, says why no text can be an action of an
    environment; None where its system has none.
    """
    fault: Callable[..., str | None] | None = getattr(_module(split(name)[0]), "fault", None)
    return fault


def _module(system: System) -> Any:
    return importlib.import_module(system.module)
