"""The systems whose environments are known: the module that speaks to each, the package it needs,
what its rows are.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import threading
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from dataflow.errors import GraphError, nearest
from operators.environments.session import Session

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
