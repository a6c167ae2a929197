"""`agent("python my_agent.py")`: a program that knows nothing of this project as an operator that
makes rollouts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dataflow.errors import GraphError
from dataflow.node import Generate, Operator
from dataflow.runtime import Context, Runtime
from dataflow.stream import Rollout, Stream
from operators.agents.knobs import AgentKnobs
from operators.chat.conversation import Past


@dataclass(frozen=True)
class Endpoint:
    """Where the programs of a run find its policy: OpenAI's and Anthropic's APIs in front of a
    generator.

    >>> from dataflow import Model
    >>> from operators import Endpoint, Generator
    >>> Endpoint(Generator(Model("policies/sums")), port=8100).port
    8100
    """

    generator: Generate
    """Who draws the turns."""
    model: str = "policy"
    """As `GET /v1/models` names it; calls may name any."""
    port: int = 0
    """On loopback; 0: any that is free."""
    past: Past = "sampled"
    """What becomes of turns that the chat template writes otherwise once they are past, as in
    `operators/chat`."""


@dataclass(frozen=True, eq=False, kw_only=True)
class AgentProgram(AgentKnobs):
    """A program as an operator: applied to a generator, or its endpoint, and a stream of prompts it
    makes rollouts.
    """

    def __call__(self, generator: Any, stream: Any) -> Stream[Rollout]:  # type: ignore[override]
        """Apply it to a generator, or an `Endpoint`, and a stream of prompts."""
        place = generator if isinstance(generator, Endpoint) else Endpoint(generator)
        if not isinstance(place.generator, Generate) or not isinstance(stream, Stream):
            raise GraphError(
                f"agent '{self.name}' ({self.where}) is applied to a generator and a stream of"
                f" prompts, but got {type(place.generator).__name__} and {type(stream).__name__};"
                " write agent(...)(generator, g.source(...))"
            )
        served = dataclasses.replace(self, model_name=place.model, port=place.port, past=place.past)
        rollouts: Stream[Rollout] = stream.graph.apply(served.asking(place.generator), stream)
        return rollouts

    def preload(self) -> None:
        """Import the tokenizer's code and the runtime."""
        import operators.agents.runtime
        import operators.models.loading  # noqa: F401

    def asking(self, generator: Operator) -> AgentProgram:
        """The same agent with the turns of this generator."""
        return dataclasses.replace(self, generator=self.answering(generator))

    def build(self, context: Context) -> Runtime:
        """Load the tokenizer, open the endpoint, start the process that starts programs. Raises
        ModelError when there is no tokenizer.
        """
        from operators.agents.runtime import AgentsRuntime

        return AgentsRuntime(self, context)


def agent(
    command: str,
    *,
    name: str = "",
    columns: Sequence[str] = (),
    returns: type | None = None,
    max_turns: int = 32,
    max_tokens: int | None = None,
    tries: int = 1,
    timeout_s: float = 30.0,
    memory_mb: int | None = 2048,
    output_kb: int = 1024,
    concurrency: int = 32,
    imports: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> AgentProgram:
    """Make an operator of a program that calls a model over HTTP, and knows nothing of this
    project.

    It is started for each rollout, with OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL and
    ANTHROPIC_API_KEY in its environment and a line of JSON on stdin: `prompt` and the columns. What
    it asks of the model there are the policy's turns, recorded and trained; where it returns
    something, the last line of its output is the column of its name, `null` that none applies. A
    program that ends with another status than 0 (75: something outside has failed), hangs or says
    too much leaves a rollout with an `error`.

    Args:
        command: the program and its arguments; {column} stands for a value; `python` for the
            interpreter of the run.
        returns: float, int, bool or str; None: it writes no column.
        max_turns: calls of a rollout.
        max_tokens: what the policy says in all of them together.
        tries: how often the program is started for a rollout, where it fails; it is told its turns
            again.
        timeout_s: between two calls, or to its end; the time of the policy's turns does not count.
        memory_mb: what each may have.
        output_kb: what each may say.
        concurrency: programs at once.
        imports: modules of a Python program that are imported once; each start of it is a fork
            then.

    >>> from dataflow import Graph, Model
    >>> from operators import Generator, Prompts, agent
    >>> solve = agent("python solve.py --brief", columns=("answer",), returns=float)
    >>> prompts = Prompts([{"prompt": "2+2=", "answer": "4"}], columns=("answer",))
    >>> rollouts = solve(Generator(Model("policies/sums")), Graph("sums").source(prompts))
    >>> {"completion", "mask", "turn", "solve"} <= set(rollouts.columns)
    True
    """
    return AgentProgram(
        command=command,
        name=name,
        columns=tuple(columns),
        returns=returns,
        max_turns=max_turns,
        max_tokens=max_tokens,
        tries=tries,
        timeout_s=timeout_s,
        memory_mb=memory_mb,
        output_kb=output_kb,
        concurrency=concurrency,
        imports=tuple(imports),
        env=dict(env or {}),
    )
