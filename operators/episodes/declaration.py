"""`@episode`: turns a function that converses with the policy into an operator that makes rollouts of prompts."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, overload

from dataflow.errors import GraphError
from dataflow.node import Generate, Operator, Traits
from dataflow.records import EPISODE_COLUMNS, SAMPLING_MASK, SAMPLING_MASK_TYPE, Columns
from dataflow.runtime import Context, Runtime
from dataflow.scoring.signature import where_defined
from dataflow.stream import Rollout, Stream
from operators.episodes.signature import EpisodeSignature, read_episode


@dataclass(frozen=True, eq=False, kw_only=True)
class Episode(Generate):
    """A function as an operator: applied to a generator and a stream of prompts it makes rollouts, turn by turn."""

    function: Callable[..., Any] = field(repr=False)
    """What the user wrote."""
    generator: Generate | None = None
    """Who draws the policy's turns; None before it is applied."""
    max_turns: int = 32
    """Most turns of the policy in an episode."""
    max_tokens: int | None = None
    """Most tokens that the policy says in an episode, all turns together; None: as many as the context holds."""
    timeout_s: float = 60.0
    """Most seconds that the world takes between two turns of the policy."""
    memory_mb: int | None = 1024
    """Megabytes that a process of the world may take beyond what it started with; None: no limit."""
    concurrency: int = 512
    """Episodes at once within a process: tasks of its event loop."""
    processes: int = 1
    """Processes in which the function runs."""
    isolate: bool = True
    """Whether it runs in killable processes; False: inside the worker, where a call that blocks counts as a worker that
    is stuck."""
    given: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Knobs set where it was applied."""
    signature: EpisodeSignature = field(init=False, repr=False)
    """The function's parameters as columns and knobs, and the Arrow type it writes."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "signature", read_episode(self.function))
        if not self.name:
            object.__setattr__(self, "name", self.function.__name__)
        super().__post_init__()
        for attribute in ("__doc__", "__name__", "__qualname__", "__module__"):
            object.__setattr__(self, attribute, getattr(self.function, attribute, None))
        object.__setattr__(self, "__wrapped__", self.function)

    def __call__(self, *args: Any, **knobs: Any) -> Any:
        """Apply it to a generator and a stream, with knobs by keyword; or call the plain function with a chat."""
        if not any(isinstance(each, Stream | Operator) for each in args):
            return self.function(*args, **{**self.given, **knobs})
        if len(args) != 2 or not isinstance(args[0], Generate) or not isinstance(args[1], Stream):
            raise GraphError(
                f"'{self.name}' ({self.where}) is applied to a generator and a stream of prompts, but got "
                f"{[type(each).__name__ for each in args]}; write {self.name}(generator, g.source(...))"
            )
        rollouts: Stream[Rollout] = args[1].graph.apply(self.asking(args[0]).configured(**knobs), args[1])
        return rollouts

    def asking(self, generator: Operator) -> Episode:
        """The same episode with the turns of this generator."""
        if not isinstance(generator, Generate) or not generator.answers_turns:
            raise GraphError(
                f"'{self.name}' ({self.where}) asks a generator for the policy's turns, but got "
                f"{type(generator).__name__}(name='{generator.name}'); give it Generator(...)"
            )
        if getattr(generator, "engine", "native") != "native":
            raise GraphError(
                f"'{self.name}' ({self.where}) takes turns with '{generator.name}', which runs on "
                f"{generator.engine}, but turns are answered by this project's own engine alone; use "
                f'engine="native"'
            )
        return dataclasses.replace(self, generator=generator)

    def configured(self, **knobs: Any) -> Episode:
        """The same episode with other knobs of its function; GraphError for one that the function does not have."""
        for knob in knobs:
            if knob not in self.signature.defaults:
                known = list(self.signature.defaults)
                close = difflib.get_close_matches(knob, known, n=1, cutoff=0.5)
                raise GraphError(
                    f"'{self.name}' ({self.where}) has no knob '{knob}', its knobs are {known}; "
                    + (f"did you mean '{close[0]}'?" if close else "give the parameter a default, or drop it here")
                )
        return dataclasses.replace(self, given={**self.given, **knobs}) if knobs else self

    @property
    def where(self) -> str:
        """File and line of the function."""
        return where_defined(self.function)

    @property
    def asks(self) -> Generate | None:
        """Its generator."""
        return self.generator

    @property
    def rollouts_per_prompt(self) -> int:
        """As many as its generator makes."""
        return 1 if self.generator is None else self.generator.rollouts_per_prompt

    @property
    def traits(self) -> Traits:
        """Those of what its generator samples; how long a rollout may become."""
        if self.generator is None:
            return Traits()
        theirs = self.generator.traits
        return Traits(
            temperature=theirs.temperature, in_flight=theirs.in_flight, top_k=theirs.top_k, chat=theirs.chat,
            context_tokens=theirs.context_tokens, max_tokens=self.max_tokens or theirs.context_tokens,
            calls_at_once=self.concurrency * self.processes,
        )  # fmt: skip

    @property
    def computes(self) -> bool:
        """Its functions wait, most of the time."""
        return False

    @property
    def about(self) -> str:
        """What the function says of itself."""
        return inspect.getdoc(self.function) or super().about

    def identity(self) -> Hashable:
        """The function, its generator, the name, the knobs and the limits."""
        limits = tuple(getattr(self, item.name) for item in dataclasses.fields(self) if item.repr and item.init)
        return (
            "episode",
            self.function,
            limits,
            tuple(sorted((name, repr(value)) for name, value in self.given.items())),
        )

    def reads(self) -> Mapping[str, Any]:
        """The prompt, and the function's parameters without a default."""
        return {**super().reads(), **self.signature.annotations}

    def provides(self, columns: Columns) -> Columns:
        """The prompt's columns, the rollout's, those of its turns, and what the function returns."""
        found = super().provides(columns)
        if self.generator is not None and SAMPLING_MASK in self.generator.provides({}):
            found = {**found, SAMPLING_MASK: SAMPLING_MASK_TYPE}
        output = self.signature.output
        return {**found, **EPISODE_COLUMNS, **({} if output is None else {self.name: output})}

    def knobs(self) -> dict[str, Any]:
        """The function's knobs set at the application, and its own that differ from their defaults."""
        return {**self.given, **{k: v for k, v in super().knobs().items() if k not in ("function", "generator")}}

    def faults(self) -> list[str]:
        """Knobs that cannot be right."""
        head = f"episode '{self.name}' ({self.where})"
        most = 1 if self.max_tokens is None else self.max_tokens
        memory = 1 if self.memory_mb is None else self.memory_mb
        whole = {"max_turns": self.max_turns, "max_tokens": most, "memory_mb": memory,
                 "concurrency": self.concurrency, "processes": self.processes}  # fmt: skip
        found = [
            f"{head} has {knob}={value!r}; give a whole number of 1 or more"
            for knob, value in whole.items()
            if isinstance(value, bool) or not isinstance(value, int) or value < 1
        ]
        if isinstance(self.timeout_s, bool) or not 0 < self.timeout_s < float("inf"):
            found.append(f"{head} has timeout_s={self.timeout_s!r}; give seconds above 0, such as 60.0")
        if not self.isolate and self.processes > 1:
            found.append(f"{head} has processes={self.processes} but isolate=False; leave isolate=True")
        if self.name in self.reads() and self.signature.output is not None:
            found.append(f"{head} writes column '{self.name}', which it also reads; give it another name")
        if self.generator is None:
            found.append(f"{head} has no generator; apply it as {self.name}(generator, g.source(...))")
        elif self.generator.traits.chat:
            found.append(
                f"{head} takes turns with '{self.generator.name}', whose prompts are chat messages (chat=True), and "
                f"what the world says is put behind the policy's tokens as plain text; give it prompts as text, and "
                f"leave chat out"
            )
        return found

    def preload(self) -> None:
        """Import the tokenizer's code and the runtime."""
        import operators.episodes.runtime
        import operators.models.loading  # noqa: F401

    def build(self, context: Context) -> Runtime:
        """Load the tokenizer and start the processes. Raises ModelError when there is no tokenizer."""
        from operators.episodes.runtime import EpisodesRuntime

        return EpisodesRuntime(self, context)


