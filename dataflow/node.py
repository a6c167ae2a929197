"""What an operator is: a light declaration that the graph holds; a worker builds a
`dataflow.runtime` from it.
"""

import dataclasses
import inspect
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

from dataflow.errors import GraphError, KnobCheck
from dataflow.model import Model
from dataflow.records import PROMPT_COLUMNS, ROLLOUT_COLUMNS, ROLLOUT_ID, Columns
from dataflow.runtime import Context, Runtime
from dataflow.settable import Settable, settable_fields

if TYPE_CHECKING:
    from dataflow.graph import Graph
    from dataflow.history.replay import ReplayScript

# Rows on their way through a graph as a Python type (Stream), and join; parameters are another
# type (Weights).


class Prompt:
    """Row type of a stream of prompts (columns: records.PROMPT_COLUMNS)."""


class Rollout(Prompt):
    """Row type of a stream of rollouts (columns: records.ROLLOUT_COLUMNS)."""


R_co = TypeVar("R_co", bound=Prompt, covariant=True)


@dataclass(frozen=True)
class Stream(Generic[R_co]):
    """Rows that leave `node`, all from the source `source`.

    >>> from dataflow import Graph
    >>> from dataflow.testing import FakePrompts
    >>> prompts = Graph("tiny").source(FakePrompts())
    >>> prompts.node, "prompt" in prompts.columns
    ('prompts', True)
    """

    graph: "Graph"
    node: str
    source: str
    columns: Columns

    def __repr__(self) -> str:
        return f"Stream('{self.node}' of '{self.source}': {list(self.columns)})"


def join(first: Stream[Any], *others: Stream[Any]) -> Stream[Rollout]:
    """One stream with the columns of all; its rows appear once every branch has delivered them.

    Raises GraphError when the streams come from different sources or graphs, or disagree on a
    column's type.

    >>> from dataflow import Graph, join, scorer
    >>> from dataflow.testing import FakeGenerator, FakePrompts
    >>> @scorer
    ... def short(completion: str) -> float:
    ...     return -float(len(completion))
    >>> @scorer
    ... def right(completion: str, answer: str) -> float:
    ...     return float(completion == answer)
    >>> rollouts = FakeGenerator()(Graph("tiny").source(FakePrompts()))
    >>> both = join(short(rollouts), right(rollouts))
    >>> {"short", "right"} <= set(both.columns)
    True
    """
    streams = (first, *others)
    for branch in others:
        if branch.graph is not first.graph:
            raise GraphError(
                f"join got streams of two graphs, '{first.graph.name}' and '{branch.graph.name}'; "
                "build all of them with one Graph"
            )
        if branch.source != first.source:
            raise GraphError(
                f"join got rows of two sources, '{first.source}' and '{branch.source}', which never"
                " meet; join branches of one stream"
            )
    for stream in streams:
        if ROLLOUT_ID not in stream.columns and len(streams) > 1:
            raise GraphError(
                f"join needs rollouts, but '{stream.node}' sends prompts; apply a generator before"
                " the join"
            )
    if len(streams) == 1:
        return first
    return first.graph.merge(streams)


# What the engine has to know of an operator's knobs to check a graph, to size it and to place it.
# Each operator gives what concerns it; the rest stays at its default.


@dataclass(frozen=True, kw_only=True)
class Split:
    """How processes share out an operator's model."""

    dp_replicate: int = 1
    """Copies of the model among them."""
    tensor_parallel: int = 1
    """Of them that share out each layer."""
    apart: bool = False
    """Whether all of them are processes beside its worker, which then has no part of the model."""

    @property
    def least_ranks(self) -> int:
        """A replica takes a multiple of so many."""
        return self.tensor_parallel * self.dp_replicate


