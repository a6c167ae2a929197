"""A prompt group on its way through the engine: turns of episodes, what it is sampled with, its
columns when it has ended, and what is written down of one that has not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from dataflow.folder.finished import PartialRolloutFiles
from dataflow.folder.live_changes import KnobChange
from dataflow.folder.partial_rollouts import PartialRollout, PartialRow
from dataflow.records import (
    COMPLETION,
    ERROR,
    FINISH_REASON,
    GROUP_ID,
    GROUP_SIZE,
    MIN_VERSION,
    POSITION,
    RAW_COMPLETION,
    ROLLOUT_COLUMNS,
    ROLLOUT_ID,
    ROUND_SIZE,
    SAMPLING_MASK,
    TEMPERATURE,
    AnyArray,
)
from dataflow.runtime import Batch, Context
from dataflow.staleness import Bound
from dataflow.tokens.rollout_tokens import RolloutTokens
from dataflow.worker.host import in_flight
from operators.engine.build import sampling_of
from operators.engine.interface import BROKEN, STOPPED, DecodingEngine, EndedRollout
from operators.engine.sampler import Sampling
from operators.generator import GeneratorKnobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn of a rollout that an episode makes: a group of one, admitted as the group of the
    rollout.
    """

    number: int
    """By which the batch that it came with knows it."""
    queue: str
    """In which it waits to be admitted, in the order of its rollout's group."""
    seed: int
    limit: int
    """Most tokens of the conversation and the turn."""
    temperature: float | None
    """At which it is sampled; None: as the generator samples when it starts."""
    stop: tuple[str, ...] = ()
    """Strings at which it ends; none: the generator's own."""


def with_turns(bounds: Mapping[str, Bound], episodes: Iterable[str]) -> dict[str, Bound]:
    """Bounds by source and, for each queue of turns, that of the source whose rollouts they belong
    to.
    """
    turns = {
        queue_of(episode, source): bound for episode in episodes for source, bound in bounds.items()
    }
    return {**bounds, **turns}


def no_turns(queues: Iterable[str]) -> set[str]:
    """Those queues in which prompts wait, and no turns."""
    return {queue for queue in queues if "/" not in queue}


def queue_of(episode: str, source: str) -> str:
    """In which the turns of one source's rollouts wait."""
    return f"{episode}/{source}"


@dataclass(frozen=True, kw_only=True)
class SampledWith:
    """All rollouts of a group have the same."""

    sampling: Sampling
    max_tokens: int

    @classmethod
    def of(cls, declaration: GeneratorKnobs) -> SampledWith:
        """Those of a declaration."""
        return cls(sampling=sampling_of(declaration), max_tokens=declaration.max_tokens)

    @classmethod
    def over(cls, declaration: GeneratorKnobs, changes: Iterable[KnobChange]) -> list[SampledWith]:
        """Those that the run has had, newest last. declaration: with the values in force; changes:
        that led there.
        """
        settings = [cls.of(declaration)]
        for change in reversed(list(changes)):
            if change.knob in declaration.settable():
                changed = declaration.with_knob(change.knob, change.was)
                assert isinstance(changed, GeneratorKnobs), "it is the same with another value"
                declaration = changed
                settings.append(cls.of(declaration))
        return settings[::-1]

    def __str__(self) -> str:
        """For a checksum; knobs that are off leave no trace."""
        return repr([*sorted(asdict(self.sampling).items()), self.max_tokens])


REASONS = ("stop", "length", "error")
"""Finish reasons by the engine's codes."""

NOT_FINITE = (
    "the model's logits are not finite; found NaN or infinity after {} tokens; look at weights and"
    " loss"
)


