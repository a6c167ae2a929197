"""What an operator is: a light declaration that the graph holds, and the runtime that a worker builds from it."""

import dataclasses
import inspect
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa
import structlog

from dataflow.errors import GraphError, nearest
from dataflow.limits import Limits
from dataflow.model import Model
from dataflow.model_files import start_fault
from dataflow.records import PROMPT_COLUMNS, ROLLOUT_COLUMNS, Columns
from dataflow.staleness import Bound
from dataflow.stream import Builder, Prompt, Rollout, Stream
from dataflow.traits import Traits
from dataflow.weight_ends import Refresh, WeightsIn, WeightsOut

if TYPE_CHECKING:
    from dataflow.folder.copies.parts import Copies
    from dataflow.folder.ledger import BaseLedger
    from dataflow.folder.run_folder import RunFolder
    from dataflow.system.rank_places import RankPlaces


@dataclass(frozen=True)
class Batch:
    """Rows on their way: whole groups of one source, the rows of a group side by side."""

    source: str
    """Name of the source these rows come from."""
    records: pa.RecordBatch
    origin: str = ""
    """The node that sent them."""
    ack: Callable[[], None] = field(default=lambda: None, compare=False)
    """Called by the runtime once all that these rows led to has been returned from `work`."""
    early: Callable[[int], None] = field(default=lambda group_id: None, compare=False)
    """Called with a group of which that is true before it is of all; the last is told by `ack`. So no group waits for
    those that it travelled with."""


class Runtime:
    """The heavy object that does an operator's work, driven by one thread through these calls.

    consumes: batches by `push`, as many rows as `room` allows; weights by its context
    produces: batches, returned from `work`
    waits for: nothing; every call returns soon (a slice of work is bounded)
    unblocked by: the worker's loop, which calls `work` again when something arrived
    """

    def room(self) -> int:
        """Rows it would take now; 0 when full. A batch larger than the room may be pushed when room is above 0."""
        return 0

    def push(self, batch: Batch) -> None:
        """Take a batch in; it stays the runtime's until `batch.ack` is called."""
        raise TypeError(f"{type(self).__name__} takes no input")

    def work(self) -> list[Batch] | None:
        """Do one bounded slice; the batches that are ready, or None when there is nothing to do for now."""
        return None

    def pending(self) -> int:
        """Rows it holds and still owes an output for; at 0, with its inputs ended, it is finished."""
        return 0

    def waits(self) -> Sequence[Any]:
        """File descriptors and ZeroMQ sockets on which something may arrive that lets `work` go on."""
        return ()

    def forget(self, source: str, group: int) -> None:
        """A group that went through it has an outcome: what it keeps of it beside the rows is needed no more."""

    def tell(self, message: Mapping[str, Any]) -> None:
        """A word from the control: {"evaluate": step}, {"dropped": n}, {"drain": True}, {"end": True} when its
        inputs have ended; unknown words are ignored."""

    def status(self) -> dict[str, float | int | str]:
        """Small numbers for the heartbeat: queue, version, step, and `done` when it has nothing more to do, ever."""
        return {}

    def wants_devices(self) -> bool:
        """Whether it has work that needs its devices: asked of one that takes turns on them (`Traits.sleeps`)."""
        return True

    def sleep(self) -> None:
        """Give the memory of its devices back: another node's turn comes. Until `wake` its `work` uses none of them."""

    def wake(self) -> None:
        """Its turn has come: take that memory again."""

    def close(self) -> None:
        """Give back what it holds."""


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a worker hands to `Operator.build`: everything a runtime may use of the world."""

    node: str
    rank: int = 0
    """Which replica this is."""
    replicas: int = 1
    attempt: int = 0
    """How often this process was started before, in a run that went on meanwhile."""
    ranks: int = 1
    """Processes that make up this replica; this one is the first, and starts the others."""
    seed: int = 0
    threads: int = 1
    """CPU threads this worker may use."""
    device: str = "cpu"
    """cpu, or cuda:N."""
    aside: Path | None = None
    """Of one that has its devices in turn with other nodes, and sleeps between its turns (`Runtime.sleep`): the folder
    in which it may put away what lies in main memory. None: its devices are its own."""
    turn_files: tuple[int, ...] = ()
    """Of such a one: files that all of its processes keep open; its turn ends at the latest when they have ended."""
    steps: int | None = None
    """Steps the run will make; None: until the prompts end."""
    prompt_steps: int | None = None
    """For a trainer: steps that its prompts are enough for, if none is dropped; None: no end is known."""
    columns: Mapping[str, Columns] = field(default_factory=dict)
    """Columns of the rows that arrive, by source."""
    origins: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Nodes that rows arrive from, by source."""
    scores: Mapping[str, str] = field(default_factory=dict)
    """Columns of theirs that scorers of single rollouts write, and where each of these is defined."""
    forwards: tuple[str, ...] = ()
    """Columns of theirs that forward operators write, each beside the version that made it."""
    bounds: Mapping[str, Bound] = field(default_factory=dict)
    """Sources that lead to a trainer with a feedback edge, and how far they may run ahead."""
    feedback: Bound | None = None
    """Of the feedback edge that ends here: how far its weights may be behind, what their trainer consumes."""
    on_demand: bool = False
    """For sources: issue only the rounds that the control asks for (evaluation)."""
    folder: "RunFolder | None" = None
    own_folder: str | None = None
    """For a trainer: its own folder in rollouts/ and checkpoints/; None where it is the run's only one."""
    keep_steps: int | None = None
    """Of the last so many steps the rollouts are kept, beside what recovery and replay need; None: of all."""
    copies: "Copies | None" = None
    """Where copies of a trainer's checkpoints go."""
    ledger: "BaseLedger | None" = None
    clock: Callable[[], float] = time.monotonic
    """Seconds."""
    limits: Limits = field(default_factory=Limits)
    """How long it waits for others."""
    log: Any = field(default_factory=structlog.get_logger)
    writer: Callable[[Mapping[str, Any]], WeightsOut] | None = None
    """For a trainer: opens the weight plane for these tensors; None when nobody reads them. An `OpensWriter` where the
    trainer may have several ranks."""
    refreshers: Mapping[Refresh, Callable[[Mapping[str, Any]], WeightsOut]] = field(default_factory=dict)
    """For a trainer: the same for readers that are refreshed, by which of its versions they get."""
    reader: Callable[[Mapping[str, Any]], WeightsIn] | None = None
    """For a reader of trained weights: attaches these tensors; None when the model is frozen. An `OpensWeights` where
    other ranks may take versions themselves."""
    narrow: str | None = None
    """The format in which the tensors of `Operator.narrow_tensors` arrive there; None: as the others."""
    places: "RankPlaces | None" = None
    """Of ranks that the plan has spread over several hosts: where each is."""


