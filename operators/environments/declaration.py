"""`environment`: an environment of another system, by its name, as an episode."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dataflow.errors import GraphError
from dataflow.runtime import Context, Runtime
from operators.chat.conversation import Past
from operators.environments.addresses import absence, address_fault
from operators.environments.playing import AGAIN, Play, function_of
from operators.environments.systems import look_of, missing, split
from operators.environments.tasks import TASK, SeededTasks, row_of
from operators.episodes.declaration import Episode
from operators.prompts import Prompts


@dataclass(frozen=True, eq=False, kw_only=True)
class PlayedEnvironment(Episode):
    """An episode that plays an environment."""

    play: Play = field(repr=False)
    """How it is played."""

    def build(self, context: Context) -> Runtime:
        """As any episode's. Raises GraphError where a run begins and nobody is at the address of a
        server; later it may be away for a while."""
        system, place = split(self.play.environment)
        gone = (
            absence(self.play.environment, place)
            if system.is_served and not context.attempt
            else None
        )
        if gone is not None:
            raise GraphError(gone)
        return super().build(context)

    @property
    def can_look(self) -> bool:
        """Where its system can tell; an `action` of one's own reads whatever there is."""
        return self.play.action is None and look_of(self.play.environment) is not None

    async def look(self) -> str | None:
        """As `EpisodeKnobs.look`."""
        look = look_of(self.play.environment)
        place = split(self.play.environment)[1]
        found = None if look is None else await asyncio.to_thread(look, place, **self.play.options)
        return None if found is None else f"environment '{self.play.environment}' {found}"

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
    if isinstance(sessions, bool) or not isinstance(sessions, int) or sessions < processes:
        raise GraphError(
            f"environment '{name}' has {processes} processes and sessions={sessions!r}; give each a"
            " session at least"
        )
    for knob, value in {"ahead": ahead, "uses": 1 if uses is None else uses}.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < (knob == "uses"):
            raise GraphError(
                f"environment '{name}' has {knob}={value!r}, which is no number of sessions; give a"
                " larger one"
            )
    each = sessions // processes
    play = Play(
        environment=name,
        options=dict(options),
        sessions=each,
        ahead=min(ahead, each),
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
        concurrency=each,
        processes=processes,
        isolate=isolate,
    )
