"""TRL's `environment_factory` as an episode: a class whose public methods are the policy's tools,
unchanged.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dataflow.errors import GraphError, WorldFailed
from operators.agents.declaration import AgentProgram, agent
from operators.chat.chat_format import Message
from operators.chat.tool_calls import definitions_of
from operators.episodes.chat import EpisodeOver
from operators.episodes.declaration import Episode
from operators.rewards.foreign.adapting import messages_of, name_of, taken_by
from operators.tools.toolbox import TookTooLong, ToolThreads

RESERVED = ("reset", "get_reward")
"""Methods that are no tools."""
SLACK_S = 10.0
"""That a call which took too long is told in, before the world counts as hung."""


def tools_of(world: Any) -> dict[str, Callable[..., Any]]:
    """The public methods of an environment, without those that TRL reserves."""
    methods = inspect.getmembers(world, inspect.ismethod)
    return {
        name: method
        for name, method in methods
        if name not in RESERVED and not name.startswith("_")
    }


def appended(prompt: str, observation: str) -> str | list[Message]:
    """A prompt with what `reset` returned behind its last message.

    >>> appended("2+2=", "?"), appended('[{"role": "user", "content": "a"}]', "b")
    ('2+2=?', [{'role': 'user', 'content': 'ab'}])
    """
    messages = messages_of(prompt)
    if messages is None:
        return prompt + observation
    return [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + observation}]


class TrlSession:
    """One instance of an environment, for one rollout at a time."""

    def __init__(self, world: Any, factory: Callable[[], Any], threads: ToolThreads) -> None:
        self.world, self._factory, self._threads = world, factory, threads
        self._is_stuck = False
        """Whether a call that passed its limit is still at work in it."""

    async def reset(self, row: Mapping[str, Any], timeout_s: float) -> Any:
        """Begin a rollout, in another instance where this one is still at work."""
        if self._is_stuck:
            self.world, self._is_stuck = await asyncio.to_thread(self._factory), False
        return await self.make("reset", row, timeout_s)

    async def call(
        self, name: str, arguments: Mapping[str, Any], *, timeout_s: float, characters: int
    ) -> str:
        """As `ToolSession.call`; an exception of a method is its result, as in TRL."""
        try:
            return str(await self.make(name, arguments, timeout_s))
        except WorldFailed:
            raise
        except Exception as error:
            return str({"error": str(error)})

    async def make(self, name: str, arguments: Mapping[str, Any], timeout_s: float) -> Any:
        """Call a method in a thread, so that a blocking one stalls nobody else."""
        try:
            return await self._threads.call(getattr(self.world, name), arguments, timeout_s)
        except TookTooLong:
            self._is_stuck = True
            raise

    async def close(self) -> None:
        """Nothing: TRL has no end of an instance."""


class TrlTools:
    """The instances that a factory makes, as a toolset: made once, and reset for each rollout."""

    is_shared = False
    ahead = 0
    uses = None

    def __init__(self, factory: Callable[[], Any], at_once: int) -> None:
        self.factory, self.at_once = factory, at_once
        self._threads: ToolThreads | None = None

    def __repr__(self) -> str:
        return f"TrlTools({name_of(self.factory)})"

    def faults(self) -> Sequence[str]:
        """Always none: only an instance can be checked."""
        return ()

    def definitions(self) -> Sequence[Message]:
        """The methods of an instance that is made for this alone."""
        return definitions_of(list(tools_of(self.factory()).values()))

    async def open(self) -> TrlSession:
        """An instance that no rollout has."""
        if self._threads is None:
            self._threads = ToolThreads(self.at_once)
        return TrlSession(await asyncio.to_thread(self.factory), self.factory, self._threads)


def trl_environment(
    factory: Callable[[], Any],
    *,
    name: str = "reward",
    columns: Sequence[str] = (),
    rounds: int | None = None,
    timeout_s: float = 30.0,
    concurrency: int = 512,
    **limits: Any,
) -> Episode:
    """An environment of TRL's as an episode; `limits` are those of `episode`.

    Args:
        factory: makes an instance: `reset(**row)`, whose text stands behind the prompt, tools,
            maybe `get_reward`.
        timeout_s: of a method.
        columns: that `reset` is given beside those that it names.
        rounds: of calls, after which it ends (`max_tool_calling_iterations`); None: as many as
            there are turns.
    """
    reset, reward_of = getattr(factory, "reset", None), getattr(factory, "get_reward", None)
    if not callable(reset):
        raise GraphError(
            f"an environment of TRL has a method reset, but {factory!r:.60} has none; give the"
            " class, not an instance or a function that makes one"
        )
    toolset = TrlTools(factory, concurrency)
    names = [keyword for keyword in taken_by(reset, "TRL").needed if keyword != "self"]
    reads = list(dict.fromkeys(["prompt", *names, *columns]))

    async def reward(chat: Any, **row: Any) -> Any:
        session: TrlSession = await chat.session(toolset)
        prompt = messages_of(row["prompt"]) or row["prompt"]
        observation = await session.reset({**row, "prompt": prompt}, timeout_s)
        if observation is not None:
            chat.rewrite(appended(row["prompt"], observation))
        try:
            done = 0
            while (reply := await chat.say()).tool_calls and done != rounds:
                await chat.call(reply)
                done += 1
        except EpisodeOver:
            pass  # its reward is that of the world as it was left
        return None if reward_of is None else await session.make("get_reward", {}, timeout_s)

    parameters = [
        inspect.Parameter(column, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        for column in ("chat", *reads)
    ]
    shaped: Any = reward
    shaped.__name__ = shaped.__qualname__ = name
    shaped.__doc__ = inspect.getdoc(factory)
    shaped.__signature__ = inspect.Signature(parameters)
    shaped.__annotations__ = {"return": float if reward_of is not None else None}
    return Episode(
        function=reward,
        name=name,
        tools=(toolset,),
        timeout_s=timeout_s + SLACK_S,
        call_s=timeout_s,
        concurrency=concurrency,
        **limits,
    )


PROGRAM = Path(__file__).parent / "beside" / "trl_rollout.py"


def trl_rollout(
    place: str,
    *,
    tokenizer: str,
    gives: str = "",
    max_tokens: int = 256,
    python: str = "python",
    name: str = "reward",
    columns: Sequence[str] = (),
    **limits: Any,
) -> AgentProgram:
    """A `rollout_func(prompts, trainer)` as an episode: called with one prompt, and once for each
    rollout.

    Its trainer has a tokenizer (`processing_class`), `args` and `vllm_generation.generate`, whose
    completions are the policy's turns; it has no model, no optimiser and no state. What it returns
    has to be what was drawn.

    Args:
        place: path/to/file.py:function.
        tokenizer: the policy's folder.
        gives: the extra field of what it returns that is the reward; nothing: no column.
        max_tokens: of a turn.
        python: its interpreter, with transformers; the run's own by default.
        limits: those of `agent`.
    """
    settings = {
        "kind": "rollout_func",
        "tokenizer": tokenizer,
        "max_tokens": max_tokens,
        "gives": gives,
    }
    return _program(place, settings, python, name, columns, gives=bool(gives), limits=limits)


def trl_environments(
    place: str,
    *,
    python: str = "python",
    rounds: int = 32,
    scored: bool = True,
    name: str = "reward",
    columns: Sequence[str] = ("environment",),
    **limits: Any,
) -> AgentProgram:
    """A dictionary of factories as an episode: the column `environment` of a row names one, whose
    tools alone it has.

    Args:
        place: path/to/file.py:NAME of the dictionary, or of a class that runs in an interpreter of
            its own.
        python: its interpreter, with transformers; the run's own by default.
        rounds: most rounds of calls of tools (`max_tool_calling_iterations`).
        scored: whether environments have `get_reward`.
        columns: that `reset` is given, beside the prompt.
        limits: those of `agent`.
    """
    settings = {"kind": "environment", "rounds": rounds}
    return _program(place, settings, python, name, columns, gives=scored, limits=limits)


def _program(
    place: str,
    settings: dict[str, Any],
    python: str,
    name: str,
    columns: Sequence[str],
    *,
    gives: bool,
    limits: dict[str, Any],
) -> AgentProgram:
    path, _, function = place.rpartition(":")
    if not function or (path.endswith(".py") and not Path(path).is_file()):
        raise GraphError(
            f"{place!r} names nothing that is there; found no file {path!r}; give"
            " path/to/file.py:name"
        )
    whole = f"{Path(path).resolve()}:{function}" if path.endswith(".py") else place
    return agent(
        shlex.join([python, str(PROGRAM), whole, json.dumps(settings)]),
        name=name,
        columns=columns,
        returns=float if gives else None,
        imports=("transformers", "transformers.utils.chat_template_utils"),
        **limits,
    )
