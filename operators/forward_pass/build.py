"""Makes the runtime that a forward operator declares, on one rank or as the first of several;
imports torch.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from dataflow.errors import DeadlineError
from dataflow.records import (
    DROP_REASON,
    ERROR,
    LOGPROBS,
    MASK,
    TEMPERATURE,
    VERSIONS,
    AnyArray,
    version_column,
)
from dataflow.runtime import Batch, Context, Runtime
from dataflow.scoring.values import error_column
from dataflow.staleness import Bound
from dataflow.tokens.ragged import gather, group_slices
from operators.forward import ForwardOperator
from operators.forward_pass.reading import ModelQuery, Reading, reading_of
from operators.models.loading import load_merged
from operators.models.read_weights import ReadWeights
from operators.training.learner.rows import pack, split, usable

if TYPE_CHECKING:
    from operators.forward_pass.ranks import LedForward
    from operators.models.adapters import Merged


# Which groups may be computed under the weights at hand: a pure rule over versions and groups,
# without a clock.


@dataclass(frozen=True, kw_only=True)
class Known:
    """What a reader of weights knows of them."""

    version: int
    """At hand; -1 before the first."""
    told: int = 0
    """The newest version that the trainer has spoken of."""
    dropped: int = 0
    """Groups that the trainer had passed by then without training them."""


def needed(newest: int, source: Bound | None, own: Bound | None) -> int:
    """The oldest version that a group with a token of version `newest` may be computed under.

    source: of the policy that made the group; None where it may run ahead as it likes, as for
    evaluation. own: of the feedback that brings the weights; its trainer makes no more than
    own.steps versions. newest: -1 where the policy chose no token.
    """
    if source is None or own is None or newest < 0:
        return 0
    version = newest * source.prompts_per_step // own.prompts_per_step - own.max_staleness
    version = max(0, version if own.steps is None else min(version, own.steps))
    return _sent(version, own)


def is_first(note: Mapping[str, object], own: Bound) -> bool:
    """Whether a reader without weights yet has the right version: a refreshed model starts with its
    own, once its trainer has noted that no other exists.
    """
    version = note.get("version")
    return own.every is not None and isinstance(version, int) and version < own.every


def is_due(
    group_id: int, newest: int, versions: Known, source: Bound | None, own: Bound | None
) -> bool:
    """Whether the group may be computed now."""
    if versions.version < 0:
        return False
    if own is None or versions.version >= needed(newest, source, own):
        return True
    passed = versions.told * own.prompts_per_step + versions.dropped
    return (
        versions.version >= _sent(versions.told, own) and group_id < passed + own.prompts_per_step
    )


def _sent(version: int, own: Bound) -> int:
    """The newest version up to this one that the reader is sent."""
    return version if own.every is None else version // own.every * own.every


# A forward operator at work: whole groups in, one micro-batch at a time, the same rows with a
# column more out.

_ROOM = 4096


@dataclass(frozen=True)
class _Group:
    """A group that waits."""

    group_id: int
    records: pa.RecordBatch
    newest: int
    """Version behind its newest token."""
    cost: int
    """About how many tokens it takes."""
    temperature: float
    """At which it was sampled; 0: as declared."""
    source: str
    batch: Batch
    """That brought it."""


@dataclass
class _Round:
    """Groups of one source that are computed together, and how far that is."""

    groups: list[_Group]
    records: pa.RecordBatch
    version: int
    """Of the weights that compute them."""
    good: AnyArray
    """Its rows that have not failed, int64."""
    query: ModelQuery | None
    """None: none is good."""
    parts: list[AnyArray]
    """Micro-batches to come: indices into R."""
    numbers_S: AnyArray


class ForwardRuntime(Runtime):
    """Computes the groups that are due, in the order in which they came, under the newest weights.

    consumes: whole groups by `push`; weights and notes from the weight plane, between two rounds:
        the numbers of a group come from one version
    produces: the same groups with one column more, returned from `work`; which are acknowledged
        then
    waits for: weights that a group needs, with a deadline; `work` gives None while no group is due
    unblocked by: a newer version, a note of its trainer, groups. That one of these comes is shown
        in `due`; it takes that groups which wait keep no other out, so there is always room.
    """

    def __init__(
        self,
        declaration: ForwardOperator,
        context: Context,
        reading: Reading,
        merged: Merged | None = None,
        led: LedForward | None = None,
    ) -> None:
        """Attach the model's weights to the weight plane of `context`, where they are trained;
        merged: its adapters; led: the forward pass of `reading`, where other ranks make it too.
        """
        self._declaration, self._context, self._reading = declaration, context, reading
        self._merged, self._led = merged, led
        self._own = context.graph.feedback and replace(
            context.graph.feedback, steps=context.run.steps
        )
        self._model: torch.nn.Module = reading.forward.module
        attached = dict(self._model.named_parameters()) if merged is None else merged.tensors
        self._trained = context.weights.reader is not None
        reader = context.weights.reader(attached) if context.weights.reader else None
        ranks = None if led is None else led.ranks
        self._weights = ReadWeights(reader, attached, context.devices.aside, ranks, context.span)
        self._awake = True
        """Whether it has the memory of its devices."""
        self._waiting: collections.deque[_Group] = collections.deque()
        self._round: _Round | None = None
        self._rows = self._tokens = 0
        self._moved = context.clock()

    def room(self) -> int:
        """Bounded by the edge's credit: a group that waits must not keep out one that it waits
        for.
        """
        return _ROOM

    def push(self, batch: Batch) -> None:
        """Cut the batch into its groups."""
        records = batch.records
        for group_id, first, count in group_slices(records):
            rows = records.slice(first, count)
            newest = pc.max(pc.list_flatten(rows.column(VERSIONS))).as_py()
            newest = -1 if newest is None else newest
            group = _Group(
                group_id, rows, newest, _cost(rows), _temperature(rows), batch.source, batch
            )
            self._waiting.append(group)
        self._rows += records.num_rows
        self._moved = self._context.clock()

    def work(self) -> list[Batch] | None:
        """One micro-batch; the groups of a round once all of theirs are computed; None while no
        group is due.
        """
        if not self._awake:
            self._weights.hear()
            self._check_deadline()
            return None
        if self._round is None:
            self._listen()
            self._round = self._begin() if self._weights.ready else None
        current = self._round
        if current is None:
            self._check_deadline()
            return None
        self._moved = self._context.clock()
        if current.parts:
            self._compute(current, current.parts.pop(0))
        if current.parts:
            return []
        self._round = None
        return [self._end(current)]

    def pending(self) -> int:
        """Rows that it holds."""
        return self._rows

    def waits(self) -> Sequence[Any]:
        """The weight plane's socket, where it has one."""
        return () if self._weights.socket is None else (self._weights.socket,)

    def starved(self) -> bool:
        """While groups wait, and none is due under the weights at hand."""
        return self._round is None and bool(self._waiting) and not self._due()

    def wants_devices(self) -> bool:
        """While groups are due, or in the midst of a round, and weights can be had for them."""
        had = self._weights.can_be_had or (self._weights.ready and self._known().version >= 0)
        return self._round is not None or (had and self._due())

    def sleep(self) -> None:
        """Move the model out of the device's memory; a current round starts over later."""
        if self._round is not None:
            self._waiting.extendleft(reversed(self._round.groups))
            self._round = None
        self._weights.sleep([*self._model.parameters(), *self._model.buffers()])
        self._awake = False

    def wake(self) -> None:
        """Have memory for it again."""
        self._weights.wake()
        self._awake = True

    def close(self) -> None:
        """Let what was put aside go, and end the model's other ranks, where it has some."""
        self._weights.close()
        if self._led is not None:
            self._led.close()

    def status(self) -> dict[str, float | int | str]:
        """Rows held, groups that wait, tokens that went through the model, and the version where
        there are several.
        """
        figures: dict[str, float | int | str] = {
            "queue": self._rows,
            "waiting": len(self._waiting),
            "tokens": self._tokens,
        }
        return figures | {"version": self._known().version} if self._trained else figures

    def _listen(self) -> None:
        """Take the newest weights that are offered; a restarted trainer's may have the same
        number.
        """
        if self._weights.take() is not None:
            self._moved = self._context.clock()
            if self._merged is not None:
                self._merged.adopted()

    def _known(self) -> Known:
        if not self._trained:
            return Known(version=0)
        note, version = self._weights.note, self._weights.version
        newest = int(note.get("version", 0))
        if version < 0 and self._own is not None and is_first(note, self._own):
            version = 0
        return Known(version=version, told=newest, dropped=int(note.get("dropped", 0)))

    def _due(self) -> bool:
        """Whether some group is."""
        versions, bounds = self._known(), self._context.graph.bounds
        return any(
            is_due(group.group_id, group.newest, versions, bounds.get(group.source), self._own)
            for group in self._waiting
        )

    def _begin(self) -> _Round | None:
        """Groups of one source and temperature that are due, up to a micro-batch, taken from the
        queue.
        """
        versions, bounds = self._known(), self._context.graph.bounds
        chosen: list[_Group] = []
        cost = 0
        for group in self._waiting:
            source = group.source
            if chosen and (source, group.temperature) != (chosen[0].source, chosen[0].temperature):
                continue
            if not is_due(group.group_id, group.newest, versions, bounds.get(source), self._own):
                continue
            if chosen and cost + group.cost > self._declaration.micro_batch_tokens:
                break
            chosen.append(group)
            cost += group.cost
        if not chosen:
            return None
        chosen_ids = {id(group) for group in chosen}
        self._waiting = collections.deque(
            group for group in self._waiting if id(group) not in chosen_ids
        )
        return self._ask(chosen)

    def _ask(self, groups: list[_Group]) -> _Round:
        records = (
            pa.Table.from_batches([group.records for group in groups])
            .combine_chunks()
            .to_batches()[0]
        )
        good, version = np.flatnonzero(_good(records)), self._known().version
        if not len(good):
            return _Round(groups, records, version, good, None, [], np.zeros(0, np.float32))
        query = self._reading.ask(records.take(pa.array(good)))
        limit = self._declaration.micro_batch_tokens
        parts = (
            split(query.tokens_S, query.offsets, query.groups_R, limit) if len(query.row_R) else []
        )
        return _Round(
            groups, records, version, good, query, parts, np.zeros(len(query.tokens_S), np.float32)
        )

    def _compute(self, current: _Round, part: AnyArray) -> None:
        query = current.query
        assert query is not None, "micro-batches are of sequences"
        positions, offsets = gather(query.offsets, part)
        packed = pack(query.tokens_S[positions], query.read_S[positions], offsets)
        if not len(packed.flat_T):
            return
        flat_T = positions[packed.flat_T]
        left_T = None if query.left_S is None else query.left_S.take(flat_T)
        self._reading.forward.at(current.groups[0].temperature)
        with torch.no_grad():
            (numbers_T,) = self._reading.forward.computed(packed, left_T, ()).values()
        current.numbers_S[flat_T] = numbers_T.float().cpu().numpy()
        self._tokens += packed.nodes

    def _end(self, current: _Round) -> Batch:
        """The round's rows with the new column; what could not be computed is null and has an
        error.
        """
        records, total = current.records, current.records.num_rows
        values, failures = pa.nulls(total, self._declaration.column), {}
        if current.query is not None:
            query = current.query
            computed = self._reading.column(
                records.take(pa.array(current.good)), query, current.numbers_S
            )
            failures = dict(query.failures)
            at = np.full(total, -1, np.int64)
            rows = query.row_R[query.firsts]
            at[current.good[rows]] = np.arange(len(rows))
            for sequence in _not_finite(query, current.numbers_S):
                row = int(query.row_R[sequence])
                failures[row] = "the number that the model gave is not finite"
                at[current.good[row]] = -1
            values = computed.take(pa.array(at, mask=at < 0))
        if failures:
            name = self._declaration.name
            errors = {int(current.good[row]): f"{name}: {text}" for row, text in failures.items()}
            place = records.schema.get_field_index(ERROR)
            records = records.set_column(place, ERROR, error_column(records.column(place), errors))
            self._context.log.warning(
                "rows without a number", rows=len(errors), first=next(iter(errors.values()))
            )
        self._rows -= total
        for group in current.groups:
            group.batch.release(group.group_id)
        versions = pa.repeat(pa.scalar(current.version, pa.int32()), total)
        versions = pc.if_else(values.is_null(), pa.scalar(None, pa.int32()), versions)
        name = self._declaration.name
        rows = records.append_column(name, values).append_column(version_column(name), versions)
        return Batch(current.groups[0].source, rows)

    def _check_deadline(self) -> None:
        wait_s = self._context.run.limits.slice_s
        if not self._waiting or self._due() or self._context.clock() - self._moved <= wait_s:
            return
        versions, group = self._known(), self._waiting[0]
        source = group.source
        version = needed(group.newest, self._context.graph.bounds.get(source), self._own)
        raise DeadlineError(
            f"'{self._context.node}' waited {wait_s:.0f} s for version {version} of"
            f" '{self._declaration.model.name}', which group {group.group_id} of '{source}' needs"
            f" (its newest token is of version {group.newest}); it has version {versions.version}"
            " and"
            f" its trainer spoke of version {versions.told} last; see that trainer's log"
        )


