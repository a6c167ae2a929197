"""TRL's `rollout_func`, and environments that the data chooses among, as programs that call the
endpoint of a run.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dataflow.errors import GraphError
from operators.agents.declaration import AgentProgram, agent

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