@dataclass(slots=True)
class PromptGroup:
    """A prompt and its rollouts; or the conversation of an episode so far, and the policy's
    turn.
    """

    source: str
    group_id: int
    size: int
    """Rollouts."""
    min_version: int
    batch: Batch
    """That it came with."""
    row: int
    """Which row of the batch it is."""
    prompt: AnyArray
    """Tokens, int64."""
    unstarted: int
    """Rollouts that have no slot yet."""
    left: int
    """Rollouts that have not ended."""
    rows: list[EndedRollout | None] = field(default_factory=list)
    mark: int | None = None
    """Of what is on the disk of its rollouts; None where nothing is written down."""
    written: list[int] = field(default_factory=list)
    """Tokens of each completion that are on the disk."""
    written_ends: set[int] = field(default_factory=set)
    """Positions of rollouts whose end is."""
    partial: dict[int, PartialRollout] = field(default_factory=dict)
    """By position, what rollouts that have no slot yet drew in an earlier process."""
    order: list[int] = field(default_factory=list)
    """Positions that this process starts, the first ones first; none: all of them."""
    begun: int = 0
    """Rollouts that this process has started."""
    sampled: SampledWith | None = None
    """What its rollouts are sampled with; None before it is looked at."""
    turn: Turn | None = None
    """What was asked for, where it is a turn of an episode and no whole rollout."""

    @property
    def number(self) -> int:
        """By which the batch that it came with knows it."""
        return self.group_id if self.turn is None else self.turn.number

    @property
    def is_new(self) -> bool:
        """Whether no rollout of it has begun, in this process or an earlier one."""
        return not self.begun and not self.partial and not self.written_ends

    @property
    def sampling(self) -> Sampling:
        """How its tokens are drawn."""
        assert self.sampled is not None, "it was prepared"
        pinned = None if self.turn is None else self.turn.temperature
        return (
            self.sampled.sampling
            if pinned is None
            else replace(self.sampled.sampling, temperature=pinned)
        )

    def start(self, count: int) -> list[int]:
        """Positions of the next rollouts that start."""
        order = self.order or list(range(self.size))
        first = len(order) - self.unstarted
        self.unstarted -= count
        return order[first : first + count]

    def sample(self, sampled: SampledWith, seed: int) -> None:
        """Sample it with these, as it has not begun. seed: the run's."""
        self.sampled = sampled
        self.mark = None if self.mark is None else self.mark_of(seed)

    def mark_of(self, seed: int) -> int:
        """A checksum of everything but weights that its rollouts depend on: the run's seed, the
        sampling knobs, the prompt's tokens. int64.
        """
        prompt = np.ascontiguousarray(self.prompt, np.int64).tobytes()
        head = f"{seed}/{self.source}/{self.group_id}/{self.sampled}/"
        return xxhash.xxh3_64_intdigest(head.encode() + prompt) - (1 << 63)

    def go_on(self, rollouts: Mapping[int, PartialRollout]) -> None:
        """Take over rollouts that an earlier process began, by position: ended ones stay ended; the
        others continue, before new ones start.
        """
        for position, rollout in rollouts.items():
            if rollout.finish_reason is None:
                self.partial[position] = rollout
                continue
            self.rows[position] = EndedRollout(
                tokens=RolloutTokens.joined([RolloutTokens.given(self.prompt), rollout.tokens]),
                start=len(self.prompt),
                reason=REASONS.index(rollout.finish_reason),
                text=rollout.text,
            )
            self.written_ends.add(position)
            self.left -= 1
            self.unstarted -= 1
        positions = [position for position, row in enumerate(self.rows) if row is None]
        self.order = sorted(positions, key=lambda position: position not in self.partial)

    def unwritten_ends(self, least: int) -> list[tuple[int, PartialRollout]]:
        """By position, the rest of rollouts that ended; nothing as long as none of the group's has
        `least` tokens.
        """
        ended = [row for row in self.rows if row is not None]
        if not any(self.written) and all(len(row.tokens) - row.start < least for row in ended):
            return []
        ends = []
        for position, row in enumerate(self.rows):
            if row is not None and position not in self.written_ends and row.reason != BROKEN:
                self.written_ends.add(position)
                begin, reason = self.written[position], REASONS[row.reason]
                tokens = row.tokens[row.start + begin :]
                ends.append(
                    (
                        position,
                        PartialRollout(
                            begin=begin, tokens=tokens, finish_reason=reason, text=row.text
                        ),
                    )
                )
        return ends

    def fail(self, error: str) -> None:
        """End all its rollouts with this error, before any token."""
        none = EndedRollout(
            tokens=RolloutTokens.joined(()), start=0, reason=BROKEN, text="", error=error
        )
        self.rows = [none] * self.size
        self.unstarted = self.left = 0


def of_prompts(
    batch: Batch, encoded: Sequence[AnyArray | str], group_size: int
) -> Iterator[PromptGroup]:
    """A group for each prompt of a batch; one that could not be encoded has failed already.

    encoded: tokens of each, or what is wrong with it. group_size: rollouts of a prompt that does
    not say.
    """
    numbers = (
        batch.records.column(name).to_pylist() for name in (GROUP_ID, GROUP_SIZE, MIN_VERSION)
    )
    for row, (prompt, group_id, own_size, min_version) in enumerate(
        zip(encoded, *numbers, strict=True)
    ):
        size = own_size or group_size
        tokens = np.zeros(0, np.int64) if isinstance(prompt, str) else prompt
        group = PromptGroup(
            source=batch.source,
            group_id=group_id,
            size=size,
            min_version=min_version,
            batch=batch,
            row=row,
            prompt=tokens,
            unstarted=size,
            left=size,
            rows=[None] * size,
        )
        if isinstance(prompt, str):
            group.fail(prompt)
        yield group