class KnobCheck(type):
    """Turns an unknown knob into a GraphError that names the nearest one."""

    def __call__(cls, *args: Any, **knobs: Any) -> Any:
        """Make the operator, its keyword arguments checked first."""
        known = {item.name for item in dataclasses.fields(cls) if item.init}  # type: ignore[arg-type]
        for knob in knobs:
            if knob not in known:
                hint = nearest(knob, known) or f"; it has {sorted(known)}"
                raise GraphError(f"{cls.__name__} has no knob '{knob}' (got {knob}={knobs[knob]!r:.60}){hint}")
        return super().__call__(*args, **knobs)


@dataclass(frozen=True, eq=False)
class Operator(metaclass=KnobCheck):
    """A declaration: knobs, the columns it reads and provides, and how its runtime is built. Imports no torch."""

    name: str = field(default="", kw_only=True)
    """Its name in the graph; from the class when empty."""

    kind: ClassVar[str] = "operator"
    """source | operator | sink, as the picture shows it."""
    light: ClassVar[bool] = False
    """Light operators use no device and may share a worker with their neighbours."""
    trains: ClassVar[bool] = False
    """Whether it changes its model's weights."""
    state: ClassVar[str | None] = None
    """Ledger state of the groups it sends on: generated, scored."""

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", type(self).__name__.lower())

    def missing(self) -> str | None:
        """Why a run cannot start with it, as far as a look at files tells; asked before any process is started."""
        return None if self.uses is None else start_fault(self.uses)

    @property
    def uses(self) -> Model | None:
        """The model whose weights it needs, if any."""
        return getattr(self, "model", None)

    @property
    def traits(self) -> Traits:
        """What the engine has to know of its knobs."""
        return Traits()

    @property
    def about(self) -> str:
        """What it is, in sentences: for the picture that one can look around in."""
        return inspect.cleandoc(type(self).__doc__ or "")

    @property
    def narrow(self) -> str | None:
        """The format, "int8" or "fp8", in which it would take the linear layers of trained weights; None: their own."""
        return None

    def narrow_tensors(self) -> frozenset[str]:
        """Names of the tensors that it would take so. Called on the trainer's worker."""
        return frozenset()

    def identity(self) -> Hashable:
        """Applications of operators with equal identity are one node of the graph."""
        return id(self)

    def renamed(self, name: str) -> "Operator":
        """The same declaration under another name."""
        return dataclasses.replace(self, name=name)

    def reads(self) -> Mapping[str, Any]:
        """Columns it needs, with the Python annotation each must fit (Any: no demand)."""
        return {}

    def provides(self, columns: Columns) -> Columns:
        """Columns of its output, given those of its input."""
        return columns

    def knobs(self) -> dict[str, Any]:
        """Knobs that differ from their defaults, for the picture and config.json."""
        shown: dict[str, Any] = {}
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if item.name != "name" and item.repr and value != item.default:
                shown[item.name] = value
        return shown

    def faults(self) -> list[str]:
        """What is wrong with its knobs, each a message in three parts; empty when all is well."""
        return []

    def preload(self) -> None:
        """Import what `build` needs, in the process that workers are forked from, so that each starts at once.

        Touch no device and start no thread; what goes wrong here is left for `build` to say.
        """

    def build(self, context: Context) -> Runtime:
        """Make the heavy object, on the worker."""
        raise TypeError(f"{type(self).__name__} has no runtime; give the class a `build` method")