@dataclass(frozen=True, kw_only=True)
class SamplingTraits:
    """How it samples, or what samples it computes log-probabilities of."""

    temperature: float | None = None
    """None: it does neither."""
    unrecorded: tuple[str, str] | None = None
    """How a generator samples otherwise than its rows say, as `top_p=0.9`, and what to do: a model
    that computes their log-probabilities has those of another distribution."""
    top_k: int = 0
    """Token ids among which each is drawn; 0: all."""
    stop: tuple[str | int, ...] = ()
    """Texts and token ids that end a completion."""
    max_tokens: int | None = None
    """Most tokens of a completion; None: not known."""
    context_tokens: int | None = None
    """Most tokens of prompt and completion; None: the model's own limit."""


@dataclass(frozen=True, kw_only=True)
class CapacityTraits:
    """How much it holds, or does, at once."""

    in_flight: int | None = None
    """Most prompts that a generator holds; None: as many as the feedback allows."""
    slots: int = 1
    """Rollouts that are decoded."""
    cache_bytes: int | None = None
    """Budget for keys and values; None: what is free."""
    prefill_tokens: int = 0
    """Most tokens of prompts that a generator computes in one pass."""
    ahead_tokens: int = 0
    """Tokens of prompts that a captured decode step takes as rows beside those of its slots."""
    calls_at_once: int = 1
    """Rows, or groups, that it scores, over all its processes."""
    queue_prompts: int | None = None
    """Most prompts that a trainer holds beside those of its step; None: as many as the feedback
    allows."""


@dataclass(frozen=True, kw_only=True)
class TrainingTraits:
    """What decides over a trainer's memory and time."""

    micro_batch_tokens: int = 0
    """Tokens of one pass; 0: not known."""
    begins_early: bool = True
    """Whether groups are computed before the others of their step are there."""
    gradient_checkpointing: bool = False
    """Whether the backward pass computes anew what the layers made."""
    keeps_products: bool = False
    """Whether it computes anew all but matrix products and attention."""
    inputs_in_host: bool = False
    """Whether what goes into layers waits for the backward pass in main memory."""
    moment_bytes: int = 4
    """Of a number in either of its moments."""
    compiled: bool = False
    """Whether its layers are compiled."""
    offloads: bool = False
    """Whether its moments are in main memory until the update."""
    copies_weights: bool | None = None
    """Whether its ranks send versions from copies of its weights, so that no update waits for a
    reader; None: as its plan has it."""
    compares_logprobs: bool = False
    """Whether its loss compares its log-probabilities with the generator's."""


@dataclass(frozen=True, kw_only=True)
class SourceTraits:
    """What a source issues."""

    epochs: int | None = None
    """How often it issues its rows; None: without end, or not known."""
    group_size: int | None = None
    """Rollouts that it asks for, of each prompt; None: as many as the generator makes."""


@dataclass(frozen=True, kw_only=True)
class Traits:
    """All of an operator (`Operator.traits`)."""

    split: Split = Split()
    sampling: SamplingTraits = SamplingTraits()
    capacity: CapacityTraits = CapacityTraits()
    training: TrainingTraits = TrainingTraits()
    source: SourceTraits = SourceTraits()
    chat: bool | None = None
    """Of a source, whether its prompts are chat messages; of others, whether they take prompts for
    such and lay them out. None: not known, or it reads no prompts as text."""
    chat_options: Mapping[str, Any] = field(default_factory=dict)
    """The chat template's own, where it lays prompts out."""
    sleeps: bool = False
    """Whether its runtime can give its devices' memory back and take it again, so that it may share
    them in turns."""
    compares_siblings: bool = False
    """Whether it needs groups of two rollouts or more."""
    every_steps: int | None = None
    """Steps between two rounds of an evaluation; None: it evaluates nothing."""
    port: int = 0
    """On which each of its replicas listens; 0: on none, or on any that is free."""
    arrives_in_host: bool = False
    """Whether a version of its weights arrives in main memory, and is copied to its device from
    there."""
    ways: tuple[Mapping[str, Any], ...] = ()
    """Values of the knobs that its plan is to choose on accelerators, the fastest way first, the
    one that takes least memory last; empty: it has values for all."""


