"""A prompt group on its way through the engine, and the rollout columns made of finished ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from dataflow.folder.partial_rollouts import Stretch
from dataflow.node import Batch, Share
from dataflow.records import (
    COMPLETION,
    ERROR,
    FINISH_REASON,
    GROUP_SIZE,
    LOGPROBS,
    MASK,
    POSITION,
    ROLLOUT_COLUMNS,
    ROLLOUT_ID,
    SAMPLING_MASK,
    TOKENS,
    VERSIONS,
    AnyArray,
)
from operators.engine.reasons import BROKEN, STOPPED
from operators.engine.results import Finished

REASONS = ("stop", "length", "error")
"""Finish reasons by the engine's codes."""

NOT_FINITE = "the model's logits are not finite; found NaN or infinity after {} tokens; look at weights and loss"


@dataclass(slots=True)
class Ended:
    """One rollout that ended."""

    tokens: AnyArray
    """Prompt and completion, int32 [tokens]."""
    logprobs: AnyArray
    versions: AnyArray
    start: int
    """Tokens of the prompt."""
    reason: int
    text: str | None = None
    """The completion, where it is not simply its tokens."""
    error: str | None = None
    kept: list[AnyArray] | None = None
    """By token of the completion, the ids that truncation left, where that is recorded."""
    is_written: bool = False
    """Whether its end is among the parts on the disk."""

    def beyond(self, tokens: int) -> Stretch:
        """All that it drew after so many tokens, and why it ended."""
        new = slice(self.start + tokens, None)
        return Stretch(
            begin=tokens, tokens=self.tokens[new], logprobs=self.logprobs[new], versions=self.versions[new],
            masks=None if self.kept is None else self.kept[tokens : len(self.tokens) - self.start],
            finish_reason=REASONS[self.reason], text=self.text,
        )  # fmt: skip


class Arrival:
    """A batch of prompts, one a group, and which of them are not finished; one without any is acknowledged at once."""

    def __init__(self, batch: Batch) -> None:
        self.batch, self.share = batch, Share(batch.ack, batch.early, batch.records.num_rows)


@dataclass(slots=True)
class Group:
    """A prompt and its rollouts."""

    lane: str
    group_id: int
    size: int
    """Rollouts."""
    min_version: int
    arrival: Arrival
    row: int
    """Which row of the arrival it is."""
    prompt: AnyArray
    """Tokens, int64."""
    unstarted: int
    """Rollouts that have no slot yet."""
    left: int
    """Rollouts that have not ended."""
    rows: list[Ended | None] = field(default_factory=list)
    mark: int | None = None
    """Of its parts on the disk; None where none are kept."""
    written: list[int] = field(default_factory=list)
    """Tokens of each completion that are on the disk."""
    parts: dict[int, Stretch] = field(default_factory=dict)
    """By position, what rollouts that have no slot yet drew in an earlier process."""
    order: list[int] = field(default_factory=list)
    """Positions that this process starts, the first ones first; none: all of them."""

    def start(self, count: int) -> list[int]:
        """Positions of the next rollouts that start."""
        order = self.order or list(range(self.size))
        first = len(order) - self.unstarted
        self.unstarted -= count
        return order[first : first + count]

    def go_on(self, found: Mapping[int, Stretch]) -> None:
        """Take over rollouts that an earlier process began, by position: ended ones have ended, the others go on from
        there, and before those that begin."""
        none = np.zeros(len(self.prompt), np.float32)
        for position, part in found.items():
            if part.finish_reason is None:
                self.parts[position] = part
                continue
            self.rows[position] = Ended(
                np.concatenate([self.prompt.astype(np.int32), part.tokens]), np.concatenate([none, part.logprobs]),
                np.concatenate([np.full(len(none), -1, np.int32), part.versions]), len(none),
                REASONS.index(part.finish_reason), part.text,
                kept=None if part.masks is None else list(part.masks), is_written=True,
            )  # fmt: skip
            self.left -= 1
            self.unstarted -= 1
        left = [position for position, row in enumerate(self.rows) if row is None]
        self.order = sorted(left, key=lambda position: position not in self.parts)

    def unwritten_ends(self, least: int) -> list[tuple[int, Stretch]]:
        """By position, the rest of rollouts that ended; nothing as long as none of the group's has `least` tokens."""
        ended = [row for row in self.rows if row is not None]
        if not any(self.written) and all(len(row.tokens) - row.start < least for row in ended):
            return []
        found = []
        for position, row in enumerate(self.rows):
            if row is not None and not row.is_written and row.reason != BROKEN:
                row.is_written = True
                found.append((position, row.beyond(self.written[position])))
        return found

    def fail(self, error: str) -> None:
        """End all its rollouts with this error, before any token."""
        none = np.zeros(0, np.int32)
        self.rows = [Ended(none, none.astype(np.float32), none, 0, BROKEN, "", error)] * self.size
        self.unstarted = self.left = 0


