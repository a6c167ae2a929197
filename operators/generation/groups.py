"""A prompt group on its way through the engine, and the rollout columns made of finished ones."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from dataflow.folder.partial_rollouts import PartialRollout
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
    SAMPLING_MASK,
    TEMPERATURE,
    AnyArray,
)
from dataflow.runtime import Batch
from dataflow.tokens.rollout_tokens import RolloutTokens
from operators.engine.finish_reasons import BROKEN, STOPPED
from operators.engine.results import EndedRollout
from operators.engine.sampling_params import Sampling
from operators.generation.sampled_with import SampledWith
from operators.generation.turns import Turn

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
