"""What a scheduler and its forkserver say to each other."""

from collections.abc import Mapping
from typing import Any, Literal

from dataflow.system.messages import Codec, Message, Plain

# From the scheduler


class Spawn(Message):
    """Fork a worker."""

    name: str
    settings: Mapping[str, Plain]
    heavy: bool
    """After `preload`."""
    keeps: bool
    """The others wait for its end when no scheduler comes back."""


class SendSignal(Message):
    """Send a signal to a worker."""

    name: str
    number: int


class Pause(Message):
    """Let all workers stand still, or go on."""

    is_paused: bool


class Stay(Message):
    """Keep the workers when the scheduler has ended."""

    wait_s: float
    """For another scheduler."""
    end_s: float
    """Then for workers that have something to bring to an end."""
    silent_s: float
    """A scheduler that was not heard for longer is replaced, where there is something to replace it
    with."""


class Alive(Message):
    """The scheduler's sign of life."""


class End(Message):
    """Kill all workers and end."""


# From the forkserver


class Notice(Message):
    """What has happened to a worker's process."""

    event: Literal["started", "stopped", "continued", "exited"]
    name: str
    pid: int
    status: int | None


class Handed(Message):
    """To the next scheduler: a worker, as it is."""

    name: str
    pid: int
    settings: Mapping[str, Plain]
    status: int | None
    alive: bool


class AllHanded(Message):
    """To the next scheduler: these were all."""

    pid: int
    """The forkserver's."""
    alone_s: float
    """Seconds that the workers had no scheduler."""
    number: int
    """How many schedulers there were before."""
    lives: bool
    """Whether the last of them lives, though it leads the run no more."""


class TakenAway(Message):
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
