"""The doctor's facts of a run at one moment, as plain values."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from dataflow.structure import edge_name
from dataflow.system.processes import Process
from dataflow.system.stacks import Thread

AWAY = ("forked", "starting", "dying", "down")
"""The scheduler's names for states of a worker that has not come yet, or has gone."""


@dataclass(frozen=True, kw_only=True)
class WorkerFacts:
    """A process of the run."""

    name: str
    nodes: tuple[str, ...] = ()
    state: str = "ready"
    """forked | starting | ready | dying | down | stopping | left | gone, as the scheduler says."""
    host: str = ""
    """Where it runs; empty: this machine, where there is no other."""
    cause: str = ""
    """Why it is dying, or was started again."""
    silent_s: float = 0.0
    """Seconds since its last message."""
    at: str = ""
    """The node whose slice of work it is in; empty: it rests."""
    at_s: float = 0.0
    """Seconds that it has been in that slice."""
    restarts: int = 0
    process: Process | None = None
    """None: it has no process, or one on another machine."""
    ranks: tuple[Process, ...] = ()
    """Processes that it has started: other ranks, scorers."""
    threads: tuple[Thread, ...] = ()
    dump: str = ""
    """Its stacks from its log, where it did not answer."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """An operator of the graph, its replicas taken together."""

    name: str
    kind: str = "operator"
    """source | operator | sink."""
    state: str = "waiting"
    """working | blocked | waiting | starved | paused | done."""
    for_s: float = 0.0
    """Seconds in that state, and without a moment of work unless the state is `working`."""
    busy: float | None = None
    """Share of the last seconds; likewise the other states."""
    blocked: float | None = None
    waiting: float | None = None
    starved: float | None = None
    beside: float | None = None
    """The part of busy that its own processes have, while its worker may be at another node."""
    pending: int = 0
    """Rows it holds and has not answered for."""
    held_back: int = 0
    """Prompts or groups that cannot begin before newer weights come."""
    step: int | None = None
    version: int | None = None
    """Version of its weights, or of those that it has made."""
    rows_in: int = 0
    rows_out: int = 0
    workers: tuple[WorkerFacts, ...] = ()


@dataclass(frozen=True, kw_only=True)
class EdgeFacts:
    """A data edge. What its consumer has passed on stays on it until the next nodes are done with
    it.
    """

    producer: str
    consumer: str
    source: str = ""
    depth: int | None = None
    """Rows that arrived and are not acknowledged; None: not known."""
    capacity: int | None = None

    @property
    def name(self) -> str:
        return edge_name(self.producer, self.consumer, self.source)

    @property
    def is_full(self) -> bool:
        """Whether it takes no more rows."""
        return self.depth is not None and self.capacity is not None and self.depth >= self.capacity


@dataclass(frozen=True, kw_only=True)
class FeedbackFacts:
    """Weights that go from a trainer to a reader."""

    trainer: str
    reader: str
    every: int = 1
    """Versions between two that the reader takes."""


@dataclass(frozen=True, kw_only=True)
class Awaited:
    """The group that a trainer needs next, and where the ledger says it is."""

    group_id: int
    source: str
    state: str
    """issued | generating | generated | scored."""
    node: str = ""
    """The node that has it, where one says so; and the worker."""
    worker: str = ""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """A run at one moment."""

    phase: str = "training"
    """starting | first_evaluation | training | last_evaluation | over."""
    draining: bool = False
    step: int = 0
    steps: int | None = None
    still_s: float = 0.0
    """Seconds since anything moved: rows, tokens, steps, versions."""
    nodes: Mapping[str, Node] = field(default_factory=dict)
    edges: tuple[EdgeFacts, ...] = ()
    feedbacks: tuple[FeedbackFacts, ...] = ()
    awaited: Mapping[str, Awaited] = field(default_factory=dict)
    """By trainer."""
    on_demand: tuple[str, ...] = ()
    """Sources that issue only for evaluations."""
    leading: tuple[str, ...] = ()
    """Trainers whose steps are the run's."""
    turns: tuple[tuple[str, ...], ...] = ()
    """Nodes that take turns on devices."""

    @property
    def workers(self) -> dict[str, WorkerFacts]:
        """All workers, by name."""
        return {worker.name: worker for node in self.nodes.values() for worker in node.workers}

    @property
    def evaluating(self) -> bool:
        """Whether training waits for an evaluation."""
        return self.phase in ("first_evaluation", "last_evaluation")
