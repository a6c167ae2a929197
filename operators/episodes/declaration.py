"""`@episode`: turns a function that converses with the policy into an operator that makes
rollouts of prompts. Its columns and knobs, and what can be wrong with them; `tool_use`, the
episode of tools."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import typing
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, get_args, overload

import pyarrow as pa

from dataflow.annotations import arrow_type
from dataflow.errors import GraphError, is_whole
from dataflow.node import CapacityTraits, Generate, Operator, Rollout, Stream, Traits
from dataflow.records import EPISODE_COLUMNS, SAMPLED_COLUMNS, TEMPERATURE, Columns
from dataflow.runtime import Context, Runtime
from dataflow.scoring.signature import decorated, stand_for, where_defined
from operators.chat.chat_format import ChatFormat, delimiter_fault
from operators.chat.conversation import Past
from operators.chat.tool_calls import TextCalls
from operators.tools.toolbox import GRACE_S, Toolbox, tool_faults

NOTHING: Mapping[Any, Any] = {float: None, int: None, bool: None, str: ""}
"""What may be returned, and what stands for it where a function was cut off: nobody has said what
that is worth."""


@dataclass(frozen=True, kw_only=True)
class EpisodeSignature:
    """What an episode's function reads, takes and returns."""

    annotations: Mapping[str, Any]
    """Its columns, as annotated; Any where they are not."""
    defaults: Mapping[str, Any]
    """Its knobs."""
    output: pa.DataType | None
    """Arrow type of the column that it writes; None: it returns nothing."""
    nothing: Any
    """What the column says of an episode that was over before the function returned."""


