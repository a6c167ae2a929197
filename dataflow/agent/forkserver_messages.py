"""What a scheduler and its forkserver say to each other."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dataflow.system.messages import Codec, Plain

# From the scheduler


@dataclass(frozen=True)
class Spawn:
    """Fork a worker."""

    name: str
    settings: Mapping[str, Plain]
    heavy: bool
    """After `preload`."""
    keeps: bool
    """The others wait for its end when no scheduler comes back."""


@dataclass(frozen=True)
class SendSignal:
    """Send a signal to a worker."""

    name: str
    number: int


@dataclass(frozen=True)
class Pause:
    """Let all workers stand still, or go on."""

    is_paused: bool


@dataclass(frozen=True)
class Stay:
    """Keep the workers when the scheduler has ended."""

    wait_s: float
    """For another scheduler."""
    end_s: float
    """Then for workers that have something to bring to an end."""
    silent_s: float
    """A scheduler that was not heard for longer is replaced, where there is something to replace it
    with."""


@dataclass(frozen=True)
class Alive:
    """The scheduler's sign of life."""


@dataclass(frozen=True)
class End:
    """Kill all workers and end."""


# From the forkserver


@dataclass(frozen=True)
class Notice:
    """What has happened to a worker's process."""

    event: Literal["started", "stopped", "continued", "exited"]
    name: str
    pid: int
    status: int | None


@dataclass(frozen=True)
class Handed:
    """To the next scheduler: a worker, as it is."""

    name: str
    pid: int
    settings: Mapping[str, Plain]
    status: int | None
    alive: bool


@dataclass(frozen=True)
class AllHanded:
    """To the next scheduler: these were all."""

    pid: int
    """The forkserver's."""
    alone_s: float
    """Seconds that the workers had no scheduler."""
    number: int
    """How many schedulers there were before."""
    lives: bool
    """Whether the last of them lives, though it leads the run no more."""


@dataclass(frozen=True)
class TakenAway:
    """To a scheduler that was silent: another one has the workers."""


CODEC: Codec[Any] = Codec(
    "forkserver",
    1,
    Spawn,
    SendSignal,
    Pause,
    Stay,
    Alive,
    End,
    Notice,
    Handed,
    AllHanded,
    TakenAway,
)
SEND_S = 5.0
"""For the other side to read."""
