"""What a worker makes of an operator: the heavy object that works, what it is given of the world,
rows on their way.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from dataflow.limits import Limits
from dataflow.records import Columns
from dataflow.staleness import Bound
from dataflow.system.messages import Life
from dataflow.tokens.ragged import group_slices
from dataflow.weight_ends import Refresh, Span, WeightsIn, WeightsOut, untold

if TYPE_CHECKING:
    from dataflow.folder.copies.store import Copies
    from dataflow.folder.ledger import BaseLedger
    from dataflow.folder.live_changes import KnobChange
    from dataflow.folder.run_folder import RunFolder
    from dataflow.system.rank_places import RankPlaces


def _logger() -> Any:
    import structlog

    return structlog.get_logger()


@dataclass(frozen=True)
class Batch:
    """Rows on their way: whole groups of one source, the rows of a group side by side."""

    source: str
    """Name of the source these rows come from."""
    records: pa.RecordBatch
    origin: str = ""
    """The node that sent them."""
    release: Callable[[int], None] = field(default=lambda group_id: None, compare=False)
    """Called by the runtime with each of its groups, once all that the group led to has been
    returned from `work`: no group waits for those that it travelled with."""

    def ack(self) -> None:
        """Release all of its groups that were not."""
        for group_id, _, _ in group_slices(self.records):
            self.release(group_id)


@dataclass(frozen=True, kw_only=True)
class KnobsInForce:
    """What holds at a node since knobs of its run were changed."""

    operator: Any
    """Its declaration with the values in force; a trainer's as it was declared."""
    bounds: Mapping[str, Bound]
    """As `Context.graph.bounds`; a trainer's as declared."""
    changes: "tuple[KnobChange, ...]"
    """That concern it, in order; of a trainer also those of the bound that it sweeps by."""


class Runtime:
    """The heavy object that does an operator's work, driven by one thread through these calls.

    consumes: batches by `push`, as many rows as `room` allows; weights by its context
    produces: batches, returned from `work`
    waits for: nothing; every call returns soon (a slice of work is bounded)
    unblocked by: the worker's loop, which calls `work` again when something arrived
    """

    def room(self) -> int:
        """Rows it would take now; 0 when full. A batch larger than the room may be pushed when room
        is above 0.
        """
        return 0

    def push(self, batch: Batch) -> None:
        """Take a batch in; a group stays the runtime's until `batch.release` is called with it."""
        raise TypeError(f"{type(self).__name__} takes no input")

    def work(self) -> list[Batch] | None:
        """Do one bounded slice; the batches that are ready, or None when there is nothing to do for
        now.
        """
        return None

    def pending(self) -> int:
        """Rows it holds and still owes an output for; at 0, with its inputs ended, it is
        finished.
        """
        return 0

    def waits(self) -> Sequence[Any]:
        """File descriptors and ZeroMQ sockets on which something may arrive that lets `work` go
        on.
        """
        return ()

    def starved(self) -> bool:
        """Whether it has rows, and may begin none of them before newer weights have come."""
        return False

    def beside(self) -> float:
        """The share of its own processes, if it has some, that are at work now while its loop goes
        on or rests.
        """
        return 0.0

    def forget(self, source: str, group: int) -> None:
        """A group that went through it has an outcome: what it keeps of it beside the rows is
        needed no more.
        """

    def tell(self, message: Mapping[str, Any]) -> None:
        """A word from the control: {"evaluate": step}, {"dropped": n}, {"drain": True}, {"end":
        True} when its inputs have ended; unknown words are ignored.
        """

    def change(self, knobs: KnobsInForce) -> None:
        """Knobs were changed: go by these values from the next boundary on, which each knob names
        (`settable`).
        """

    @property
    def is_behind(self) -> bool:
        """Whether changes that it heard of wait for its boundary."""
        return False

    def status(self) -> dict[str, float | int | str]:
        """Small numbers for the heartbeat: queue, version, step, and `done` when it has nothing
        more to do, ever.
        """
        return {}

    def under_way(self) -> dict[str, int]:
        """What of `status` grows within one slice of work. Called from another thread, at any time:
        reads only.
        """
        return {}

    def wants_devices(self) -> bool:
        """Whether it has work that needs its devices: asked of one that takes turns on them
        (`Traits.sleeps`).
        """
        return True

    def sleep(self) -> None:
        """Give the memory of its devices back: another node's turn comes. Until `wake` its `work`
        uses none of them.
        """

    def wake(self) -> None:
        """Its turn has come: take that memory again."""

    def close(self) -> None:
        """Give back what it holds."""


