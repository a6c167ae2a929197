"""An episode's knobs, and what can be wrong with them: who converses, its generator, its limits."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

import pyarrow as pa

from dataflow.errors import GraphError
from dataflow.node import Generate, Operator, Traits
from dataflow.records import EPISODE_COLUMNS, SAMPLED_COLUMNS, TEMPERATURE, Columns
from dataflow.scoring.signature import where_defined
from operators.chat.chat_format import ChatFormat
from operators.chat.conversation import Past
from operators.chat.template_trial import delimiter_fault
from operators.chat.text_calls import TextCalls
from operators.episodes.signature import EpisodeSignature, read_episode
from operators.tools.toolbox import GRACE_S, Toolbox, tool_faults


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
        engine = getattr(generator, "engine", "native")
        if engine != "native":
            raise GraphError(
                f"'{self.name}' ({self.where}) takes turns with '{generator.name}', which runs on "
                f"{engine}, but turns are answered by this project's own engine alone; use "
                f'engine="native"'
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
            temperature=theirs.temperature,
            in_flight=theirs.in_flight,
            top_k=theirs.top_k,
            chat=theirs.chat,
            context_tokens=theirs.context_tokens,
            max_tokens=theirs.context_tokens,
            calls_at_once=self.at_once,
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
            if isinstance(value, bool) or not isinstance(value, int) or value < 1
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
        for attribute in ("__doc__", "__name__", "__qualname__", "__module__"):
            object.__setattr__(self, attribute, getattr(self.function, attribute, None))
        object.__setattr__(self, "__wrapped__", self.function)

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
