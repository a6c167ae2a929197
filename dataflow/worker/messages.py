"""The messages between the scheduler and its workers, a class each, and the one place that encodes
and checks them.
"""

import os
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from dataflow.folder.live_changes import KnobChange, Swap
from dataflow.system.messages import Codec, LifeMessage, Message, Plain, field
from dataflow.worker.kept_counts import CrossedByFile
from dataflow.worker.state_clock import STATES

ALONE = os.EX_TEMPFAIL
"""Exit status of a worker that had no scheduler any more."""

WHOLE_NUMBERS = (
    "step",
    "done",
    "dropped",
    "round",
    "version",
    "tokens",
    "scored",
    "failed",
    "does_not_apply",
    "restarts",
    "queue",
    "waiting",
    "active",
)
"""What the scheduler counts with in a node's status."""


# From a worker


class WeightLine(Message, kw_only=True):
    """Where the weights of one trainer can be had; `structure.line_of` names it."""

    host: str
    """Name of the trainer's host; empty: all of the run is on this machine."""
    at: Mapping[str, str]
    """By executor, where readers connect."""


class Hello(LifeMessage, kw_only=True):
    """It lives, and listens at these addresses."""

    pid: int
    addresses: Mapping[str, str]
    """By edge that ends there."""
    machine: str = ""
    """On which `pid` is its number, as `processes.machine` says."""
    lines: Mapping[str, WeightLine] = field(default_factory=dict)
    """Weight lines of its trainers, by name."""
    ranks_at: str = ""
    """Where it waits for those of its ranks that are on other hosts; empty: there are none."""


class Ready(LifeMessage, kw_only=True):
    """Its operators are built and wired."""

    notes: tuple[str, ...] = ()
    """What people should know of how: such as kernels that are off."""


class Confirmed(LifeMessage, kw_only=True):
    """What the message with this ticket asked for is done."""

    ticket: int


class NodeReport(Message, kw_only=True):
    """What one node says of itself, and how it spent its time. Errors: ValueError for a status
    nobody could count with.
    """

    status: Mapping[str, bool | int | float | str]
    seconds: Mapping[str, float]
    """By state, since its loop was made, as `state_clock` has them."""
    rows_in: int
    rows_out: int
    ended: bool
    blocked: bool
    starved: bool = False
    paused: bool = False
    measured_s: float = 0.0
    """The time since then, which the seconds add up to."""
    turn: str = ""
    """Of one that shares its devices: `awake`, `asleep`, or `waits` for its turn."""
    pending: int = 0
    oldest: Mapping[str, int] = field(default_factory=dict)
    """By source, the first group that it is not done with."""

    def __post_init__(self) -> None:
        if any(type(self.status.get(name, 0)) not in (int, bool) for name in WHOLE_NUMBERS):
            raise ValueError(
                f"a status counts in whole numbers, but this one is {self.status!r:.200}"
            )
        if type(self.status.get("eval_accuracy", 0.0)) not in (int, bool, float):
            raise ValueError(f"an accuracy is a number, but this status is {self.status!r:.200}")
        if not self.seconds.keys() >= set(STATES):
            raise ValueError(
                f"seconds are {', '.join(STATES)}, but these are {sorted(self.seconds)}"
            )


class Heartbeat(LifeMessage, kw_only=True):
    """A sign of life, several times a second."""

    nodes: Mapping[str, NodeReport]
    edges: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """By edge that ends there, how full it is: rows held, and capacity."""
    crossed: CrossedByFile = field(default_factory=dict)
    """What has crossed the edges that begin or end there."""
    drained: bool = False
    """Whether its loops have ended, and all they sent is acknowledged."""
    alone: bool = False
    """Whether it ends because nobody spoke to it."""
    changed: int = 0
    """Number of the last change of knobs that counts here; of those after it a trainer waits for
    its next step."""
    state: str = "running"
    turned_s: float = 0.0
    """How long the slice of work under way has lasted."""
    asleep_s: float = 0.0
    """How long it has computed nothing in it."""
    at: str = ""
    """The node whose slice that is."""
    at_s: float = 0.0
    rss_bytes: int = 0