def read_episode(function: Callable[..., Any]) -> EpisodeSignature:
    """Its signature; GraphError where it cannot be an episode."""
    if not inspect.iscoroutinefunction(function):
        raise GraphError(
            "@episode needs an async function, but got"
            f" {getattr(function, '__qualname__', function)!r} ({where_defined(function)}); write"
            " `async def name(chat, columns): ...`, and `await chat.say()` in it"
        )
    head = f"episode '{function.__name__}' ({where_defined(function)})"
    try:
        hints = typing.get_type_hints(function)
    except Exception as error:
        raise GraphError(
            f"{head} has an annotation that cannot be read ({type(error).__name__}: {error});"
            " import the name where the module really runs, or leave the annotation out"
        ) from error
    parameters = list(inspect.signature(function).parameters.values())
    odd = [p.name for p in parameters if p.kind not in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if odd or not parameters or parameters[0].kind is not parameters[0].POSITIONAL_OR_KEYWORD:
        raise GraphError(
            f"{head} takes {[str(p) for p in parameters]}, but is called with a chat and columns by"
            f" name; write `async def {function.__name__}(chat, column: type, knob: type = value)`"
        )
    columns = {p.name: hints.get(p.name, Any) for p in parameters[1:] if p.default is p.empty}
    defaults = {p.name: p.default for p in parameters[1:] if p.default is not p.empty}
    returned = hints.get("return", type(None))
    if returned is not type(None) and returned not in NOTHING:
        raise GraphError(
            f"{head} returns {returned!r}, which no column of an episode holds; annotate it ->"
            " float, int, bool or str, or -> None and let a @scorer read the rollout"
        )
    output = None if returned is type(None) else arrow_type(returned)
    return EpisodeSignature(
        annotations=columns, defaults=defaults, output=output, nothing=NOTHING.get(returned)
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class EpisodeKnobs(Generate):
    """What every episode declares, whether a function converses or a program; its runtime reads it,
    too.
    """

    generator: Generate | None = None
    """Who draws the policy's turns; None before it is applied."""
    max_turns: int = 32
    """Most turns of the policy in an episode."""
    max_tokens: int | None = None
    """Most tokens that the policy says in an episode, all turns together; None: as many as the
    context holds."""
    tries: int = 1
    """How often the function is run for a rollout, where the world fails."""
    timeout_s: float = 30.0
    """Most seconds that the world takes between two turns of the policy."""
    memory_mb: int | None = 1024
    """Megabytes that a process of the world may take beyond what it started with; None: no
    limit."""
    concurrency: int = 512
    """Episodes at once within a process: tasks of its event loop."""
    past: Past = "sampled"
    """With messages, what becomes of turns that the chat template writes otherwise once they are
    past (thinking that it leaves out): they stay as they were sampled; a training row begins with
    what it makes of them; or the rollout is an error."""
    signature: EpisodeSignature = field(init=False, repr=False)
    """The columns that it reads, its knobs, and the Arrow type it writes."""

    @property
    def where(self) -> str:
        """Where it was written."""
        return "here"

    @property
    def at_once(self) -> int:
        """Episodes at once."""
        return self.concurrency

    @property
    def works_beside(self) -> bool:
        """Whether the functions run in processes of their own."""
        return True

    @property
    def asks(self) -> Generate | None:
        """Its generator."""
        return self.generator

    def answering(self, generator: Operator) -> Generate:
        """The generator, if it answers turns. Raises GraphError."""
        if not isinstance(generator, Generate) or not generator.answers_turns:
            raise GraphError(
                f"'{self.name}' ({self.where}) asks a generator for the policy's turns, but got "
                f"{type(generator).__name__}(name='{generator.name}'); give it Generator(...)"
            )
        return generator

    @property
    def rollouts_per_prompt(self) -> int:
        """As many as its generator makes."""
        return 1 if self.generator is None else self.generator.rollouts_per_prompt

    @property
    def traits(self) -> Traits:
        """Those of its generator's samples; the most tokens of a rollout."""
        if self.generator is None:
            return Traits()
        theirs = self.generator.traits
        return Traits(
            sampling=dataclasses.replace(
                theirs.sampling, unrecorded=None, max_tokens=theirs.sampling.context_tokens
            ),
            capacity=CapacityTraits(
                in_flight=theirs.capacity.in_flight, calls_at_once=self.at_once
            ),
            chat=theirs.chat,
        )

    @property
    def computes(self) -> bool:
        """Its functions wait, most of the time."""
        return False

    def reads(self) -> Mapping[str, Any]:
        """The prompt, and the function's parameters without a default."""
        return {**super().reads(), **self.signature.annotations}

    def provides(self, columns: Columns) -> Columns:
        """The prompt's columns, the rollout's, those of its turns, and what the function
        returns.
        """
        sampled = {} if self.generator is None else self.generator.provides({})
        optional = {name: kind for name, kind in SAMPLED_COLUMNS.items() if name in sampled}
        provided = {**super().provides(columns), TEMPERATURE: pa.float64(), **optional}
        output = self.signature.output
        return {**provided, **EPISODE_COLUMNS, **({} if output is None else {self.name: output})}

    def faults(self) -> list[str]:
        """Knobs that cannot be right."""
        head = f"episode '{self.name}' ({self.where})"
        most = 1 if self.max_tokens is None else self.max_tokens
        memory = 1 if self.memory_mb is None else self.memory_mb
        whole = {
            "max_turns": self.max_turns,
            "max_tokens": most,
            "tries": self.tries,
            "memory_mb": memory,
            "concurrency": self.concurrency,
            **self.whole(),
        }
        faults = [
            f"{head} has {knob}={value!r}; give a whole number of 1 or more"
            for knob, value in whole.items()
            if not is_whole(value, 1)
        ]
        if isinstance(self.timeout_s, bool) or not 0 < self.timeout_s < float("inf"):
            faults.append(
                f"{head} has timeout_s={self.timeout_s!r}; give seconds above 0, such as 30.0"
            )
        if self.past not in get_args(Past):
            faults.append(f"{head} has past={self.past!r}; give one of {list(get_args(Past))}")
        if self.name in self.reads() and self.signature.output is not None:
            faults.append(
                f"{head} writes column '{self.name}', which it also reads; give it another name"
            )
        if self.generator is None:
            faults.append(
                f"{head} has no generator; apply it as {self.name}(generator, g.source(...))"
            )
        return faults

    @property
    def can_look(self) -> bool:
        """Whether something can be known of its world before anybody plays: then `look` is called
        in its process.
        """
        return False

    async def look(self) -> str | None:
        """What is wrong with its world, so that no episode can be; None where nothing is known to
        be.
        """
        return None

    def toolbox(self, form: ChatFormat | None) -> Toolbox | None:
        """Its tools, made ready in the worker; None where it has none. Raises GraphError;
        WorldFailed.
        """
        return None

    def whole(self) -> Mapping[str, Any]:
        """More knobs that are whole numbers of 1 or more."""
        return {}


@dataclass(frozen=True, eq=False, kw_only=True)
class FunctionKnobs(EpisodeKnobs):
    """What `operators.episode` declares; the processes of its worlds read it, too."""

    function: Callable[..., Any] = field(repr=False)
    """What the user wrote."""
    processes: int = 1
    """Processes in which the function runs."""
    isolate: bool = True
    """Whether it runs in killable processes; False: inside the worker, where a call that blocks
    counts as a worker that is stuck."""
    tools: tuple[Any, ...] = ()
    """What the policy may call: functions with type hints and a docstring, toolsets
    (`operators.tools`)."""
    calls: TextCalls | None = None
    """How it writes calls, and hears results; None: as the chat template has them."""
    call_s: float = 10.0
    """Most seconds of a call: the policy is told of one that takes longer."""
    call_characters: int = 8192
    """Most that it hears of one call; the rest is left out."""
    given: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Knobs set where it was applied."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "signature", read_episode(self.function))
        object.__setattr__(self, "tools", tuple(self.tools))
        if not self.name:
            object.__setattr__(self, "name", self.function.__name__)
        super().__post_init__()
        stand_for(self, self.function)

    @property
    def where(self) -> str:
        """File and line of the function."""
        return where_defined(self.function)

    @property
    def at_once(self) -> int:
        """Episodes at once, in all processes."""
        return self.concurrency * self.processes

    def missing(self) -> str | None:
        """A chat template between whose delimiters the world can speak, where its generator lays
        out chats.
        """
        model = None if self.generator is None or not self.traits.chat else self.generator.uses
        return super().missing() or (None if model is None else delimiter_fault(model))

    @property
    def works_beside(self) -> bool:
        """As `isolate` says."""
        return self.isolate

    @property
    def about(self) -> str:
        """The function's own docstring."""
        return inspect.getdoc(self.function) or super().about

    def identity(self) -> Hashable:
        """The function, its generator, the name, the knobs and the limits."""
        limits = tuple(
            getattr(self, item.name) for item in dataclasses.fields(self) if item.repr and item.init
        )
        return (
            "episode",
            self.function,
            limits,
            tuple(sorted((name, repr(value)) for name, value in self.given.items())),
        )

    def knobs(self) -> dict[str, Any]:
        """The function's knobs set at the application, and its own that differ from their
        defaults.
        """
        own = {k: v for k, v in super().knobs().items() if k not in ("function", "generator")}
        if self.tools:
            own["tools"] = [getattr(tool, "__name__", repr(tool)) for tool in self.tools]
        return {**self.given, **own}

    def toolbox(self, form: ChatFormat | None) -> Toolbox | None:
        """Its tools, made ready in the worker; None where it has none. Raises GraphError;
        WorldFailed.
        """
        if not self.tools:
            return None
        return Toolbox(
            self.tools,
            calls=self.calls,
            form=form,
            timeout_s=self.call_s,
            characters=self.call_characters,
            turn_s=self.timeout_s,
        )

    def whole(self) -> Mapping[str, Any]:
        """Processes, and what it hears of a call."""
        return {"processes": self.processes, "call_characters": self.call_characters}

    def faults(self) -> list[str]:
        """Knobs that cannot be right."""
        faults, head = super().faults(), f"episode '{self.name}' ({self.where})"
        if (
            isinstance(self.call_s, bool)
            or self.call_s <= 0
            or (self.tools and self.timeout_s <= self.call_s + GRACE_S)
        ):
            faults.append(
                f"{head} has call_s={self.call_s!r} and timeout_s={self.timeout_s!r}; give a call"
                f" seconds above 0, and the world {GRACE_S:g} s more at least"
            )
        tools = tool_faults(
            self.tools,
            self.calls,
            is_chat=self.generator is None or bool(self.generator.traits.chat),
        )
        faults += [f"{head}: {fault}" for fault in tools]
        if not self.isolate and self.processes > 1:
            faults.append(
                f"{head} has processes={self.processes} but isolate=False; leave isolate=True"
            )
        return faults


@dataclass(frozen=True, eq=False, kw_only=True)
class Episode(FunctionKnobs):
    """A function as an operator: applied to a generator and a stream of prompts it makes rollouts,
    turn by turn.
    """

    def __call__(self, *args: Any, **knobs: Any) -> Any:
        """Apply it to a generator and a stream, with knobs by keyword; or call the plain function
        with a chat.
        """
        if not any(isinstance(arg, Stream | Operator) for arg in args):
            return self.function(*args, **{**self.given, **knobs})
        if len(args) != 2 or not isinstance(args[0], Generate) or not isinstance(args[1], Stream):
            raise GraphError(
                f"'{self.name}' ({self.where}) is applied to a generator and a stream of prompts,"
                f" but got {[type(arg).__name__ for arg in args]}; write {self.name}(generator,"
                " g.source(...))"
            )
        rollouts: Stream[Rollout] = args[1].graph.apply(
            self.asking(args[0]).configured(**knobs), args[1]
        )
        return rollouts

    def asking(self, generator: Operator) -> Episode:
        """The same episode with the turns of this generator."""
        return dataclasses.replace(self, generator=self.answering(generator))

    def configured(self, **knobs: Any) -> Episode:
        """The same episode with other knobs of its function; GraphError for one that the function
        does not have.
        """
        for knob in knobs:
            if knob not in self.signature.defaults:
                names = list(self.signature.defaults)
                close = difflib.get_close_matches(knob, names, n=1, cutoff=0.5)
                raise GraphError(
                    f"'{self.name}' ({self.where}) has no knob '{knob}', its knobs are {names}; "
                    + (
                        f"did you mean '{close[0]}'?"
                        if close
                        else "give the parameter a default, or drop it here"
                    )
                )
        return dataclasses.replace(self, given={**self.given, **knobs}) if knobs else self

    def preload(self) -> None:
        """Import the tokenizer's code and the runtime."""
        import operators.episodes.runtime
        import operators.models.loading  # noqa: F401

    def build(self, context: Context) -> Runtime:
        """Load the tokenizer and start the processes. Raises ModelError when there is no
        tokenizer.
        """
        from operators.episodes.runtime import EpisodesRuntime
        from operators.episodes.worlds import worlds_of

        return EpisodesRuntime(self, context, partial(worlds_of, self))


@overload
def episode(function: Callable[..., Any], /) -> Episode: ...


@overload
def episode(
    *,
    name: str = "",
    max_turns: int = 32,
    max_tokens: int | None = None,
    tries: int = 1,
    timeout_s: float = 30.0,
    memory_mb: int | None = 1024,
    concurrency: int = 512,
    processes: int = 1,
    isolate: bool = True,
    tools: Sequence[Any] = (),
    calls: TextCalls | None = None,
    call_s: float = 10.0,
    call_characters: int = 8192,
    past: Past = "sampled",
) -> Callable[[Callable[..., Any]], Episode]: ...


def episode(function: Callable[..., Any] | None = None, /, **limits: Any) -> Any:
    """Make an episode of an async function: `@episode`, or `@episode(max_turns=8, ...)`.

    Its first parameter is the chat (`operators.episodes.chat.Chat`); parameters without a default
    are columns of the prompt, those with one are knobs. What it returns, if annotated, is the
    column of its name. The conversation is one rollout, whose mask is true where the policy chose
    the token; where its past was rewritten, of several training rows. A function that raises, hangs
    or ends its process leaves a rollout with an `error`. Raises GraphError for a function that
    cannot be one.

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
    return decorated(Episode, function, limits)


async def _until_an_answer(chat: Any) -> str:
    """The policy calls tools until it has an answer."""
    return str(await chat.use_tools())


def tool_use(
    tools: Sequence[Any],
    *,
    calls: TextCalls | None = None,
    name: str = "tool_use",
    max_turns: int = 8,
    **limits: Any,
) -> Episode:
    """Turns and calls, until the policy says something in which no call stands: that is the column
    of its name.

    Args:
        tools: functions with type hints and a docstring, toolsets (`operators.tools`).
        calls: how calls are written, where the chat template does not say.
        name: of the node, and of the column with the answer; it is empty where the policy ran out
            of turns.
        max_turns: of the policy, its answer counted.
        limits: the others of `@episode`.

    >>> from dataflow import Graph, Model
    >>> from operators import Generator, Prompts, tool_use
    >>> def add(a: int, b: int) -> int:
    ...     '''Adds two numbers.
    ...
    ...     Args:
    ...         a: One.
    ...         b: The other.
    ...     '''
    ...     return a + b
    >>> generator = Generator(Model("policies/sums"), chat=True)
    >>> prompts = Prompts([{"prompt": [{"role": "user", "content": "2+2?"}]}])
    >>> rollouts = tool_use([add], name="answer")(generator, Graph("sums").source(prompts))
    >>> "answer" in rollouts.columns
    True
    """
    return Episode(
        function=_until_an_answer,
        name=name,
        tools=tuple(tools),
        calls=calls,
        max_turns=max_turns,
        **limits,
    )