@dataclass(frozen=True, eq=False)
class Operator(metaclass=KnobCheck):
    """A declaration: knobs, the columns it reads and provides, and how its runtime is built.
    Imports no torch.
    """

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
        """Why a run cannot start with it, as far as a look at files tells; asked before any process
        is started.
        """
        if self.uses is None:
            return None
        from dataflow.model_files import start_fault

        return start_fault(self.uses)

    @property
    def uses(self) -> Model | None:
        """The model whose weights it needs, if any."""
        return getattr(self, "model", None)

    @property
    def traits(self) -> Traits:
        """What the engine has to know of its knobs."""
        return Traits()

    @property
    def computes(self) -> bool:
        """Whether it is to have devices, or a share of the cores."""
        return not self.light

    @property
    def about(self) -> str:
        """What it is, in sentences: for the picture that one can look around in."""
        return inspect.cleandoc(type(self).__doc__ or "")

    @property
    def quantized(self) -> str | None:
        """The format, "int8" or "fp8", in which it would take the linear layers of trained weights;
        None: their own.
        """
        return None

    def quantized_tensors(self) -> frozenset[str]:
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

    def settable(self) -> Mapping[str, Settable]:
        """Knobs that may change while a run goes on, `dataflow set`: fields that `settable(...)`
        declares.
        """
        return settable_fields(self)

    def with_knob(self, knob: str, value: Any) -> Self:
        """The same declaration with another value of a knob that may change. GraphError where it is
        of another kind.
        """
        return self._with(knob, self.settable()[knob].taken(value, self.name, knob))

    def _with(self, knob: str, value: Any) -> Self:
        return dataclasses.replace(self, **{knob: value})

    def at_temperature(self, temperature: float) -> "Operator":
        """The same declaration for rollouts that are sampled at another temperature; each row says
        at which it was.
        """
        return self

    def faults(self) -> list[str]:
        """What is wrong with its knobs, each a message in three parts; empty when all is well."""
        return []

    def preload(self) -> None:
        """Import what `build` needs, in the process that workers are forked from, so that each
        starts at once.

        Touch no device and start no thread; what goes wrong here is left for `build` to say.
        """

    def build(self, context: Context) -> Runtime:
        """Make the heavy object, on the worker."""
        raise TypeError(f"{type(self).__name__} has no runtime; give the class a `build` method")


def _graph_of(operator: Operator, stream: Stream[Any]) -> "Graph":
    if not isinstance(stream, Stream):
        raise GraphError(
            f"'{operator.name}' is applied to {type(stream).__name__} {stream!r:.60}, which is no"
            " stream; apply it to g.source(...) or to another operator's output"
        )
    return stream.graph


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
    answers_turns: ClassVar[bool] = False
    """Whether episodes may ask it for turns."""

    @property
    def rollouts_per_prompt(self) -> int:
        """Rollouts in a group, where the prompt does not say."""
        return 1

    @property
    def asks(self) -> "Generate | None":
        """The generator that draws the turns of its rollouts, where it is an episode; None: it
        draws them itself.
        """
        return None

    def asking(self, generator: "Operator") -> "Generate":
        """The same episode with the turns of another generator; GraphError for what is none."""
        raise TypeError(f"{type(self).__name__} asks nobody")

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

    def replay(self, script: "ReplayScript") -> Iterator[Mapping[str, float]]:
        """Train recorded steps again: the figures of each, in order."""
        raise GraphError(
            f"'{self.name}' is a {type(self).__name__}, which cannot replay steps; replay those of"
            " a Trainer"
        )

    @property
    def weights(self) -> "Weights":
        """The end of its weight plane, for `g.feedback`."""
        return Weights(self)


@dataclass(frozen=True)
class Weights:
    """The parameters that an operator trains: the other kind of edge, which no operator takes for
    rows.

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
        """Their exponential moving average over the steps: decay * average + (1 - decay) * weights
        after each.

        It begins at the weights that training begins with; the trainer keeps it, in float32.
        """
        if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 <= decay < 1:
            raise GraphError(
                f"'{self.trainer.name}' cannot average its weights with decay={decay!r}; give a"
                " number from 0 up to 1, as 0.99"
            )
        return dataclasses.replace(self, decay=float(decay))