def collect(
    ended: Sequence[EndedRollout], tickets: dict[int, tuple[PromptGroup, int]]
) -> list[PromptGroup]:
    """Give each rollout to its group; the groups that are complete by it."""
    complete = []
    for row in ended:
        group, position = tickets.pop(row.ticket)
        group.rows[position] = row
        group.left -= 1
        if not group.left:
            complete.append(group)
    return complete


def rollouts(
    groups: Sequence[PromptGroup],
    tokenizer: Any,
    ends: frozenset[int],
    *,
    optional: Collection[str] = (),
) -> pa.RecordBatch:
    """The prompts' rows of complete groups of one source, once for each rollout, with the rollout
    columns.

    ends: ids of end tokens, which are left out of the completion's text. optional: raw_completion,
    sampling_mask, or both, as columns beside.
    """
    rows = [row for group in groups for row in group.rows if row is not None]
    sizes = np.array([group.size for group in groups])
    position = np.concatenate([np.arange(size, dtype=np.int32) for size in sizes])
    group_ids = np.array([group.group_id for group in groups], dtype=np.int64)
    offsets = np.concatenate([[0], np.cumsum([len(row.tokens) for row in rows])])
    tokens = RolloutTokens.joined([row.tokens for row in rows])
    columns = tokens.columns(offsets, sampling_mask=SAMPLING_MASK in optional) | {
        ROLLOUT_ID: pa.array(np.repeat(group_ids * sizes, sizes) + position),
        POSITION: pa.array(position),
        COMPLETION: pa.array(texts_of(rows, tokenizer, ends), pa.string()),
        FINISH_REASON: pa.array([REASONS[row.reason] for row in rows], pa.string()),
        ERROR: pa.array([error_of(row) for row in rows], pa.string()),
        TEMPERATURE: pa.array(
            np.repeat([temperature_of(group) for group in groups], sizes),
            pa.float64(),
            from_pandas=True,
        ),
    }
    if RAW_COMPLETION in optional:
        written = [row.tokens.ids[row.start :] for row in rows]
        columns[RAW_COMPLETION] = pa.array(
            tokenizer.batch_decode(written, skip_special_tokens=False), pa.string()
        )
    batch = _prompt_rows(groups, sizes)
    for name in (*ROLLOUT_COLUMNS, TEMPERATURE, *optional):
        batch = batch.append_column(name, columns[name])
    return batch


def temperature_of(group: PromptGroup) -> float:
    """NaN: nothing was sampled."""
    return np.nan if group.sampled is None else group.sampling.temperature


def error_of(row: EndedRollout) -> str | None:
    """What a rollout failed by; None for one that did not."""
    if row.reason != BROKEN:
        return None
    return NOT_FINITE.format(len(row.tokens) - row.start) if row.error is None else row.error


def _prompt_rows(groups: Sequence[PromptGroup], sizes: AnyArray) -> pa.RecordBatch:
    """The rows that the groups came from, each as often as it has rollouts, with the size that they
    got.
    """
    slices = [group.batch.records.slice(group.row, 1) for group in groups]
    table = pa.Table.from_batches(slices).combine_chunks()
    batch = table.to_batches()[0].take(pa.array(np.repeat(np.arange(len(groups)), sizes)))
    at = batch.schema.get_field_index(GROUP_SIZE)
    return batch.set_column(
        at, batch.schema.field(at), pa.array(np.repeat(sizes, sizes).astype(np.int32))
    )


def texts_of(rows: Sequence[EndedRollout], tokenizer: Any, ends: frozenset[int]) -> list[str]:
    """What each rollout wrote, without its end token or stop string."""
    unsaid = [i for i, row in enumerate(rows) if row.text is None]
    to_decode = []
    for i in unsaid:
        ids = rows[i].tokens.ids[rows[i].start :]
        to_decode.append(ids[:-1] if rows[i].reason == STOPPED and ids[-1] in ends else ids)
    texts = [row.text or "" for row in rows]
    if to_decode:
        for i, text in zip(
            unsaid, tokenizer.batch_decode(to_decode, skip_special_tokens=True), strict=True
        ):
            texts[i] = text
    return texts


