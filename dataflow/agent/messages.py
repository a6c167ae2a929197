"""What a scheduler and the agent of a host say to each other; what concerns a forkserver is passed
on as it is.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

from dataflow.planning.hosts import Host
from dataflow.system.messages import Codec, Message, Natural, Plain, Refused, field

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


# From an agent


class Join(Message, kw_only=True):
    """An agent is there: of which host, and how that is reached."""

    host: Host
    address: str
    """At which the other hosts reach it."""
    sockets: str
    """Its private folder, for unix sockets and shared memory."""
    folder: str
    """The run folder, as it sees it."""
    pid: int
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of Python, torch and the engine."""
    digest: str = ""
    """Of what it has built for a scheduler before this one; empty: nothing yet."""
    reach_address: str = ""
    """Where other hosts find out whether they reach it."""


class Built(Message, kw_only=True):
    """The user's program is imported, its graph built and planned."""

    digest: str
    """Of graph and plan."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Digests of the files that the program's own code stands in, by name."""


class Failed(Message):
    """The host cannot take part: what is wrong, for people."""

    error: str


class Paused(Message):
    """All workers stand still, or go on."""

    is_paused: bool


class Leaves(Message):
    """Somebody has asked it to end (SIGTERM), and it does so within seconds."""


class Bye(Message):
    """All workers have ended, and it ends."""


class HandedOver(Message, kw_only=True):
    """Behind a `Handed` for each: these were all workers of the host."""

    question: Natural
    """Of the `HandOver` that this answers."""
    alone_s: float
    """Seconds that they had no scheduler."""


class FromWorkers(Message, kw_only=True):
    """What workers have said, in order: messages of `dataflow.worker.messages` as they sent
    them.
    """

    names: Sequence[str]
    """Who, one for each message."""
    messages: Sequence[bytes]


# To an agent


class Begin(Message, kw_only=True):
    """Build the graph of the program, plan it over the hosts, and be ready to fork workers."""

    launch: Mapping[str, Plain]
    """As `Launch` has it, in plain values."""
    inputs: Mapping[str, Plain]
    """As `PlanInputs` has them: all that the plan is made from beside the graph."""
    whereabouts: Mapping[str, str]
    """Of the scheduler, for workers: as `Whereabouts` has it."""
    reach_addresses: Mapping[str, str] = field(default_factory=dict)
    """Of the hosts that are there, by name."""
    part: Natural = 0
    """How often the run was taken up before."""


class HandOver(Message, kw_only=True):
    """To an agent that may have workers: say which they are."""

    question: Natural
    """Its number, which the answer repeats."""
    whereabouts: Mapping[str, str]


class ToWorkers(Message, kw_only=True):
    """Messages for workers, in order, as `FromWorkers` has those of workers."""

    names: Sequence[str]
    messages: Sequence[bytes]


class Pace(Message):
    """How often what workers say of themselves is to be passed on."""

    beat_s: float


FromAgent: TypeAlias = (
    Join
    | Built
    | Failed
    | Paused
    | Leaves
    | Bye
    | Alive
    | FromWorkers
    | Notice
    | Handed
    | HandedOver
)
ToAgent: TypeAlias = (
    Begin | HandOver | Refused | ToWorkers | Pace | Spawn | SendSignal | Pause | Stay | Alive | End
)

FROM_AGENT: Codec[FromAgent] = Codec(
    "dataflow.from-agent",
    4,
    Join,
    Built,
    Failed,
    Paused,
    Leaves,
    Bye,
    Alive,
    FromWorkers,
    Notice,
    Handed,
    HandedOver,
)
TO_AGENT: Codec[ToAgent] = Codec(
    "dataflow.to-agent",
    2,
    Begin,
    HandOver,
    Refused,
    ToWorkers,
    Pace,
    Spawn,
    SendSignal,
    Pause,
    Stay,
    Alive,
    End,
)


def is_repeated(message: FromAgent | ToAgent) -> bool:
    """Whether it is said again and again by itself: nothing is lost with one of them."""
    return isinstance(message, Join | Alive)


FORKSERVER: Codec[Any] = Codec(
    "dataflow.forkserver-of-host",
    1,
    Begin,
    Built,
    Failed,
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
"""Between an agent and its forkserver, which runs the program."""
