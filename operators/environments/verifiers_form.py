"""Tasksets of verifiers (0.4 and later) as episodes: each rollout is played in an interpreter that
has the package.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dataflow.errors import GraphError
from operators.agents.declaration import AgentProgram
from operators.prompts import Prompts

PROGRAM = Path(__file__).parent / "beside" / "verifiers_rollout.py"
IMPORTS = ("verifiers.v1", "verifiers.v1.serve", "verifiers.v1.utils.loaders")
"""Once for all rollouts: they take seconds."""
LOCAL: Mapping[str, Any] = {"agent": {"runtime": {"type": "subprocess"}, "harness": {"id": "null"}}}
"""Where a taskset's agent runs, unless the config says otherwise: here, as a loop that calls the
model."""
LIST_S = 300.0


@dataclass(frozen=True, eq=False, kw_only=True)
class VerifiersTaskset(AgentProgram):
    """A taskset as an operator: applied to a generator, and a stream of its tasks."""

    what: str = field(repr=False)
    """As `beside/verifiers_rollout.py` is given it."""

    def tasks(self, most: int, **knobs: Any) -> Prompts:
        """Its first tasks as prompts, listed by the other interpreter; `knobs` are those of
        `Prompts`.

        Raises GraphError where it cannot list them.
        """
        command = [shlex.split(self.command)[0], str(PROGRAM), self.what, "--tasks", str(most)]
        try:
            done = subprocess.run(
                command, capture_output=True, timeout=LIST_S, env=_apart(), check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise GraphError(
                f"'{command[0]}' lists no tasks: {error}; give a Python that has verifiers"
            ) from error
        if done.returncode:
            error_text = done.stderr.decode("utf-8", "replace").strip()[-2000:]
            raise GraphError(
                f"'{command[0]}' could not list the tasks of '{self.name}'; it ended with status"
                f" {done.returncode} and said: {error_text}; mend the taskset, or name another"
            )
        rows = [json.loads(line) for line in done.stdout.splitlines()]
        prompts = [{"prompt": json.dumps(row["prompt"]), "task": row["task"]} for row in rows]
        return Prompts(prompts, columns=("task",), **knobs)


def verifiers_environment(
    taskset: str,
    *,
    python: str,
    config: Mapping[str, Any] = LOCAL,
    path: Sequence[str] = (),
    client: Literal["eval", "train"] = "eval",
    tokenizer: str = "",
    sampling: Mapping[str, Any] | None = None,
    name: str = "reward",
    max_turns: int = 32,
    max_tokens: int | None = None,
    tries: int = 2,
    timeout_s: float = 120.0,
    memory_mb: int | None = 4096,
    concurrency: int = 8,
) -> VerifiersTaskset:
    """A taskset of verifiers, as it is, whose reward is the column.

    Args:
        taskset: its id: a module that exports a `Taskset`, with `-` for `_` if you like.
        python: the interpreter that has verifiers and the taskset.
        config: fields of the environment (`--env.*` there): `taskset`, `agent`, ...
        path: folders of modules that are not installed there.
        client: "eval" calls OpenAI's API of the run; "train" lays prompts out itself, with the
            policy's `tokenizer` (a folder), and calls the token route.
        sampling: sent with each call.

    The other arguments are those of `agent`.
    """
    spec = json.dumps(
        {
            "id": taskset,
            "config": dict(config),
            "path": [str(Path(folder).resolve()) for folder in path],
            "client": client,
            "tokenizer": tokenizer,
            "sampling": dict(sampling or {}),
        }
    )
    if client == "train" and not tokenizer:
        raise GraphError(
            f"taskset '{taskset}' lays prompts out itself, but has no tokenizer; give"
            " tokenizer=FOLDER"
        )
    beside = os.pathsep.join([str(Path(python).parent), os.environ.get("PATH", os.defpath)])
    return VerifiersTaskset(
        command=shlex.join([python, str(PROGRAM), spec]),
        what=spec,
        name=name,
        columns=("task",),
        returns=float,
        max_turns=max_turns,
        max_tokens=max_tokens,
        tries=tries,
        timeout_s=timeout_s,
        memory_mb=memory_mb,
        concurrency=concurrency,
        imports=IMPORTS,
        env={"PATH": beside},
    )


def _apart() -> dict[str, str]:
    """The environment without what would make the other interpreter import this one's packages."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "PYTHONHOME")
    }
