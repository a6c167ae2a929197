"""Fakes of the heavy operators, without torch: for tests of graphs, schedulers and scorers."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from dataflow.annotations import arrow_type
from dataflow.folder.knobs_by_step import KnobsByStep
from dataflow.model import Model
from dataflow.node import (
    CapacityTraits,
    Generate,
    Learn,
    Operator,
    SamplingTraits,
    Sink,
    Source,
    SourceTraits,
    Traits,
)
from dataflow.records import GROUP_ID, PROMPT, PROMPT_COLUMNS, ROLLOUT_COLUMNS, Columns, schema
from dataflow.runtime import Batch, Context, KnobsInForce, Runtime
from dataflow.settable import GROUP, STEP, settable


@dataclass(frozen=True, eq=False)
class FakePrompts(Source):
    """A source of `size` prompts "0", "1", ...; extra columns hold the prompt's text or number."""

    name: str = field(default="prompts", kw_only=True)
    columns: Mapping[str, type] = field(default_factory=lambda: {"answer": str})
    size: int | None = 100
    """Prompts; None: without end."""
    epochs: int | None = 1
    group_size: int | None = None

    @property
    def traits(self) -> Traits:
        """How often, and how many of each."""
        return Traits(source=SourceTraits(epochs=self.epochs, group_size=self.group_size))

    def extra_columns(self) -> Columns:
        """The asked-for columns."""
        return {name: arrow_type(kind) or pa.string() for name, kind in self.columns.items()}

    def count(self) -> int | None:
        """`size`."""
        return self.size

    def build(self, context: Context) -> Runtime:
        """Issues its prompts, eight at a time."""
        return _Issue(self, context)


class _Issue(Runtime):
    def __init__(self, operator: FakePrompts, context: Context) -> None:
        self._operator, self._context = operator, context
        ledger = context.ledger
        self._next = 0 if ledger is None else ledger.next_group_id(operator.name)
        """Above what was issued before; what of it has no outcome is issued again first."""
        self._again = (
            [] if ledger is None else [group.group_id for group in ledger.in_flight(operator.name)]
        )

    def work(self) -> list[Batch] | None:
        count = self._operator.size
        stop = self._next + 8 if count is None else min(self._next + 8, count)
        ids = np.array(self._again[:8] or range(self._next, stop), np.int64)
        if not len(ids):
            return None
        self._again, self._next = self._again[8:], max(self._next, int(ids[-1]) + 1)
        if self._context.ledger is not None:
            self._context.ledger.issue(self._operator.name, [(int(i), str(i)) for i in ids])
        texts = pa.array([str(i) for i in ids])
        zeros = pa.array(np.zeros(len(ids), np.int32))
        arrays = [pa.array(ids), texts, texts, zeros, zeros, zeros]
        for kind in self._operator.extra_columns().values():
            arrays.append(texts if kind == pa.string() else pa.array(ids).cast(kind))
        names = [*PROMPT_COLUMNS, *self._operator.extra_columns()]
        return [Batch(self._operator.name, pa.RecordBatch.from_arrays(arrays, names=names))]

    def status(self) -> dict[str, float | int | str]:
        count = self._operator.size
        return {"done": int(count is not None and self._next >= count and not self._again)}


@dataclass(frozen=True, eq=False)
class FakeGenerator(Generate):
    """Answers every prompt with its own text, `group_size` times, without a model's work."""

    name: str = field(default="generator", kw_only=True)
    model: Model | None = None
    group_size: int = 4
    in_flight: int | None = None
    temperature: float = settable(1.0, at=GROUP)

    def missing(self) -> str | None:
        """It loads no model."""
        return None

    @property
    def traits(self) -> Traits:
        """What a graph is checked for."""
        return Traits(
            capacity=CapacityTraits(in_flight=self.in_flight),
            sampling=SamplingTraits(temperature=self.temperature),
            sleeps=True,
        )

    @property
    def rollouts_per_prompt(self) -> int:
        """`group_size`."""
        return self.group_size

    def build(self, context: Context) -> Runtime:
        """Echoes."""
        return _Echo(self, context)


class _Sleeps(Runtime):
    """One that needs its devices for all of its work, and for nothing else."""

    _awake = True

    def wants_devices(self) -> bool:
        return bool(self.pending())

    def sleep(self) -> None:
        self._awake = False

    def wake(self) -> None:
        self._awake = True


class _Echo(_Sleeps):
    def __init__(self, operator: FakeGenerator, context: Context) -> None:
        self._size, self._context = operator.group_size, context
        self._queue: list[Batch] = []

    def room(self) -> int:
        return 64 if len(self._queue) < 4 else 0

    def push(self, batch: Batch) -> None:
        self._queue.append(batch)

    def pending(self) -> int:
        return len(self._queue)

    def work(self) -> list[Batch] | None:
        if not self._queue or not self._awake:
            return None
        batch = self._queue.pop(0)
        size = self._size
        rows = batch.records.take(pa.array(np.repeat(np.arange(batch.records.num_rows), size)))
        count = rows.num_rows
        position = np.tile(np.arange(size, dtype=np.int32), batch.records.num_rows)
        offsets = np.arange(count + 1, dtype=np.int32)
        ragged = {
            "tokens": np.ones(count, np.int32),
            "mask": np.ones(count, bool),
            "logprobs": np.zeros(count, np.float32),
            "versions": np.zeros(count, np.int32),
        }
        generated: dict[str, pa.Array] = {
            "rollout_id": pa.array(rows.column(GROUP_ID).to_numpy() * size + position),
            "position": pa.array(position),
            "completion": rows.column(PROMPT),
            "finish_reason": pa.array(["stop"] * count),
            "error": pa.nulls(count, pa.string()),
            **{
                n: pa.ListArray.from_arrays(pa.array(offsets), pa.array(v))
                for n, v in ragged.items()
            },
        }
        columns = {**self._context.graph.columns[batch.source], **ROLLOUT_COLUMNS}
        arrays = [generated[n] if n in generated else rows.column(n) for n in columns]
        batch.ack()
        return [Batch(batch.source, pa.RecordBatch.from_arrays(arrays, schema=schema(columns)))]