def _graph_of(operator: Operator, stream: Any) -> Builder:
    graph = getattr(stream, "graph", None)
    if graph is None:
        raise GraphError(
            f"'{operator.name}' is applied to {type(stream).__name__} {stream!r:.60}, which is no stream; "
            f"apply it to g.source(...) or to another operator's output"
        )
    return graph  # type: ignore[no-any-return]


@dataclass(frozen=True, eq=False)
class Source(Operator):
    """Where rows come from; `g.source(...)` makes it a stream."""

    kind: ClassVar[str] = "source"
    light: ClassVar[bool] = True
    state: ClassVar[str | None] = "issued"

    def extra_columns(self) -> Columns:
        """The user's columns beside those of every prompt."""
        return {}

    def provides(self, columns: Columns) -> Columns:
        """Every prompt's columns and the extra ones."""
        return {**PROMPT_COLUMNS, **self.extra_columns()}

    def count(self) -> int | None:
        """How many prompts one epoch has, if that can be told cheaply."""
        return None


@dataclass(frozen=True, eq=False)
class Transform(Operator):
    """An operator that takes rows and passes them on with more columns."""

    def __call__(self, stream: Stream[Any]) -> Stream[Rollout]:
        """Apply it; applied to streams of several sources, one node serves them all."""
        return _graph_of(self, stream).apply(self, stream)


@dataclass(frozen=True, eq=False)
class Generate(Transform):
    """A transform from prompts to rollouts."""

    state: ClassVar[str | None] = "generated"

    @property
    def rollouts_per_prompt(self) -> int:
        """Rollouts in a group, where the prompt does not say."""
        return 1

    def reads(self) -> Mapping[str, Any]:
        """The prompt."""
        return {"prompt": str}

    def provides(self, columns: Columns) -> Columns:
        """The prompt's columns and the rollout's."""
        return {**columns, **ROLLOUT_COLUMNS}

    def __call__(self, stream: Stream[Prompt]) -> Stream[Rollout]:
        """Apply it to prompts."""
        return _graph_of(self, stream).apply(self, stream)


@dataclass(frozen=True, eq=False)
class Sink(Operator):
    """Where rows end."""

    kind: ClassVar[str] = "sink"

    def __call__(self, stream: Stream[Any]) -> None:
        """Let the stream end here."""
        _graph_of(self, stream).apply(self, stream)


@dataclass(frozen=True, eq=False)
class Learn(Sink):
    """A sink that trains its model on the rows and offers the new weights."""

    trains: ClassVar[bool] = True

    @property
    def step_prompts(self) -> int:
        """Groups that one step consumes."""
        return 1

    @property
    def weights(self) -> "Weights":
        """The end of its weight plane, for `g.feedback`."""
        return Weights(self)


@dataclass(frozen=True)
class Weights:
    """The parameters that an operator trains: the other kind of edge, which no operator takes for rows.

    >>> from dataflow import Model
    >>> from dataflow.testing import FakeTrainer
    >>> weights = FakeTrainer(model=Model("policies/tiny")).weights
    >>> weights.trainer.name, weights.average(decay=0.99).decay
    ('trainer', 0.99)
    """

    trainer: Learn
    decay: float = 0.0
    """Of their exponential moving average, which goes out in their place; 0: they themselves do."""

    def average(self, *, decay: float) -> "Weights":
        """Their exponential moving average over the steps: decay * average + (1 - decay) * weights after each.

        It begins at the weights that training begins with; the trainer keeps it, in float32."""
        if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 <= decay < 1:
            raise GraphError(
                f"'{self.trainer.name}' cannot average its weights with decay={decay!r}; give a number from 0 up to 1, "
                f"as 0.99"
            )
        return dataclasses.replace(self, decay=float(decay))
