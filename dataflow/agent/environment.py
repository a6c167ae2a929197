"""What a launcher tells an agent, as environment variables; its keys come by an inherited pipe or a
private file. And how an agent is started that is a child of its launcher.
"""

import os
import subprocess
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dataflow.errors import RunError
from dataflow.system.child import Child, program
from dataflow.system.security import KEYS_BYTES, RunKeys, read_private

_PREFIX = "DATAFLOW_AGENT_"


@dataclass(frozen=True, kw_only=True)
class AgentEnvironment:
    """`python -m dataflow.agent` reads it; a launcher writes it."""

    scheduler: str
    """Address of the scheduler's socket for agents."""
    keys: str
    """Where the run's keys are: `fd:NUMBER` of an inherited pipe, or the path of a file of mode
    0600."""
    folder: str
    """The run folder, as this host sees it."""
    host: str = ""
    """Name in the run; the machine's own when empty."""
    address: str = ""
    """At which the others reach it, or the name of the interface that has it; the one by which this
    machine reaches the scheduler when empty."""
    cpus: str = ""
    """How many cores of this machine are the run's; all that the process may use when empty."""
    gpus: str = ""
    """The same of accelerators."""

    def to_environ(self) -> dict[str, str]:
        """Variables to be set; one that says nothing is not among them."""
        return {f"{_PREFIX}{name.upper()}": value for name, value in vars(self).items() if value}

    @classmethod
    def take(cls, environ: MutableMapping[str, str]) -> "AgentEnvironment":
        """What `to_environ` made; it is taken out, as it concerns nobody that is started from here.
        Errors: RunError for what is missing.
        """
        values = {
            name: environ.pop(f"{_PREFIX}{name.upper()}", "") for name in cls.__dataclass_fields__
        }
        missing = [
            f"{_PREFIX}{name.upper()}"
            for name in ("scheduler", "keys", "folder")
            if not values[name]
        ]
        if missing:
            raise RunError(
                "an agent is told by its launcher where its scheduler is, but"
                f" {' and '.join(missing)} is not set; start the run with --on, which starts its"
                " agents, or set what docs/hosts.md says"
            )
        for number in ("cpus", "gpus"):
            if values[number] and not values[number].isdecimal():
                raise RunError(
                    f"{_PREFIX}{number.upper()} is {values[number]!r}, which is no number; give one"
                )
        return cls(**values)

    def read_keys(self) -> RunKeys:
        """The run's keys. Errors: RunError where there are none, or others could have read them."""
        try:
            return RunKeys.from_bytes(_read(self.keys))
        except (OSError, ValueError) as error:
            raise RunError(
                f"an agent finds no keys at '{self.keys}': {error}; they are {KEYS_BYTES} bytes"
                " that the scheduler made for this run, in a pipe that the launcher handed down or"
                " a file of mode 0600"
            ) from error


def _read(place: str) -> bytes:
    if place.startswith("fd:"):
        with os.fdopen(int(place.removeprefix("fd:")), "rb") as pipe:
            return pipe.read(KEYS_BYTES)
    return read_private(Path(place))


def pipe_of(keys: bytes) -> int:
    """A pipe that holds an agent's keys, to be handed down as `fd:NUMBER`."""
    pipe, end = os.pipe()
    os.write(end, keys)
    os.close(end)
    return pipe


def start_agent(
    environment: AgentEnvironment,
    keys: bytes,
    variables: Mapping[str, str] | None = None,
    **given: Any,
) -> Child:
    """The agent of a host, which finds its keys in a pipe. variables: more of its environment.
    `given` is for `program`.
    """
    pipe = pipe_of(keys)
    environ = replace(environment, keys=f"fd:{pipe}").to_environ()
    try:
        return program(
            "dataflow.agent",
            keep=[pipe],
            environment={**environ, **(variables or {})},
            stdin=subprocess.DEVNULL,
            **given,
        )
    finally:
        os.close(pipe)


def ended_agent(host: str, agent: Child, printed: str) -> str:
    """That an agent has ended by itself, with the last line of what it printed."""
    last_line = printed.strip().rpartition("\n")[2]
    return f"the agent of host '{host}' {agent.state}: {last_line or 'it said nothing'}"
