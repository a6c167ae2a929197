"""What a pool, its server and its processes say to each other."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dataflow.system.messages import Codec, Plain

# The pool and its server


@dataclass(frozen=True)
class Spawn:
    """Fork a process; its end of a channel comes with it."""

    process: int


@dataclass(frozen=True)
class End:
    """End a process."""

    process: int


@dataclass(frozen=True)
class Lost:
    """A process has closed its channel: say how it ended, and end it if it has not."""

    process: int


@dataclass(frozen=True)
class Spawned:
    """The process runs."""

    process: int
    pid: int


@dataclass(frozen=True)
class Ended:
    """The process has ended."""

    process: int
    status: int | None
    """None: it had closed its channel, and lived on until now."""


SERVER: Codec[Any] = Codec("scorers-server", 1, Spawn, End, Lost, Spawned, Ended)

# The pool and a process


@dataclass(frozen=True)
class Calls:
    """Calls to be made."""

    chunk: int
    calls: int
    payload: bytes


@dataclass(frozen=True)
class Answers:
    """Calls that were made."""

    chunk: int
    calls: list[int]
    values: Plain
    """One for each call; None where it failed."""
    failures: Mapping[int, str]
    """What went wrong, by call."""


CALLS: Codec[Any] = Codec("scorers-calls", 1, Calls, Answers, max_bytes=1 << 32)