@dataclass(frozen=True, eq=False)
class FakeTrainer(Learn):
    """Counts groups in issue order, calls every `prompts_per_step` of them a step, and goes on from
    the ledger's.
    """

    name: str = field(default="trainer", kw_only=True)
    model: Model | None = None
    prompts_per_step: int = 8
    queue_prompts: int | None = None
    temperature: float = 1.0
    lr: float = settable(1.0, at=STEP)
    """What its steps write into metrics.jsonl."""
    columns: tuple[str, ...] = ()
    """Columns it claims to read."""

    def at_temperature(self, temperature: float) -> Operator:
        """With that one."""
        return replace(self, temperature=temperature)

    def missing(self) -> str | None:
        """It loads no model."""
        return None

    @property
    def traits(self) -> Traits:
        """What a graph is checked for."""
        return Traits(
            capacity=CapacityTraits(queue_prompts=self.queue_prompts),
            sampling=SamplingTraits(temperature=self.temperature),
            sleeps=True,
        )

    @property
    def step_prompts(self) -> int:
        """`prompts_per_step`."""
        return self.prompts_per_step

    def reads(self) -> Mapping[str, Any]:
        """`columns`, of any type."""
        return dict.fromkeys(self.columns, Any)

    def build(self, context: Context) -> Runtime:
        """Counts."""
        return _Count(self, context)


class _Count(_Sleeps):
    def __init__(self, operator: FakeTrainer, context: Context) -> None:
        self._operator, self._context = operator, context
        self._groups: dict[int, pa.RecordBatch] = {}
        self._acks: list[tuple[int, Batch]] = []
        """Deliveries by their last group, until that is trained."""
        self._knobs = KnobsByStep(operator, context.changes, context.ledger)
        self._step = 0 if context.ledger is None else context.ledger.last_step(context.node)
        self._cursor = self._step * operator.prompts_per_step
        self._source = ""
        self._done = self._is_last
        self._asked = self._answered = 0

    def room(self) -> int:
        return 1 << 20

    def push(self, batch: Batch) -> None:
        self._source = batch.source
        ids = batch.records.column(GROUP_ID).to_numpy()
        for group in np.unique(ids[ids >= self._cursor]):
            self._groups[int(group)] = batch.records.filter(pa.array(ids == group))
        self._acks.append((int(ids.max()), batch))
        self._acknowledge()

    def work(self) -> list[Batch] | None:
        if self._knobs.is_behind:
            self._knobs.take(self._step + 1, next(iter(self._context.graph.bounds.values()), None))
        self._answered = self._asked
        groups = self._wanted()
        if not groups or not self._awake:
            return None
        self._cursor, self._step = groups.stop, self._step + 1
        rows = [self._groups.pop(group) for group in groups]
        context = self._context
        if context.folder is not None and context.ledger is not None:
            context.folder.rollouts_of(context.graph.own_folder).write(self._step, rows)
            context.ledger.commit_step(
                node=context.node,
                step=self._step,
                version=self._step,
                source=self._source,
                trained=list(groups),
                dropped={},
                metrics={},
                checkpoint=None,
            )
            line = {"step": self._step, "node": context.node, "version": self._step, "dropped": {}}
            line["lr"] = self._knobs.at(self._step).lr
            context.folder.append_metrics(line)
        self._done = self._is_last
        self._acknowledge()
        return []

    @property
    def _is_last(self) -> bool:
        """Whether the run has made its last step, maybe before this process began."""
        return self._context.run.steps is not None and self._step >= self._context.run.steps

    def pending(self) -> int:
        return len(self._wanted())

    def _wanted(self) -> range:
        """The groups of a step that can be made."""
        groups = range(self._cursor, self._cursor + self._operator.prompts_per_step)
        return (
            range(0) if self._done or not all(group in self._groups for group in groups) else groups
        )

    def _acknowledge(self) -> None:
        for last, batch in self._acks:
            if last < self._cursor:
                batch.ack()
        self._acks = [(last, batch) for last, batch in self._acks if last >= self._cursor]

    def change(self, knobs: KnobsInForce) -> None:
        self._knobs.hear(knobs.changes)

    @property
    def is_behind(self) -> bool:
        return self._knobs.is_behind and not self._done

    def tell(self, message: Mapping[str, Any]) -> None:
        self._asked = max(self._asked, int(message.get("checkpoint", 0)))
        self._done = self._done or bool(message.get("drain") or message.get("end"))

    def status(self) -> dict[str, float | int | str]:
        return {
            "step": self._step,
            "done": int(self._done),
            "dropped": 0,
            "asked_checkpoint": self._answered,
            "asked_step": self._step,
        }


@dataclass(frozen=True, eq=False)
class FakeEvaluate(Sink):
    """A sink that says it evaluates every so many steps."""

    name: str = field(default="eval", kw_only=True)
    light: ClassVar[bool] = True
    every_steps: int = 10

    @property
    def traits(self) -> Traits:
        """When it evaluates."""
        return Traits(every_steps=self.every_steps)