def _good(records: pa.RecordBatch) -> AnyArray:
    """Rows that have not failed and are not to be dropped; bool."""
    good = usable(records, (LOGPROBS, VERSIONS))
    place = records.schema.get_field_index(DROP_REASON)
    if place >= 0:
        good &= records.column(place).is_null().to_numpy(zero_copy_only=False)
    return good


def _temperature(rows: pa.RecordBatch) -> float:
    """At which a group was sampled; 0 where its rows do not say, or nothing was."""
    place = rows.schema.get_field_index(TEMPERATURE)
    return 0.0 if place < 0 else float(rows.column(place)[0].as_py() or 0.0)


def _cost(rows: pa.RecordBatch) -> int:
    """About how many tokens a group takes: what the policy wrote, and the longest of its
    prompts.
    """
    lengths = np.asarray(pc.list_value_length(rows.column(MASK)).fill_null(0))
    written = int(pc.sum(pc.list_flatten(rows.column(MASK))).as_py() or 0)
    return int(written + max(0, lengths.max(initial=0) - written // max(1, len(lengths))))


def _not_finite(query: ModelQuery, numbers_S: AnyArray) -> list[int]:
    """Sequences that have a number which is none."""
    wrong = np.flatnonzero(~np.isfinite(numbers_S))
    return np.unique(np.searchsorted(query.offsets, wrong, side="right") - 1).tolist()  # type: ignore[no-any-return]


def build(declaration: ForwardOperator, context: Context) -> ForwardRuntime:
    """Load model and tokenizer onto the device of `context`. Raises ModelError when they cannot be
    used.
    """
    if context.devices.device == "cpu":
        torch.set_num_threads(context.devices.threads)
    if context.devices.ranks > 1:
        from operators.forward_pass.ranks import led

        reading, merged, context, forward = led(declaration, context)
        return ForwardRuntime(declaration, context, reading, merged, forward)
    module, merged = load_merged(declaration.model, device=context.devices.device)
    return ForwardRuntime(
        declaration, context, reading_of(declaration, context.node, module, is_alone=True), merged
    )
