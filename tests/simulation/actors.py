"""Light operators of a simulated run: they draw, score and train without a meaning, by the
product's rules.

The source, admission, staleness, the reorder buffer and the weight plane are the product's own.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import pyarrow as pa
import torch

from dataflow.model import Model
from dataflow.node import (
    CapacityTraits,
    Generate,
    SamplingTraits,
    Source,
    SourceTraits,
    Traits,
    Transform,
)
from dataflow.records import (
    GROUP_ID,
    GROUP_SIZE,
    MIN_VERSION,
    PROMPT,
    ROLLOUT_COLUMNS,
    Columns,
    schema,
)
from dataflow.rules import Admission
from dataflow.runtime import Batch, Context, Runtime
from operators.prompts import PromptRuntime
from operators.sources.prompt_rows import Report

PROMPTS, TRAINED = 64, "prompts"
STOP, NONE = pa.array(["stop"] * 64), pa.nulls(64, pa.string())


def digest(*parts: bytes | int) -> int:
    """A number of 32 bits that any change of the parts changes."""
    return zlib.crc32(
        b"|".join(part if isinstance(part, bytes) else str(part).encode() for part in parts)
    )


def tensors(version: int, content: int) -> dict[str, torch.Tensor]:
    """The weights of a model whose only parameter says what it has been trained on."""
    return {"w": torch.nn.Parameter(torch.tensor([version, content]), requires_grad=False)}


@dataclass(frozen=True, eq=False)
class SimulatedPrompts(Source):
    """`PromptRuntime` over a table of numbers."""

    name: str = field(default=TRAINED, kw_only=True)
    rows: int = PROMPTS
    shuffle_seed: int | None = 1
    group_size: int | None = None
    epochs: int | None = None

    @property
    def traits(self) -> Traits:
        """How often, and how many of each."""
        return Traits(source=SourceTraits(epochs=self.epochs, group_size=self.group_size))

    def build(self, context: Context) -> Runtime:
        """The product's own source."""
        numbers = [str(number) for number in range(self.rows)]
        table = pa.table({"prompt_id": numbers, "prompt": numbers})
        return PromptRuntime(
            table,
            Report(),
            context,
            name=self.name,
            shuffle_seed=self.shuffle_seed,
            group_size=self.group_size,
            epochs=self.epochs,
        )


@dataclass(frozen=True, eq=False)
class SimulatedGenerator(Generate):
    """Draws tokens of no meaning, each under the version that it holds at that moment."""

    name: str = field(default="generator", kw_only=True)
    model: Model | None = None
    group_size: int = 2
    slots: int = 4
    in_flight: int | None = None
    temperature: float = 1.0
    max_tokens: int = 6

    @property
    def traits(self) -> Traits:
        """What a graph is checked for."""
        return Traits(
            sampling=SamplingTraits(temperature=self.temperature, max_tokens=self.max_tokens),
            capacity=CapacityTraits(in_flight=self.in_flight, slots=self.slots),
        )

    @property
    def rollouts_per_prompt(self) -> int:
        """`group_size`."""
        return self.group_size

    def build(self, context: Context) -> Runtime:
        """With the product's admission and weight plane."""
        return _Drawing(self, context)


@dataclass
class _Group:
    """A prompt and its rollouts."""

    group_id: int
    min_version: int
    source: str
    prompt: pa.RecordBatch
    batch: Batch
    lengths: list[int]
    unstarted: int
    drawn: list[list[int]] = field(default_factory=list)
    """Versions of the tokens of every rollout that has started."""

    @property
    def finished(self) -> bool:
        return not self.unstarted and all(
            len(row) == wanted for row, wanted in zip(self.drawn, self.lengths, strict=True)
        )


