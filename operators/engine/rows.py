"""The live rows of the batch: what each is at, column by column, and what each has drawn, slot by
slot.

Columns stand in row order (0 .. n-1), which is kept when rows leave, so that the rows of a group
stay neighbours. Tables stand by slot, and a row keeps its slot. Axes: S slots, n live rows, T
positions, W pages of a row.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from dataflow.folder.partial_rollouts import PartialRollout
from dataflow.records import AnyArray
from dataflow.tokens.rollout_tokens import RolloutTokens, SamplingMask
from operators.engine.interface import BROKEN, STOPPED, TOO_LONG, EndedRollout, Row
from operators.engine.pages import PAGE, Prefix, pages_for
from operators.engine.sampler import (
    KNOBS,
    DrawKind,
    RowSampling,
    Sampling,
    kind_of,
    knob_columns,
)
from operators.engine.stop_strings import StopStrings

FIRST_TOKENS = 32
"""Positions per slot that the tables begin with."""

MOST_DISTINCT = 0.9
"""Share of the live rows up to which those that are alike are computed once."""

_SLOT, _LENGTH, _START, _LIMIT, _SEED, _LAST = range(6)


class FrontRows(NamedTuple):
    """Some rows on the device, from the first on, at addresses that stay."""

    last: torch.Tensor
    """Newest tokens, int64 [n]."""
    positions: torch.Tensor
    """Where they stand, int64 [n]."""
    table: torch.Tensor
    """Pages, int32 [n, W]."""
    seeds: torch.Tensor
    drawn: torch.Tensor
    """Tokens drawn, int64 [n]."""
    knobs: torch.Tensor
    """How the next one is drawn, float64 [KNOBS, n]."""


class Rows:
    """State of up to S rows; `n` are live."""

    def __init__(
        self, slots: int, context_tokens: int, device: torch.device, *, ahead: int | None = None
    ) -> None:
        """No rows yet; tables grow up to `context_tokens` positions, or have that size from the
        start, and room for so many tokens `ahead`, where that is given.
        """
        fixed, room = ahead is not None, slots + (ahead or 0)
        self.n = 0
        self.slots = slots
        self.device = device
        self._context_tokens = context_tokens
        self._tokens_wide = (
            pages_for(context_tokens + 1) * PAGE if fixed else min(context_tokens, FIRST_TOKENS)
        )
        self._columns = torch.zeros(6, room, dtype=torch.int64, device=device)
        self._host = np.zeros((6, slots), np.int64)
        self._knobs = np.ones((len(KNOBS), slots))
        self._knobs_there = torch.ones(len(KNOBS), slots, dtype=torch.float64, device=device)
        self.ticket = np.zeros(slots, np.int64)
        self.age = np.zeros(slots, np.int64)
        self.alike = np.zeros(slots, np.int64)
        """By row, a number that rows have in common whose tokens and cached keys and values are the
        same."""
        self.pages: list[list[int]] = []
        self._held = np.zeros(slots, np.int64)
        self.goes_on = np.zeros(slots, bool)
        """By row, as of `PromptStart`."""
        self.is_pure = np.zeros(slots, bool)
        """By row, whether all its keys and values are of the weights that the model has now."""
        self.sampling: list[Sampling] = []
        self.stop: list[StopStrings | None] = []
        self.masks: list[list[AnyArray] | None] = []
        """By row, what truncation left at each token of its completion; None where that is not
        recorded."""
        self._free = list(range(slots - 1, -1, -1))
        self._tokens = self._made(torch.int32)
        self._logprobs = self._made(torch.float32)
        self._versions = self._made(torch.int32)
        self._seen: torch.Tensor | None = None
        self._table = np.zeros((slots, pages_for(self._tokens_wide)), np.int32)
        wide = self._table.shape[1]
        self._table_there = torch.zeros(room, wide, dtype=torch.int32, device=device)
        self._runs: tuple[torch.Tensor, torch.Tensor] | None = None
        self._sampled: RowSampling | None = None

    @property
    def lengths(self) -> AnyArray:
        """Tokens of each live row, known without asking the device, int64 [n]."""
        return self._host[_LENGTH, : self.n]

    @property
    def starts(self) -> AnyArray:
        """Tokens of each live row's prompt, int64 [n]."""
        return self._host[_START, : self.n]

    @property
    def limits(self) -> AnyArray:
        """Most tokens of each live row, int64 [n]."""
        return self._host[_LIMIT, : self.n]

    @property
    def held(self) -> AnyArray:
        """Pages of each live row, int64 [n]."""
        return self._held[: self.n]

    @property
    def longest(self) -> int:
        """Tokens of the longest live row."""
        return int(self.lengths.max(initial=0))

    @property
    def last(self) -> torch.Tensor:
        """The newest token of each live row, int64 [n], on the device."""
        return self._columns[_LAST, : self.n]

    @property
    def positions(self) -> torch.Tensor:
        """Where it stands, int64 [n], on the device."""
        return self._columns[_LENGTH, : self.n] - 1

    @property
    def table(self) -> torch.Tensor:
        """Pages of the live rows, int32 [n, W], on the device."""
        return self._table_there[: self.n]

    def sampled(self, first: int = 0) -> RowSampling:
        """How the next tokens of the rows from `first` on are drawn."""
        if first:
            knobs = self._knobs_there[:, first : self.n]
            return RowSampling.by(knobs, kind_of(self._knobs[:, first : self.n]))
        if self._sampled is None:
            self._sampled = RowSampling.by(
                self._knobs_there[:, : self.n], kind_of(self._knobs[:, : self.n])
            )
        return self._sampled

    @property
    def kind(self) -> DrawKind:
        """What the next tokens of all rows need of a draw."""
        return self.sampled().kind

    def draws(self, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Seeds, and how many tokens each row from `first` on has drawn, int64 [n] each."""
        live = self._columns[:, first : self.n]
        return live[_SEED], live[_LENGTH] - live[_START]

    def seen(self, vocabulary: int, first: int = 0) -> torch.Tensor | None:
        """Which tokens each row from `first` on has had, bool [n, V]; None where no row's sampling
        asks.
        """
        if not self.sampled(first).kind.repetition_penalty:
            return None
        if self._seen is None:
            self._seen = torch.zeros(self.slots, vocabulary, dtype=torch.bool, device=self.device)
            for row in range(self.n):
                self._see(row, vocabulary)
        return self._seen[self._columns[_SLOT, first : self.n]]

    def runs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Where runs of rows with common full pages begin, and the end, int32 [r + 1]; how many
        pages, int32 [r].
        """
        if self._runs is None:
            self._runs = self.runs_of(np.arange(self.n))
        return self._runs

    def runs_of(self, rows: AnyArray) -> tuple[torch.Tensor, torch.Tensor]:
        """The same of some rows, int [m], ascending, as if they were all."""
        full = (self.starts[rows] // PAGE).astype(np.int32)
        table, count = self._table[rows], len(rows)
        same = (table[1:] == table[:-1]).cumprod(axis=1).sum(axis=1) if count else np.zeros(0)
        joined = (same >= full[1:]) & (full[1:] == full[:-1]) & (full[1:] > 0)
        begin = np.nonzero(np.concatenate([[True], ~joined]))[0]
        size = np.diff(np.append(begin, count))
        shared = np.where(size > 1, full[begin], 0) if count else full[:0]
        bounds = np.append(begin, count) if count else np.zeros(1)
        return self._put(bounds.astype(np.int32)), self._put(shared.astype(np.int32))

    def distinct(self) -> tuple[AnyArray, AnyArray] | None:
        """The first row of each kind that is `alike`, int64 [d], ascending, and the place in it of
        every live row's kind, int64 [n]; None where nearly all rows differ, so that bookkeeping
        would cost more than it saves.
        """
        kinds, first, kind = np.unique(self.alike[: self.n], return_index=True, return_inverse=True)
        if len(kinds) > MOST_DISTINCT * self.n:
            return None
        order = np.argsort(first)
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        return first[order], place[kind]

    def tell_apart(self, tokens: AnyArray) -> None:
        """Mark rows, int64 [n], as different: they were alike until they drew different tokens."""
        _, self.alike[: self.n] = np.unique(
            self.alike[: self.n] * (int(tokens.max(initial=0)) + 1) + tokens, return_inverse=True
        )

    def written(self, rows: AnyArray) -> tuple[torch.Tensor, torch.Tensor]:
        """Page, and place within it, of the newest token of these rows, int64 [m] each."""
        at = self.lengths[rows] - 1
        pages = self._table[rows, at // PAGE].astype(np.int64)
        return self._put(pages), self._put(at % PAGE)

    def add(
        self,
        rows: Sequence[Row],
        pages: Sequence[list[int]],
        alike: AnyArray | None = None,
        is_pure: bool | AnyArray = True,
    ) -> None:
        """Put rows at the end of the batch: their tokens so far, their pages; alike, int64 [rows]:
        those with equal numbers have the same tokens, keys and values; None: no two have.
        """
        first, count = self.n, len(rows)
        lengths = np.array([len(row.tokens) for row in rows])
        self._widen(int(lengths.max()) + 1)
        slots = [self._free.pop() for _ in rows]
        new = slice(first, first + count)
        self._host[:, new] = np.array(
            [
                slots,
                lengths.tolist(),
                [row.start for row in rows],
                [row.limit for row in rows],
                [row.seed for row in rows],
                [0] * count,
            ],
            dtype=np.int64,
        )
        self._columns[:, new] = self._put(self._host[:, new])
        self._knobs[:, new] = knob_columns([row.sampling for row in rows])
        self._knobs_there[:, new] = self._put(self._knobs[:, new])
        self.ticket[new] = [row.ticket for row in rows]
        self.age[new] = [row.age for row in rows]
        self.is_pure[new] = is_pure
        self.alike[new] = (
            self.alike[:first].max(initial=-1) + 1 + (np.arange(count) if alike is None else alike)
        )
        longest = int(lengths.max())
        at = self._put(np.array(slots))
        for table, columns, dtype in (
            (self._tokens, [row.tokens.ids for row in rows], np.int32),
            (self._logprobs, [row.tokens.logprobs for row in rows], np.float32),
            (self._versions, [row.tokens.versions for row in rows], np.int32),
        ):
            padded = np.zeros((count, longest), dtype)
            for i, column in enumerate(columns):
                padded[i, : len(column)] = column
            table[at, :longest] = self._put(padded)
        for i, row in enumerate(rows):
            self.pages.append(pages[i])
            self._table[first + i, : len(pages[i])] = pages[i]
            self._held[first + i] = len(pages[i])
            self.goes_on[first + i] = row.goes_on
            self.sampling.append(row.sampling)
            self.stop.append(row.stop)
            mask = row.tokens.sampling_mask
            self.masks.append(None if mask is None else mask[row.start :].lists())
        self.n += count
        if self._seen is not None:
            for i in range(first, self.n):
                self._see(i, self._seen.shape[1])
        self._table_there[new] = self._put(self._table[new])
        self._runs = self._sampled = None

    def front(self, count: int) -> FrontRows:
        """The first `count` rows, and tokens that stand ahead behind the live ones."""
        first = self._columns[:, :count]
        length = first[_LENGTH]
        return FrontRows(
            first[_LAST],
            length - 1,
            self._table_there[:count],
            first[_SEED],
            length - first[_START],
            self._knobs_there[:, :count],
        )

    def lay_ahead(self, prefixes: Sequence[Prefix]) -> int:
        """Let the new tokens of these stand as rows behind the live ones; how many rows there are
        then.
        """
        counts = [prefix.new for prefix in prefixes]
        ahead = slice(self.n, self.n + sum(counts))
        wide = max(len(prefix.tables[0]) for prefix in prefixes)
        pages = np.zeros((len(prefixes), wide), np.int32)
        for i, prefix in enumerate(prefixes):
            pages[i, : len(prefix.tables[0])] = prefix.tables[0]
        lengths = [np.arange(prefix.begin, len(prefix.tokens)) + 1 for prefix in prefixes]
        tokens = [prefix.tokens[prefix.begin :] for prefix in prefixes]
        columns = self._put(np.stack([np.concatenate(lengths), np.concatenate(tokens)]))
        self._columns[_LENGTH, ahead], self._columns[_LAST, ahead] = columns
        origin = self._put(np.repeat(np.arange(len(prefixes)), counts))
        self._table_there[ahead, :wide] = self._put(pages)[origin]
        return ahead.stop

    def fill(self, begin: int, end: int, page: int) -> None:
        """Let the rows from `begin` to before `end`, which are not live, stand at position 0 of
        `page`.
        """
        self._columns[:, begin:end] = 0
        self._columns[_LENGTH, begin:end] = 1
        self._table_there[begin:end, 0] = page

    def give_page(self, row: int, page: int) -> None:
        """Append a page to a row; `place_pages` copies that to the device."""
        at = len(self.pages[row])
        self._widen((at + 1) * PAGE)
        self.pages[row].append(page)
        self._table[row, at] = page
        self._held[row] = at + 1

    def place_pages(self, rows: AnyArray) -> None:
        """Bring the pages of these rows onto the device."""
        self._table_there[self._put(rows)] = self._put(self._table[rows])

    def drew(self, tokens: torch.Tensor, logprobs: torch.Tensor, version: int) -> None:
        """Every live row is one token longer: tokens int64 [n], their log-probabilities [n], drawn
        from `version`.
        """
        self._widen(self.longest + 1)
        live = self._columns[:, : self.n]
        at = live[_SLOT] * self._tokens_wide + live[_LENGTH]
        self._tokens.view(-1).index_copy_(0, at, tokens.int())
        self._logprobs.view(-1).index_copy_(0, at, logprobs)
        self._versions.view(-1).index_fill_(0, at, version)
        if self._seen is not None:
            self._seen.view(-1).index_fill_(0, live[_SLOT] * self._seen.shape[1] + tokens, True)
        live[_LAST] = tokens
        live[_LENGTH] += 1
        self._host[_LENGTH, : self.n] += 1

    def note_masks(self, left_mask: torch.Tensor | None, first: int = 0) -> None:
        """Note which tokens truncation left in the newest draw of the rows from `first` on, bool
        [n, V]; None: all of them.
        """
        none: AnyArray = np.zeros(0, np.int32)
        row_masks = [none] * (self.n - first)
        if left_mask is not None:
            counts = left_mask.sum(-1).cpu().numpy()
            ids = left_mask.nonzero()[:, 1].int().cpu().numpy()
            parts = np.split(ids, np.cumsum(counts)[:-1])
            row_masks = [none if len(part) == left_mask.shape[1] else part for part in parts]
        for masks, mask in zip(self.masks[first:], row_masks, strict=True):
            if masks is not None:
                masks.append(mask)

    def drawn(self, rows: AnyArray) -> tuple[AnyArray, AnyArray, AnyArray]:
        """Tokens, log-probabilities and versions of these rows, [k, longest of them], from the
        device.
        """
        longest = int(self.lengths[rows].max(initial=0))
        at = self._put(self._host[_SLOT, rows])
        return tuple(
            table[at, :longest].cpu().numpy()
            for table in (self._tokens, self._logprobs, self._versions)
        )  # type: ignore[return-value]

    def between(
        self, rows: AnyArray, first: AnyArray, end: AnyArray
    ) -> tuple[AnyArray, AnyArray, AnyArray]:
        """What `drawn` gives, from `first` [k] to before `end` [k] of these rows only, one after
        the other, flat.
        """
        counts = end - first
        places = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts - first, counts)
        at = self._put(np.repeat(self._host[_SLOT, rows], counts) * self._tokens_wide + places)
        tables = self._tokens, self._logprobs, self._versions
        return tuple(table.view(-1)[at].cpu().numpy() for table in tables)  # type: ignore[return-value]

    def taken(self, rows: AnyArray) -> list[Row]:
        """Copies of these rows, complete."""
        return [
            Row(
                ticket=int(self.ticket[row]),
                age=int(self.age[row]),
                tokens=tokens,
                start=int(self.starts[row]),
                limit=int(self.limits[row]),
                seed=int(self._host[_SEED, row]),
                sampling=self.sampling[row],
                stop=self.stop[row],
                goes_on=bool(self.goes_on[row]),
            )
            for row, tokens in zip(
                rows.tolist(), self.rollouts(rows, self.drawn(rows)), strict=True
            )
        ]

    def rollouts(
        self,
        rows: AnyArray,
        drawn: tuple[AnyArray, ...],
        places: AnyArray | None = None,
        cut: AnyArray | int = 0,
    ) -> list[RolloutTokens]:
        """Copies of all tokens of these rows but the last `cut` of each.

        drawn: what `drawn` gives of them, or of others; places: then where these stand in it, int
        [k].
        """
        places = np.arange(len(rows)) if places is None else places
        rollouts = []
        for row, place, length in zip(
            rows.tolist(), places, (self.lengths[rows] - cut).tolist(), strict=True
        ):
            start, masks = int(self.starts[row]), self.masks[row]
            mask = None if masks is None else SamplingMask.of(masks[: length - start], before=start)
            ids, logprobs, versions = (table[place, :length].copy() for table in drawn)
            rollouts.append(
                RolloutTokens(ids, np.arange(length) >= start, logprobs, versions, mask)
            )
        return rollouts

    def ended(
        self, at: AnyArray, ends: AnyArray, behind: int = 0
    ) -> tuple[AnyArray, list[EndedRollout]]:
        """Which of the rows `at` have ended, and what they wrote; rows that only might have hit a
        stop string do not count.

        ends: tokens that end a row, bool [V]. behind: tokens that these rows have drawn since,
        which are cut off.
        """
        lengths, starts = self.lengths[at] - behind, self.starts[at].copy()
        tickets = self.ticket[at]
        drawn = self.drawn(at)
        tokens, logprobs, _ = drawn
        last = np.arange(len(at)), lengths - 1
        broken = ~np.isfinite(logprobs[last])
        stopped = ends[tokens[last]] & ~broken
        too_long = lengths >= self.limits[at]
        texts: dict[int, str] = {}
        for i in np.nonzero(~broken & ~stopped)[0]:
            stop = self.stop[at[i]]
            text = stop.find(tokens[i, starts[i] : lengths[i]]) if stop is not None else None
            if text is not None:
                texts[int(i)] = text
                stopped[i] = True
        ended = np.nonzero(broken | stopped | too_long)[0]
        reasons = np.where(broken, BROKEN, np.where(stopped, STOPPED, TOO_LONG))
        written = self.rollouts(at[ended], drawn, ended, behind + broken[ended])
        return at[ended], [
            EndedRollout(
                ticket=int(tickets[i]),
                tokens=tokens,
                start=int(starts[i]),
                reason=int(reasons[i]),
                text=texts.get(i),
            )
            for i, tokens in zip(ended.tolist(), written, strict=True)
        ]

    def new_tokens(
        self, behind: int, since: Callable[[int], int], least: int
    ) -> list[tuple[int, PartialRollout]]:
        """By ticket, the tokens beyond the first `since(ticket)` of a completion, where they are
        `least` or more.

        behind: newest tokens of each row in the batch that may come after its end, and are left
        out.
        """
        counts = self.lengths - self.starts - behind
        at = np.nonzero(counts >= least)[0]
        firsts = np.array([since(ticket) for ticket in self.ticket[at].tolist()], np.int64)
        due = counts[at] - firsts >= least
        at, firsts = at[due], firsts[due]
        if not len(at):
            return []
        starts = self.starts[at]
        tokens, logprobs, versions = self.between(at, starts + firsts, starts + counts[at])
        bounds = np.concatenate([[0], np.cumsum(counts[at] - firsts)]).tolist()
        partials = []
        for row, begin, (first, end) in zip(
            at.tolist(), firsts.tolist(), itertools.pairwise(bounds), strict=True
        ):
            masks, cut = self.masks[row], slice(first, end)
            mask = None if masks is None else SamplingMask.of(masks[begin : begin + end - first])
            drawn = RolloutTokens.drawn(tokens[cut], logprobs[cut], versions[cut], mask)
            partials.append((int(self.ticket[row]), PartialRollout(begin=begin, tokens=drawn)))
        return partials

    def remove(self, rows: AnyArray) -> list[list[int]]:
        """Take rows out of the batch; the others close up in their order. Returns the pages they
        held.
        """
        stays = np.ones(self.n, bool)
        stays[rows] = False
        keep, count = np.nonzero(stays)[0], int(stays.sum())
        self._free += self._host[_SLOT, rows].tolist()
        pages = [self.pages[row] for row in rows.tolist()]
        for name in ("pages", "sampling", "stop", "masks"):
            column = getattr(self, name)
            setattr(self, name, [column[row] for row in keep.tolist()])
        keep_on_device = self._put(keep)
        self._columns[:, :count] = self._columns[:, keep_on_device]
        self._knobs_there[:, :count] = self._knobs_there[:, keep_on_device]
        self._table_there[:count] = self._table_there[keep_on_device]
        self._host[:, :count] = self._host[:, keep]
        self._knobs[:, :count] = self._knobs[:, keep]
        self._table[:count] = self._table[keep]
        by_rows = self.ticket, self.age, self.alike, self._held, self.goes_on, self.is_pure
        for by_row in by_rows:
            by_row[:count] = by_row[keep]
        self.n = count
        self._runs = self._sampled = None
        return pages

    def _see(self, row: int, vocabulary: int) -> None:
        assert self._seen is not None
        slot, length = int(self._host[_SLOT, row]), int(self.lengths[row])
        self._seen[slot] = False
        self._seen[slot, self._tokens[slot, :length].long().clamp(max=vocabulary - 1)] = True

    def _widen(self, tokens: int) -> None:
        """Make room for rows of this many tokens."""
        if tokens > self._tokens_wide:
            self._tokens_wide = max(tokens, min(self._context_tokens, 2 * self._tokens_wide))
            for name in ("_tokens", "_logprobs", "_versions"):
                old = getattr(self, name)
                new = self._made(old.dtype)
                new[:, : old.shape[1]] = old
                setattr(self, name, new)
        wide = pages_for(self._tokens_wide)
        if wide > self._table.shape[1]:
            more = wide - self._table.shape[1]
            self._table = np.pad(self._table, ((0, 0), (0, more)))
            self._table_there = torch.nn.functional.pad(self._table_there, (0, more))
            self._runs = None

    def _made(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(self.slots, self._tokens_wide, dtype=dtype, device=self.device)

    def _put(self, values: AnyArray) -> torch.Tensor:
        return put(values, self.device)


def put(values: AnyArray, device: torch.device) -> torch.Tensor:
    """An array on the device, without waiting for what the device does now."""
    dense = torch.from_numpy(np.ascontiguousarray(values))
    return (
        dense.pin_memory().to(device, non_blocking=True)
        if device.type == "cuda"
        else dense.to(device)
    )