def keep(finished: Finished, tickets: dict[int, tuple[Group, int]]) -> list[Group]:
    """Give each finished row to its group; the groups that are complete by it."""
    complete = []
    columns = zip(
        finished.tickets.tolist(),
        finished.starts.tolist(),
        finished.lengths.tolist(),
        finished.reasons.tolist(),
        strict=True,
    )
    for i, (ticket, start, length, reason) in enumerate(columns):
        group, position = tickets.pop(ticket)
        group.rows[position] = Ended(
            finished.tokens[i, :length],
            finished.logprobs[i, :length],
            finished.versions[i, :length],
            start,
            reason,
            finished.texts.get(ticket) if finished.texts else None,
            NOT_FINITE.format(length - start) if reason == BROKEN else None,
            finished.kept.get(ticket),
        )
        group.left -= 1
        if not group.left:
            complete.append(group)
    return complete


def rollouts(groups: Sequence[Group], tokenizer: Any, ends: frozenset[int], *, masks: bool = False) -> pa.RecordBatch:
    """The prompts' rows of complete groups of one lane, once for each rollout, with the rollout columns.

    ends: ids of end tokens, which are left out of the completion's text. masks: add the column sampling_mask.
    """
    rows = [row for group in groups for row in group.rows if row is not None]
    sizes = np.array([group.size for group in groups])
    position = np.concatenate([np.arange(size, dtype=np.int32) for size in sizes])
    group_ids = np.array([group.group_id for group in groups], dtype=np.int64)
    lengths = np.array([len(row.tokens) for row in rows])
    offsets = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(lengths, out=offsets[1:])
    starts = np.array([row.start for row in rows])
    place = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    made = {
        ROLLOUT_ID: pa.array(np.repeat(group_ids * sizes, sizes) + position),
        POSITION: pa.array(position),
        COMPLETION: pa.array(_texts(rows, tokenizer, ends), pa.string()),
        TOKENS: _ragged(offsets, [row.tokens for row in rows]),
        MASK: pa.ListArray.from_arrays(offsets, pa.array(place >= np.repeat(starts, lengths))),
        LOGPROBS: _ragged(offsets, [row.logprobs for row in rows]),
        VERSIONS: _ragged(offsets, [row.versions for row in rows]),
        FINISH_REASON: pa.array([REASONS[row.reason] for row in rows], pa.string()),
        ERROR: pa.array([row.error for row in rows], pa.string()),
    }
    batch = _prompt_rows(groups, sizes)
    for name in ROLLOUT_COLUMNS:
        batch = batch.append_column(name, made[name])
    return batch.append_column(SAMPLING_MASK, _masks(rows)) if masks else batch


def _masks(rows: Sequence[Ended]) -> pa.ListArray:
    """By token the ids that truncation left; null in prompts and where nothing was left out."""
    none = np.zeros(0, np.int32)
    masks: list[AnyArray] = []
    for row in rows:
        drawn = (row.kept or [])[: len(row.tokens) - row.start]
        masks += [none] * (len(row.tokens) - len(drawn)) + drawn
    lengths = np.array([len(mask) for mask in masks], dtype=np.int32)
    inner = pa.ListArray.from_arrays(
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        pa.array(np.concatenate([none, *masks]), pa.int32()),
        mask=pa.array(lengths == 0),
    )
    outer = np.concatenate([[0], np.cumsum([len(row.tokens) for row in rows])]).astype(np.int32)
    return pa.ListArray.from_arrays(outer, inner)


def _prompt_rows(groups: Sequence[Group], sizes: AnyArray) -> pa.RecordBatch:
    """The rows that the groups came from, each as often as it has rollouts, with the size that they got."""
    slices = [group.arrival.batch.records.slice(group.row, 1) for group in groups]
    table = pa.Table.from_batches(slices).combine_chunks()
    batch = table.to_batches()[0].take(pa.array(np.repeat(np.arange(len(groups)), sizes)))
    at = batch.schema.get_field_index(GROUP_SIZE)
    return batch.set_column(at, batch.schema.field(at), pa.array(np.repeat(sizes, sizes).astype(np.int32)))


def _ragged(offsets: AnyArray, rows: list[AnyArray]) -> pa.ListArray:
    return pa.ListArray.from_arrays(offsets, pa.array(np.concatenate(rows)))


def _texts(rows: Sequence[Ended], tokenizer: Any, ends: frozenset[int]) -> list[str]:
    """What each rollout wrote, without its end token or stop string."""
    unsaid = [i for i, row in enumerate(rows) if row.text is None]
    wanted = []
    for i in unsaid:
        ids = rows[i].tokens[rows[i].start :]
        wanted.append(ids[:-1] if rows[i].reason == STOPPED and ids[-1] in ends else ids)
    texts = [row.text or "" for row in rows]
    if wanted:
        for i, text in zip(unsaid, tokenizer.batch_decode(wanted, skip_special_tokens=True), strict=True):
            texts[i] = text
    return texts