# What a runtime is told, by what it concerns.


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What a run was started with, the same for all of its processes."""

    seed: int = 0
    steps: int | None = None
    """Steps the run will make; None: until the prompts end."""
    keep_steps: int | None = None
    """Of the last so many steps the rollouts are kept, beside what recovery and replay need; None:
    of all."""
    limits: Limits = field(default_factory=Limits)
    """How long its processes wait for others."""


@dataclass(frozen=True, kw_only=True)
class GraphFacts:
    """What a node knows of the graph around it."""

    columns: Mapping[str, Columns] = field(default_factory=dict)
    """Columns of the rows that arrive, by source."""
    origins: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Nodes that rows arrive from, by source."""
    scores: Mapping[str, str] = field(default_factory=dict)
    """Columns of theirs that scorers of single rollouts write, and where each of these is
    defined."""
    forwards: tuple[str, ...] = ()
    """Columns of theirs that forward operators write, each beside the version that made it."""
    bounds: Mapping[str, Bound] = field(default_factory=dict)
    """Sources that lead to a trainer with a feedback edge, and how far they may run ahead."""
    feedback: Bound | None = None
    """Of the feedback edge that ends here: how far its weights may be behind, what their trainer
    consumes."""
    quantized: str | None = None
    """The format in which the tensors of `Operator.quantized_tensors` arrive there; None: as the
    others."""
    on_demand: bool = False
    """For sources: issue only the rounds that the control asks for (evaluation)."""
    takers: tuple[Any, ...] = ()
    """For sources: generators, and what reads demonstrations, that take its prompts as they are."""
    episodes: tuple[str, ...] = ()
    """For a generator: those that ask it for turns, each under its name as their source."""
    prompt_steps: int | None = None
    """For a trainer: steps that its prompts are enough for, if none is dropped; None: no end is
    known."""
    own_folder: str | None = None
    """Of a trainer in rollouts/ and checkpoints/, of an evaluation in rollouts/; None for the run's
    only one."""


@dataclass(frozen=True, kw_only=True)
class DeviceShare:
    """What a replica computes on."""

    device: str = "cpu"
    """cpu, or cuda:N."""
    threads: int = 1
    """CPU threads of each process."""
    ranks: int = 1
    """Processes that make up this replica; this one is the first, and starts the others."""
    places: "RankPlaces | None" = None
    """Of ranks that the plan has spread over several hosts: where each is."""
    aside: Path | None = None
    """Of one that has its devices in turn with other nodes, and sleeps between its turns
    (`Runtime.sleep`): the folder in which it may put away what lies in main memory. None: its
    devices are its own."""
    chosen: Mapping[str, Any] = field(default_factory=dict)
    """As of its `Placement`."""
    turn_files: tuple[int, ...] = ()
    """Of such a one: files that all of its processes keep open; its turn ends at the latest when
    they have ended."""


@dataclass(frozen=True, kw_only=True)
class WeightEnds:
    """The ends of weight lines that a node may open."""

    writer: Callable[[Mapping[str, Any]], WeightsOut] | None = None
    """For a trainer: opens the weight plane for these tensors; None when nobody reads them. An
    `OpensWriter` where the trainer may have several ranks."""
    refreshers: Mapping[Refresh, Callable[[Mapping[str, Any]], WeightsOut]] = field(
        default_factory=dict
    )
    """For a trainer: the same for readers that are refreshed, by which of its versions they get."""
    reader: Callable[[Mapping[str, Any]], WeightsIn] | None = None
    """For a reader of trained weights: attaches these tensors; None when the model is frozen. An
    `OpensWeights` where other ranks may take versions themselves."""


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a worker hands to `Operator.build`: everything a runtime may use of the world."""

    node: str
    replica: int = 0
    """Its number among those of the node."""
    life: Life = Life()
    """Of this process; its `attempt` above 0: it was started again in a run that went on
    meanwhile."""
    run: RunSettings = field(default_factory=RunSettings)
    graph: GraphFacts = field(default_factory=GraphFacts)
    devices: DeviceShare = field(default_factory=DeviceShare)
    weights: WeightEnds = field(default_factory=WeightEnds)
    changes: "tuple[KnobChange, ...]" = ()
    """Of its knobs, made while the run went on, as `KnobsInForce.changes`."""
    folder: "RunFolder | None" = None
    copies: "Copies | None" = None
    """Where copies of a trainer's checkpoints go."""
    ledger: "BaseLedger | None" = None
    clock: Callable[[], float] = time.monotonic
    """Seconds."""
    spent: Callable[[], Mapping[str, float]] = dict
    """How the node's time was spent so far: seconds by state, as `dataflow.worker.state_clock` has
    them."""
    log: Any = field(default_factory=_logger)
    span: Span = untold
    """`with context.span("optimizer"):` shows a stretch of a slice of work in the run's trace; few
    names, no number."""
