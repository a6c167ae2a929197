"""What happens to the table of workers, and what is to be done about it: values on both sides of
the reducer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from dataflow.errors import RunError
from dataflow.folder.live_changes import KnobChange, Swap
from dataflow.planning.hosts import Host
from dataflow.system.messages import Life
from dataflow.worker.messages import FromWorker, ToWorker

# Events


@dataclass(frozen=True)
class RunBegins:
    """The run begins: its workers are to be started."""


@dataclass(frozen=True)
class KeptProcess:
    """A worker as the forkserver kept it while there was no scheduler."""

    life: Life
    pid: int
    alive: bool
    status: int | None


@dataclass(frozen=True)
class TakeOver:
    """The table is that of a scheduler that has ended, and these are its workers, by name; those
    that sit on a host are told when that has joined.
    """

    processes: Mapping[str, KeptProcess]


@dataclass(frozen=True)
class HostJoined:
    """The agent of a host is there, and keeps these processes of workers, by name. One that was
    started anew, and lost those that it had, is told as lost before.
    """

    host: Host
    processes: Mapping[str, KeptProcess] = field(default_factory=dict)


@dataclass(frozen=True)
class HostHeard:
    """The agent of a host gives a sign of life."""

    host: str


@dataclass(frozen=True)
class HostLost:
    """The agent of a host has ended, or can be reached no more."""

    host: str
    cause: str
    """As in "host 'a' has ended its agent": the text after the name."""


@dataclass(frozen=True)
class Received:
    """A message came from a sender that gives a worker's name."""

    name: str
    message: FromWorker
    host: str = ""
    """The host whose agent passed it on; empty: this machine."""


@dataclass(frozen=True)
class ProcessEvent:
    """The forkserver tells of a worker's process: started | stopped | continued | exited."""

    name: str
    what: str
    status: int | None = None
    host: str = ""
    """The host whose forkserver it is; empty: this machine."""


@dataclass(frozen=True)
class ForkserverGone:
    """It has ended, and all processes with it."""


@dataclass(frozen=True)
class Wish:
    """Somebody wishes for so many replicas of some nodes, which can be."""

    wishes: Mapping[str, int]


@dataclass(frozen=True)
class SwapIn:
    """An operator that was tried, and fits, is to take the place of another one."""

    swap: Swap


@dataclass(frozen=True)
class SetIn:
    """Knobs are to have other values, which were checked."""

    changes: Sequence[KnobChange]


@dataclass(frozen=True)
class WishCheckpoint:
    """Somebody wishes for a checkpoint after the step under way."""

    number: int


@dataclass(frozen=True)
class Drain:
    """The run is to finish the step under way, to write a checkpoint and to end."""


@dataclass(frozen=True)
class Shutdown:
    """The scheduler ends: all workers are to stop."""


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


Event: TypeAlias = (
    RunBegins
    | TakeOver
    | HostJoined
    | HostHeard
    | HostLost
    | Received
    | ProcessEvent
    | ForkserverGone
    | Wish
    | SwapIn
    | SetIn
    | WishCheckpoint
    | Drain
    | Shutdown
    | Tick
)
# Commands


@dataclass(frozen=True, kw_only=True)
class StartWorker:
    """Start a process for a worker: the attempt that its record has."""

    name: str
    senders: Mapping[str, int] | None = None
    """By edge that ends there: how many senders to expect; None: as many as the plan has."""


@dataclass(frozen=True)
class StartRanks:
    """Start the processes of a worker's ranks on other hosts than its own, for the attempt that its
    record has.
    """

    name: str
    at: str
    """Where the first rank waits for them."""


@dataclass(frozen=True)
class EndRanks:
    """End those of an attempt, which has ended."""

    name: str
    life: Life


@dataclass(frozen=True)
class Send:
    """Send a message to a worker, where it runs now."""

    to: str
    message: ToWorker


@dataclass(frozen=True)
class Signal:
    """Send a signal to a worker."""

    to: str
    number: int


@dataclass(frozen=True)
class Clear:
    """End all processes of workers that a host has; when they have ended its agent says anew that
    it is there.
    """

    host: str


@dataclass(frozen=True)
class Outlive:
    """From now on workers outlive their scheduler."""


@dataclass(frozen=True)
class NotifyUser:
    """Say something to the user."""

    text: str


@dataclass(frozen=True)
class FaultNoticed:
    """A worker has ended, or was stopped, that should not have."""

    worker: str
    cause: str
    attempt: int
    heard_at: float
    rollouts: int = 0
    """Rollouts that it had begun; they are drawn again."""


@dataclass(frozen=True)
class FaultRecovered:
    """The worker is at work again."""

    worker: str
    notice: str = ""
    """What to say where it was not simply restarted."""


@dataclass(frozen=True)
class Refuse:
    """A message that its sender could not have sent is refused."""

    name: str


@dataclass(frozen=True)
class EndRun:
    """The run ends with this error."""

    error: RunError


Command: TypeAlias = (
    StartWorker
    | StartRanks
    | EndRanks
    | Send
    | Signal
    | Clear
    | Outlive
    | NotifyUser
    | FaultNoticed
    | FaultRecovered
    | Refuse
    | EndRun
)
