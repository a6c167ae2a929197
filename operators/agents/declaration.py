"""`agent("python my_agent.py")`: a program that knows nothing of this project as an operator that
makes rollouts.
"""

from __future__ import annotations

import dataclasses
import importlib.machinery
import importlib.util
import re
import shlex
import shutil
import sys
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dataflow.annotations import arrow_type
from dataflow.errors import GraphError
from dataflow.node import Generate, Operator, Rollout, Stream, Traits
from dataflow.runtime import Context, Runtime
from operators.chat.conversation import Past
from operators.episodes.declaration import NOTHING, EpisodeKnobs, EpisodeSignature

WITHOUT = ("ANTHROPIC_AUTH_TOKEN", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID", "OPENAI_WEBHOOK_SECRET")
"""What a program does not inherit: it would send it along, or send it in place of its key."""
PYTHON = ("python", "python3")
"""As the first word of a command: the interpreter of the run."""
_PLACE = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, eq=False, kw_only=True)
class AgentKnobs(EpisodeKnobs):
    """What `operators.agent` declares; its runtime reads it, too."""

    command: str
    """The program and its arguments, as in a shell, which none reads; {column} stands for the value
    of a column."""
    columns: tuple[str, ...] = ()
    """Columns of the prompt that the program is given beside `prompt`."""
    returns: Any = None
    """What the last line of its output is: float, int, bool or str; None: nothing."""
    concurrency: int = 32
    """Programs at once."""
    memory_mb: int | None = 2048
    """Megabytes that each process of a program may have; None: no limit."""
    output_kb: int = 1024
    """Most that a program may say, on stdout and stderr together."""
    imports: tuple[str, ...] = ()
    """Modules of a Python program that one process imports once; each start of the program is a
    fork of it."""
    env: Mapping[str, str] = field(default_factory=dict)
    """More of its environment."""
    model_name: str = "policy"
    """The model of the endpoint, as `GET /v1/models` names it; calls may name any."""
    port: int = 0
    """Of the endpoint, on loopback; 0: any that is free."""

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", _name_of(self.command))
        if self.returns is not None and self.returns not in NOTHING:
            raise GraphError(
                f"agent '{self.name}' returns {self.returns!r}, which no column of an episode"
                " holds; give returns=float, int, bool or str, or leave it out and let a @scorer"
                " read the rollout"
            )
        signature = EpisodeSignature(
            annotations={"prompt": str, **dict.fromkeys(self.columns, Any)},
            defaults={},
            output=None if self.returns is None else arrow_type(self.returns),
            nothing=NOTHING.get(self.returns),
        )
        object.__setattr__(self, "signature", signature)
        super().__post_init__()

    @property
    def where(self) -> str:
        """Its command."""
        return f"`{self.command}`"

    @property
    def traits(self) -> Traits:
        """As an episode's, and the endpoint's port; it reads no prompt as messages."""
        return dataclasses.replace(super().traits, chat=None, port=self.port)

    @property
    def about(self) -> str:
        """What runs."""
        return (
            f"Runs `{self.command}` for each rollout; its calls of a model are turns of the policy."
        )

    @property
    def python(self) -> str:
        """The interpreter of the process that starts programs: the program's own, where it shares
        imports.
        """
        return self._argv()[0] if self.imports else sys.executable

    @property
    def script_folder(self) -> str:
        """Where modules of its own are, which it may share as any: the folder of its script; empty
        without imports.
        """
        argv = self._argv()
        if not self.imports or len(argv) < 2 or "{" in argv[1]:
            return ""
        return "." if argv[1] == "-m" else str(Path(argv[1]).parent)

    def words(self, row: Mapping[str, Any]) -> list[str]:
        """The program and its arguments for one prompt."""
        return [
            _PLACE.sub(lambda match: str(row.get(match[1], match[0])), word)
            for word in self._argv()
        ]

    def identity(self) -> Hashable:
        """Its command, its generator and all knobs."""
        knobs = tuple(
            (
                repr(getattr(self, item.name))
                if item.name in ("env", "returns")
                else getattr(self, item.name)
            )
            for item in dataclasses.fields(self)
            if item.init
        )
        return ("agent", *knobs)

    def knobs(self) -> dict[str, Any]:
        """Those that differ from their defaults."""
        shown = {
            name: value
            for name, value in super().knobs().items()
            if name not in ("generator", "env", "returns")
        }
        returns = {} if self.returns is None else {"returns": self.returns.__name__}
        return {**shown, **returns, **({"env": sorted(self.env)} if self.env else {})}

    def whole(self) -> Mapping[str, Any]:
        """What it may say, too."""
        return {"output_kb": self.output_kb}

    def faults(self) -> list[str]:
        """Knobs that cannot be right."""
        head, faults = f"agent '{self.name}' ({self.where})", super().faults()
        argv = self._argv()
        if not argv:
            faults.append(
                f'{head} has no program; found command={self.command!r}; give one, as "python'
                ' my_agent.py"'
            )
        unknown = [
            name for word in argv for name in _PLACE.findall(word) if name not in self.reads()
        ]
        if unknown:
            faults.append(
                f"{head} names {unknown} in its command, but is given {list(self.reads())}; add"
                " columns=(...)"
            )
        if self.imports and (
            len(argv) < 2 or (argv[1].startswith("-") and (argv[1] != "-m" or len(argv) < 3))
        ):
            faults.append(
                f"{head} has imports={self.imports}, but is no Python program; write `python SCRIPT"
                " ...`"
            )
        if isinstance(self.port, bool) or not 0 <= self.port < 1 << 16:
            faults.append(
                f"{head} has port={self.port!r}; give 0 for any that is free, or up to 65535"
            )
        return faults

    def missing(self) -> str | None:
        """The program."""
        argv = self._argv()
        if shutil.which(argv[0]) is None:
            return (
                f"agent '{self.name}' cannot start {argv[0]!r}; found no such program; install it,"
                " or give its path"
            )
        for name in self.imports if argv[0] == sys.executable else ():
            if not _is_there(name.partition(".")[0], self.script_folder):
                return (
                    f"agent '{self.name}' cannot import {name!r}; found no such module in"
                    f" {argv[0]}, nor beside its program; install it, or correct"
                    f" imports={list(self.imports)}"
                )
        script = argv[1] if len(argv) > 1 and argv[1].endswith(".py") else None
        if script is not None and "{" not in script and not Path(script).is_file():
            return (
                f"agent '{self.name}' runs {script!r}; found no such file in {Path.cwd()}; give its"
                " path"
            )
        return super().missing()

    def _argv(self) -> Sequence[str]:
        words = shlex.split(self.command)
        return [sys.executable, *words[1:]] if words and words[0] in PYTHON else words


def _is_there(module: str, folder: str) -> bool:
    """Whether a module can be found, in a folder too."""
    try:
        if module in sys.modules or importlib.util.find_spec(module) is not None:
            return True
        return (
            bool(folder) and importlib.machinery.PathFinder.find_spec(module, [folder]) is not None
        )
    except (ImportError, ValueError):
        return False


def _name_of(command: str) -> str:
    """A name of the program's file: that of the last word of the first ones that is no option."""
    words = [word for word in shlex.split(command) if not word.startswith("-")]
    scripts = [word for word in words if word.endswith((".py", ".sh", ".js", ".ts"))]
    name = re.sub(r"\W+", "_", Path((scripts or words or ["agent"])[0]).stem)
    return name if name.isidentifier() else "agent"


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