@overload
def episode(function: Callable[..., Any], /) -> Episode: ...


@overload
def episode(
    *,
    name: str = "",
    max_turns: int = 32,
    max_tokens: int | None = None,
    timeout_s: float = 60.0,
    memory_mb: int | None = 1024,
    concurrency: int = 512,
    processes: int = 1,
    isolate: bool = True,
) -> Callable[[Callable[..., Any]], Episode]: ...


def episode(function: Callable[..., Any] | None = None, /, **limits: Any) -> Any:
    """Make an episode of an async function: `@episode`, or `@episode(max_turns=8, ...)`.

    Its first parameter is the chat (`operators.episodes.chat.Chat`); parameters without a default are columns of the
    prompt, those with one are knobs. What it returns, if annotated, is the column of its name. The conversation is one
    rollout, whose mask is true where the policy chose the token. A function that raises, hangs or ends its process
    leaves a rollout with an `error`. Raises GraphError for a function that cannot be one.

    >>> from dataflow import Graph, Model
    >>> from operators import Generator, Prompts, episode
    >>> @episode(max_turns=8)
    ... async def guess(chat, answer: str) -> float:
    ...     while (said := await chat.say()) != answer:
    ...         chat.hear("no\\n")
    ...     return 1.0 / chat.turns
    >>> prompts = Prompts([{"prompt": "2+2=", "answer": "4"}], columns=("answer",))
    >>> rollouts = guess(Generator(Model("policies/sums")), Graph("sums").source(prompts))
    >>> {"completion", "mask", "turn", "turn_reward", "guess"} <= set(rollouts.columns)
    True
    """
    if function is not None:
        return Episode(function=function)

    def decorate(function: Callable[..., Any]) -> Episode:
        return Episode(function=function, **limits)

    return decorate
