"""Rows outside the batch, which wait for pages or whose prompt is being computed, and which of the
batch are parked where pages run out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dataflow.folder.partial_rollouts import PartialRollout
from dataflow.records import AnyArray
from operators.engine.interface import Row
from operators.engine.pages import PAGE, Pages, Prefix, pages_for
from operators.engine.rows import Rows
from operators.models.folders import ModelError


@dataclass
class Filling:
    """A prefix that is computed over several steps, for rows that begin with it."""

    prefix: Prefix
    """What is left of it."""
    rows: list[Row]
    is_pure: bool = True
    """Whether all of it comes from the weights that the model has now."""


class Parked:
    """Rows outside the batch, oldest first: alone, or in groups that begin with the same prompt;
    each begins, or continues with a prefix that is computed again.
    """

    def __init__(self, rows: Rows, pages: Pages, *, most: int, copies: bool) -> None:
        """None yet. They join `rows` when their prefixes are computed, at most so many tokens in a
        step.

        copies: whether what begins a page is copied from another one that begins alike.
        """
        self._rows, self._pages, self._most, self._copies = rows, pages, most, copies
        self._groups: list[list[Row]] = []
        self._filling: Filling | None = None
        self._lent: list[int] = []

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[Row]:
        filling = [] if self._filling is None else self._filling.rows
        return itertools.chain(filling, *self._groups)

    def add(self, rows: Iterable[Row]) -> None:
        """More of them, each alone."""
        self._add([row] for row in rows)

    def parts(self, groups: list[list[Row]]) -> tuple[list[Prefix], list[Row], AnyArray]:
        """Prefixes that are computed in this step, the last one maybe in part; the rows that begin
        behind them; and of each, whether all of its prefix comes from the weights of now.

        groups: rows of the same tokens, for which there is room; those that come later are parked.
        """
        new: list[Prefix] = []
        rows: list[Row] = []
        is_pure: list[bool] = []
        left, groups = self._most, list(groups)
        while left >= PAGE:
            if self._filling is None:
                group = self._next(len(rows))
                if group is None and not self._groups and groups:
                    group = groups.pop(0)
                if group is None:
                    break
                self._filling = Filling(self._prefix(group), group)
            filling = self._filling
            part, rest = filling.prefix.cut(left)
            new.append(part)
            left -= part.new
            if rest is not None:
                filling.prefix = rest
                break
            if filling.is_pure:
                self._pages.remember(part.tokens, part.tables[0])
            rows += filling.rows
            is_pure += [filling.is_pure] * len(filling.rows)
            self._filling = None
        self._add(groups)
        return new, rows, np.array(is_pure, bool)

    def computed(self) -> None:
        """The parts of this step have been: pages of which they took copies may go."""
        self._pages.release(self._lent)
        self._lent = []

    def outdate(self) -> None:
        """The weights have changed."""
        if self._filling is not None:
            self._filling.is_pure = False

    def unfill(self) -> None:
        """Give back the pages of a prompt that is being computed: it is begun again."""
        if self._filling is not None:
            rows = self._filling.rows
            self._empty({row.ticket for row in rows})
            self._add([rows])

    def take_out(self, tickets: Collection[int]) -> list[Row]:
        """Remove and return the rows of these tickets."""
        gone = [row for row in self if row.ticket in tickets]
        groups = [[row for row in group if row.ticket not in tickets] for group in self._groups]
        self._groups = [group for group in groups if group]
        self._empty(tickets)
        return gone

    def _add(self, groups: Iterable[list[Row]]) -> None:
        self._groups = sorted([*self._groups, *groups], key=lambda group: group[0].age)

    def _next(self, joining: int) -> list[Row] | None:
        """The rows that continue next, as far as slots and pages reach, while so many others join
        the batch; they are released here.
        """
        if not self._groups:
            return None
        group, taken = self._groups[0], self._rows.n + joining
        needed = len(group[0].tokens) // PAGE + len(group)
        if taken + len(group) > self._rows.slots or (
            taken and needed > self._pages.available - taken
        ):
            return None
        return self._groups.pop(0)

    def _prefix(self, rows: Sequence[Row]) -> Prefix:
        """Pages for rows that begin with the same tokens: known ones, shared new ones, each row's
        own.
        """
        pages, tokens = self._pages, rows[0].tokens.ids.astype(np.int64)
        cached = pages.find(tokens)
        pages.share(cached)
        whole = len(tokens) // PAGE
        fresh, own = whole - len(cached), pages_for(len(tokens)) - whole
        near, alike = -1, 0
        if self._copies and pages.available > fresh + own * len(rows):
            near, alike = pages.near(tokens, len(cached))
        if alike:
            pages.share([near])
            self._lent.append(near)
        common = cached + pages.take(fresh)
        pages.share(common, len(rows) - 1)
        tables = [common + pages.take(own) for _ in rows]
        return Prefix(tokens=tokens, cached=len(cached), tables=tables, near=near, alike=alike)

    def _empty(self, tickets: Collection[int]) -> None:
        """Take rows of these tickets, and their pages, out of a prompt that is being computed."""
        if self._filling is None:
            return
        rows, tables = self._filling.rows, self._filling.prefix.tables
        stays = [i for i, row in enumerate(rows) if row.ticket not in tickets]
        for i in set(range(len(rows))).difference(stays):
            self._pages.release(tables[i])
        prefix = replace(self._filling.prefix, tables=[tables[i] for i in stays])
        left = Filling(prefix, [rows[i] for i in stays], self._filling.is_pure)
        self._filling = left if stays else None


def new_tokens_of(
    rows: Iterable[Row], since: Callable[[int], int], least: int
) -> list[tuple[int, PartialRollout]]:
    """As `Engine.new_tokens`, of rows outside the batch."""
    partials = []
    for row in rows:
        begin = since(row.ticket)
        if len(row.tokens) - row.start - begin >= least:
            tokens = row.tokens[row.start + begin :]
            partials.append((row.ticket, PartialRollout(begin=begin, tokens=tokens)))
    return partials


def to_park(rows: Rows, pages: Pages, page_count: int) -> AnyArray:
    """Rows to be parked so that so many pages come free, int [k]. Raises ModelError where one row
    alone holds all.
    """
    owned = [sum(pages.holders(page) == 1 for page in row_pages) for row_pages in rows.pages]
    chosen = youngest(rows.age[: rows.n].tolist(), owned, page_count)
    if not chosen:
        raise ModelError(
            f"one row has outgrown the KV-cache of {pages.count} pages; lower its limit"
        )
    return np.array(chosen)


def youngest(ages: Sequence[int], owned: Sequence[int], missing: int) -> list[int]:
    """Rows to park so that at least `missing` pages come free: the youngest first, never the oldest
    of all.

    ages: by row, larger for rows that started later. owned: pages that only this row holds.
    """
    order = sorted(range(len(ages)), key=lambda row: -ages[row])
    chosen: list[int] = []
    for row in order[:-1]:
        if missing <= 0:
            break
        chosen.append(row)
        missing -= owned[row]
    return chosen
