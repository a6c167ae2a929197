"""Rows that go on later: those that gave their pages up to others, and those that an earlier
process began.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import numpy as np

from dataflow.folder.partial_rollouts import PartialRollout
from dataflow.records import AnyArray
from operators.engine.pages import Pages, pages_for
from operators.engine.results import Row
from operators.engine.rows import Rows
from operators.models.errors import ModelError


class Parked:
    """Rows outside the batch, oldest first; each continues with a prefix that is computed again."""

    def __init__(self) -> None:
        self._rows: list[Row] = []

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def add(self, rows: Iterable[Row]) -> None:
        """More of them."""
        self._rows = sorted([*self._rows, *rows], key=lambda row: row.age)

    def due(self, rows: Rows, pages: Pages) -> Iterator[Row]:
        """The rows that continue in this step, as far as slots and pages reach. Each is released
        here; the caller takes its pages before the next. rows: the batch, which they join together.

        rows: the batch, which they join all at once.
        """
        count = 0
        while self._rows and rows.n + count < rows.slots:
            needed = pages_for(len(self._rows[0].tokens) + 1)
            if needed > pages.available - rows.n - count and (rows.n or count):
                return
            count += 1
            yield self._rows.pop(0)

    def take_out(self, tickets: Collection[int]) -> list[Row]:
        """Remove and return the rows of these tickets."""
        gone = [row for row in self._rows if row.ticket in tickets]
        self._rows = [row for row in self._rows if row.ticket not in tickets]
        return gone

    def new_tokens(
        self, since: Callable[[int], int], least: int
    ) -> list[tuple[int, PartialRollout]]:
        """As `Engine.new_tokens`, of these."""
        partials = []
        for row in self._rows:
            begin = since(row.ticket)
            if len(row.tokens) - row.start - begin >= least:
                partials.append(
                    (
                        row.ticket,
                        PartialRollout(begin=begin, tokens=row.tokens[row.start + begin :]),
                    )
                )
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