NEVER = np.iinfo(np.int64).max // 2
"""Tokens that no rollout comes to."""


class PartialRollouts:
    """Writes a generator's unfinished rollouts down, and finds those of earlier processes.

    consumes: the live rollouts and the ended ones of incomplete groups, by `write`; groups that
        start, by `recall`
    produces: rows on the disk; for a group that starts, what earlier processes drew of it
    waits for: the disk
    unblocked by: -

    Once in `every` decode steps it writes the rollouts that have grown by `every` tokens since they
    were last written, and the ends of those whose siblings go on. A group whose rollouts all are
    shorter costs nothing.
    """

    def __init__(
        self, files: Mapping[str, PartialRolloutFiles], *, seed: int, every: int, masks: bool
    ) -> None:
        """files: by source. every: tokens. masks: rollouts record what truncation left."""
        self.recalled = 0
        """Tokens that were not drawn again."""
        self._files, self._seed, self._every, self._masks = files, seed, every, masks
        self._steps = 0

    def recall(
        self,
        group: PromptGroup,
        sampled: Sequence[SampledWith],
        may_go_on: Callable[[PartialRollout], bool],
    ) -> None:
        """Let a group that is about to start begin with what is on the disk of it, unless it is of
        an evaluation.

        sampled: what groups of the run were sampled with, newest last; it goes on with what it had.
        may_go_on: whether a rollout that has drawn this much, or ended with it, may still be
        trained.
        """
        files = self._files.get(group.source)
        if files is None or group.batch.records.column(ROUND_SIZE)[group.row].as_py():
            return
        rows = files.find(group.group_id)
        partials: dict[int, PartialRollout] = {}
        for group.sampled in dict.fromkeys(reversed(sampled)):
            group.mark = group.mark_of(self._seed)
            for row in rows:
                has_masks = row.rollout.tokens.sampling_mask is not None
                fits = (
                    row.mark == group.mark
                    and row.position < group.size
                    and has_masks == self._masks
                )
                if fits and row.position not in partials and may_go_on(row.rollout):
                    partials[row.position] = row.rollout
            if partials:
                break
        else:
            group.sampled = sampled[-1]
            group.mark = group.mark_of(self._seed)
        group.written = [0] * group.size
        if partials:
            group.go_on(partials)
            self.recalled += sum(len(rollout.tokens) for rollout in partials.values())

    def write(self, engine: DecodingEngine, tickets: Mapping[int, tuple[PromptGroup, int]]) -> None:
        """Write down what has grown, if so many steps have passed. tickets: group and position of
        live rollouts.

        Raises RunFolderError when the disk refuses.
        """
        if engine.steps - self._steps < self._every:
            return
        self._steps = engine.steps
        rows: dict[str, list[PartialRow]] = defaultdict(list)

        def since(ticket: int) -> int:
            group, position = tickets[ticket]
            return NEVER if group.mark is None else group.written[position]

        def add(group: PromptGroup, position: int, rollout: PartialRollout) -> None:
            assert group.mark is not None, "it was asked for"
            group.written[position] = rollout.end
            rows[group.source].append(PartialRow(group.group_id, position, group.mark, rollout))

        for ticket, rollout in engine.new_tokens(since, self._every):
            add(*tickets[ticket], rollout)
        for group in {
            id(group): group for group, _ in tickets.values() if group.mark is not None
        }.values():
            for position, rollout in group.unwritten_ends(self._every):
                add(group, position, rollout)
        for source, of_source in rows.items():
            self._files[source].append(of_source)

    def forget(self, source: str, group: int) -> None:
        """The group has an outcome."""
        if source in self._files:
            self._files[source].forget(group)

    def close(self) -> None:
        """End the files that are being written."""
        for files in self._files.values():
            files.close()


def partial_rollouts_of(declaration: GeneratorKnobs, context: Context) -> PartialRollouts | None:
    """Those of a generator that has a run folder, those of earlier processes looked through."""
    folder, ledger = context.folder, context.ledger
    if folder is None or ledger is None:
        return None
    files = {
        source: PartialRolloutFiles(
            folder.finished(context.node),
            source,
            replica=context.replica,
            attempt=context.life.attempt,
            waited_for=partial(in_flight, ledger, source, folder),
        )
        for source in context.graph.columns
    }
    return PartialRollouts(
        files,
        seed=context.run.seed,
        every=declaration.segment_tokens,
        masks=declaration.records_mask,
    )