class Stacks(LifeMessage, kw_only=True):
    """Where its threads are."""

    threads: Sequence[Plain]


class Failed(LifeMessage, kw_only=True):
    """It ends with an error."""

    message: str
    error: str = ""
    """The error's class."""
    traceback: str = ""
    lasting: bool = False
    """Whether it would be there again after a restart."""


class Tried(LifeMessage, kw_only=True):
    """What came of trying an operator that is to be swapped in."""

    swap: Swap | None
    """With its module's text; None: it cannot be."""
    error: str
    """Why not."""


class Bye(LifeMessage, kw_only=True):
    """It ends as it was told."""

    crossed: CrossedByFile = field(default_factory=dict)
    """What has crossed its edges to the end."""


# To a worker


class Wire(Message, kw_only=True):
    """Where the others listen; it builds its operators with that."""

    addresses: Mapping[str, list[str]]
    """By edge that begins there, of its receivers."""
    lines: Mapping[str, WeightLine] = field(default_factory=dict)
    """The weight lines that it reads, by name."""


class Moved(Message, kw_only=True):
    """A worker was started again, and listens elsewhere now."""

    receivers: Mapping[str, str] = field(default_factory=dict)
    """By edge that begins there, the address."""
    before: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """By edge, all addresses at which it has listened earlier."""
    lines: Mapping[str, WeightLine] = field(default_factory=dict)
    """The weight lines of its trainers, by name."""


class Start(Message, kw_only=True):
    """Begin to work."""


class Stop(Message, kw_only=True):
    """Wind down and end."""


class NodeCommand(Message):
    """For the runtime of a node; {"pause": bool} is for the loop around it."""

    node: str
    message: Mapping[str, bool | int]


class Expect(Message, kw_only=True):
    """By edge that ends there, how many senders it has had in all; to be confirmed."""

    senders: Mapping[str, int]
    ticket: int


class SenderEnded(Message, kw_only=True):
    """By edge that ends there, a replica of its sender that has told the end, be it the attempt
    before.
    """

    senders: Mapping[str, int]


class AddReceivers(Message, kw_only=True):
    """By edge that begins there, where one receiver more is."""

    receivers: Mapping[str, str]


class RetireReceivers(Message, kw_only=True):
    """By edge that begins there, which receiver gets no more; to be confirmed once it has
    acknowledged all.
    """

    receivers: Mapping[str, str]
    ticket: int


class ChangeKnobs(Message, kw_only=True):
    """All changes of knobs of the run so far; those that it knows are known."""

    changes: tuple[KnobChange, ...]


class Heard(Message, kw_only=True):
    """The answer to a heartbeat."""


class AskStacks(Message, kw_only=True):
    """Say where your threads are."""


FromWorker: TypeAlias = Hello | Ready | Confirmed | Heartbeat | Stacks | Failed | Tried | Bye
ToWorker: TypeAlias = (
    Wire
    | Start
    | Stop
    | NodeCommand
    | Moved
    | Expect
    | SenderEnded
    | AddReceivers
    | RetireReceivers
    | ChangeKnobs
    | Heard
    | AskStacks
)
DECIDE_NOTHING = (Heard, AskStacks)
"""Messages from which nothing follows that the next scheduler would have to know."""

TO_SCHEDULER: Codec[FromWorker] = Codec(
    "dataflow.from-worker", 2, Hello, Ready, Confirmed, Heartbeat, Stacks, Failed, Tried, Bye
)
TO_WORKER: Codec[ToWorker] = Codec(
    "dataflow.to-worker",
    1,
    Wire,
    Moved,
    Start,
    Stop,
    NodeCommand,
    Expect,
    SenderEnded,
    AddReceivers,
    RetireReceivers,
    ChangeKnobs,
    Heard,
    AskStacks,
)
