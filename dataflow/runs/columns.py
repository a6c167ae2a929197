"""Rows of text under their headings, in columns as wide as what stands in them."""

from collections.abc import Sequence

from rich.cells import cell_len

from dataflow.display.formatting import clean, fit

WIDEST = 60
"""Cells of a column; what is longer is cut."""


def in_columns(
    heads: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()
) -> list[str]:
    """A line for the headings, one for each row. right: headings of the columns that stand at the
    right of theirs.
    """
    texts = [[clean(cell) for cell in row] for row in rows]
    widths = [
        min(WIDEST, max([cell_len(head), *(cell_len(row[at]) for row in texts)]))
        for at, head in enumerate(heads)
    ]
    return ["  ".join(_cells(row, heads, widths, right)).rstrip() for row in (heads, *texts)]


def _cells(
    row: Sequence[str], heads: Sequence[str], widths: Sequence[int], right: Sequence[str]
) -> list[str]:
    return [
        " " * max(width - cell_len(cell), 0) + fit(cell, min(cell_len(cell), width))
        if head in right
        else fit(cell, width)
        for cell, head, width in zip(row, heads, widths, strict=True)
    ]