class _Drawing(Runtime):
    def __init__(self, operator: SimulatedGenerator, context: Context) -> None:
        self._operator, self._context, self._probe = operator, context, context.log
        self._held = tensors(-1, 0)
        assert context.weights.reader is not None
        self._reader = context.weights.reader(self._held)
        self._admission: Admission[_Group] = Admission(context.graph.bounds, operator.in_flight)
        self._live: list[_Group] = []

    def room(self) -> int:
        """Room while any source that may arrive has none waiting, as in the product: no source
        keeps another out.
        """
        sources = self._admission.sources
        return max(
            0, 16 - min(len(sources.get(source, ())) for source in self._context.graph.columns)
        )

    def push(self, batch: Batch) -> None:
        rows = batch.records
        numbers = (rows.column(name).to_pylist() for name in (GROUP_ID, MIN_VERSION, GROUP_SIZE))
        for at, (group, least, asked) in enumerate(zip(*numbers, strict=True)):
            size = asked or self._operator.group_size
            lengths = lengths_of(group, size, self._operator.max_tokens)
            self._admission.add(
                batch.source,
                _Group(
                    group, least, batch.source, rows.slice(at, 1), batch, lengths, unstarted=size
                ),
            )

    def pending(self) -> int:
        return len(self._admission) + len(self._live)

    def work(self) -> list[Batch] | None:
        """Adopt what is new, start what may start, draw a token of each rollout."""
        if self._reader.poll() is not None and self._probe.random.random() < 0.7:
            before = self._reader.version
            self._reader.adopt()
            self._probe.adopted(before, self._reader.version)
        version = self._reader.version
        if version < 0:
            return None
        dropped = int(self._reader.note.get("dropped", 0))
        slots = self._operator.slots
        free = slots - sum(
            len(row) < wanted
            for group in self._live
            for row, wanted in zip(group.drawn, group.lengths, strict=False)
        )
        for _, group, count in self._admission.start(
            free=free,
            slots=slots,
            idle=not self._live,
            version=version,
            dropped=dropped,
            fit=lambda group, wanted: wanted,
        ):
            if not group.drawn:
                self._probe.starts(group.source, group.group_id, group.min_version, version)
                self._live.append(group)
            group.unstarted -= count
            group.drawn += [[] for _ in range(count)]
        if not self._live:
            return None
        held = self._held["w"].tolist()
        self._probe.reads(version, held)
        for group in self._live:
            for row, wanted in zip(group.drawn, group.lengths, strict=False):
                if len(row) < wanted:
                    row.append(version)
        made: dict[str, list[pa.RecordBatch]] = {}
        for group in [group for group in self._live if group.finished]:
            made.setdefault(group.source, []).append(self._rows(group))
            self._live.remove(group)
            group.batch.release(group.group_id)
        return [Batch(source, pa.concat_batches(rows)) for source, rows in made.items()]

    def status(self) -> dict[str, float | int | str]:
        waiting = [group.group_id for queue in self._admission.sources.values() for group in queue]
        return {"version": self._reader.version, "live": len(self._live), "held": str(waiting)}

    def _rows(self, group: _Group) -> pa.RecordBatch:
        size = len(group.lengths)
        rows = group.prompt.take(pa.array(np.zeros(size, np.int64)))
        offsets = pa.array(np.cumsum([0, *group.lengths]).astype(np.int32))
        count = sum(group.lengths)
        versions = np.concatenate([np.asarray(row, np.int32) for row in group.drawn])
        position = np.arange(size, dtype=np.int32)
        ragged = {
            "tokens": np.full(count, group.group_id, np.int32),
            "mask": np.ones(count, bool),
            "logprobs": np.zeros(count, np.float32),
            "versions": versions,
        }
        made: dict[str, pa.Array] = {
            "rollout_id": pa.array(group.group_id * size + position.astype(np.int64)),
            "position": pa.array(position),
            "completion": rows.column(PROMPT),
            "finish_reason": STOP.slice(0, size),
            "error": NONE.slice(0, size),
            **{
                name: pa.ListArray.from_arrays(offsets, pa.array(values))
                for name, values in ragged.items()
            },
        }
        columns = {**self._context.graph.columns[group.source], **ROLLOUT_COLUMNS}
        arrays = [made[name] if name in made else rows.column(name) for name in columns]
        return pa.RecordBatch.from_arrays(arrays, schema=schema(columns))


def lengths_of(group: int, size: int, most: int) -> list[int]:
    """How long the rollouts of a group become."""
    return [1 + digest(group, position) % most for position in range(size)]


def fails(group: int, filters: bool) -> bool:
    """Whether a group is dropped, as if all of its rollouts had failed: one in 7, or all but one in
    7.
    """
    return (digest(group, 7) % 7 == 0) != filters


@dataclass(frozen=True, eq=False)
class SimulatedScorer(Transform):
    """Adds a reward after a while, one group before another."""

    name: str = field(default="reward", kw_only=True)
    light: ClassVar[bool] = True
    state: ClassVar[str | None] = "scored"
    slow_s: float = 0.05

    def provides(self, columns: Columns) -> Columns:
        """A reward for each rollout."""
        return {**columns, self.name: pa.float64()}

    def build(self, context: Context) -> Runtime:
        """In the process itself."""
        return _Scoring(self, context)


@dataclass(frozen=True, eq=False)
class HeavyScorer(SimulatedScorer):
    """The same in workers of its own, of which there may be several."""

    light: ClassVar[bool] = False


class _Scoring(Runtime):
    def __init__(self, operator: SimulatedScorer, context: Context) -> None:
        self._operator, self._context = operator, context
        self._inside: list[tuple[float, Batch]] = []

    def room(self) -> int:
        return max(0, 64 - len(self._inside))

    def push(self, batch: Batch) -> None:
        due = self._context.clock() + self._operator.slow_s * self._context.log.random.random()
        self._inside.append((due, batch))
        self._context.log.call_back(due)

    def pending(self) -> int:
        return len(self._inside)

    def work(self) -> list[Batch] | None:
        """What is scored by now."""
        now = self._context.clock()
        ready = [batch for due, batch in self._inside if due <= now]
        if not ready:
            return None
        self._inside = [entry for entry in self._inside if entry[0] > now]
        made = []
        for batch in ready:
            rewards = (batch.records.column(GROUP_ID).to_numpy() % 5).astype(np.float64)
            made.append(
                Batch(
                    batch.source,
                    batch.records.append_column(self._operator.name, pa.array(rewards)),
                )
            )
            batch.ack()
        return made

    def status(self) -> dict[str, float | int | str]:
        return {"inside": len(self._inside)}
