"""`@episode`: turns a function that converses with the policy into an operator that makes rollouts
of prompts.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, overload

from dataflow.errors import GraphError
from dataflow.node import Generate, Operator
from dataflow.runtime import Context, Runtime
from dataflow.stream import Rollout, Stream
from operators.chat.conversation import Past
from operators.chat.text_calls import TextCalls
from operators.episodes.knobs import FunctionKnobs


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
    if function is not None:
        return Episode(function=function)

    def decorate(function: Callable[..., Any]) -> Episode:
        return Episode(function=function, **limits)

    return decorate
