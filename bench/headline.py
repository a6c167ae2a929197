"""Draws the headline figures as bars: four tables of docs/figures.md become docs/figures.svg.

python -m bench.headline
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
WIDTH, MARGIN, GAP, NAME, BAR, PITCH = 880, 24, 40, 150, 12, 20
STYLE = """\
<style>.figures{font-family:Inter,'Helvetica Neue',Helvetica,Arial,sans-serif;\
max-width:100%;height:auto}
.figures .paper{fill:#fff}.figures text{fill:#1f2328;font-size:11px}\
.figures .title{font-size:13px;font-weight:600}
.figures .note{fill:#656d76;font-size:10px}.figures .name{text-anchor:end}\
.figures .other{fill:#b6bec7}
.figures .ours{fill:#0072b2}@media (prefers-color-scheme:dark){\
.figures .paper{fill:#0d1117}.figures text{fill:#e6edf3}
.figures .note{fill:#9198a1}.figures .other{fill:#485360}.figures .ours{fill:#58a6ff}}</style>"""
Table = dict[tuple[str, str], float]
"""Numbers by row and column."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One case of a table: a bar for each system."""

    title: str
    note: str
    heading: str
    """Of the section of docs/figures.md whose first table it shows."""
    case: str
    """The row, or the column, that it shows."""
    systems: Sequence[str] = ()
    """The systems in it; all when empty."""


PANELS = (
    Panel(
        title="Whole loop, rollouts/s",
        note="short answers of even length",
        heading="End to end",
        case="short answers of even length",
    ),
    Panel(
        title="Generator, tokens/s",
        note="lengths with a heavy tail, 256 rollouts at once",
        heading="Generator",
        case="the same, 256 at once",
    ),
    Panel(
        title="Trainer, tokens/s",
        note="one step, lengths with a heavy tail",
        heading="Trainer",
        case="heavy tail (median 47, 99th percentile 525 tokens)",
    ),
    Panel(
        title="New weights, GB/s",
        note="256 MiB in 300 tensors, until the generator computes with them",
        heading="Weight plane",
        case="256 MiB, 300 tensors",
        systems=(
            "memcpy, one thread",
            "ours, shared memory",
            "torch's shared tensors, copied in and out",
            "`ray.put` of numpy arrays",
            "safetensors through /dev/shm",
        ),
    ),
)


def table(page: str, heading: str) -> Table:
    """The numbers of the first table under a heading."""
    section = page.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    first = re.search(r"(?:^\|.*\|\n)+", section, re.M)
    lines = first[0].splitlines() if first else []
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    numbers = (
        (row[0], column, re.match(r"[\d.,]+", cell))
        for row in rows[2:]
        for column, cell in zip(rows[0][1:], row[1:], strict=False)
    )
    return {
        (row, column): float(number[0].replace(",", ""))
        for row, column, number in numbers
        if number
    }


def bars(numbers: Table, panel: Panel) -> list[tuple[str, float]]:
    """Systems and their numbers in a panel's case, in the table's order."""
    chosen = [
        (column if row == panel.case else row, number)
        for (row, column), number in numbers.items()
        if panel.case in (row, column)
    ]
    return [
        (system, number)
        for system, number in chosen
        if not panel.systems or system in panel.systems
    ]


def draw(page: str) -> str:
    """All panels, two in a row."""
    panels = [(panel, bars(table(page, panel.heading), panel)) for panel in PANELS]
    height = 48 + PITCH * max(len(numbers) for _, numbers in panels)
    rows = (len(panels) + 1) // 2
    total = 2 * MARGIN + rows * height - MARGIN // 2
    lines = [
        (
            '<svg xmlns="http://www.w3.org/2000/svg" class="figures" role="img" viewBox="0 0'
            f' {WIDTH} {total}" width="{WIDTH}" height="{total}">'
        ),
        f"<title>Headline figures</title>{STYLE}",
        f'<rect class="paper" width="{WIDTH}" height="{total}"/>',
    ]
    wide = (WIDTH - 2 * MARGIN - GAP) / 2
    for place, (panel, numbers) in enumerate(panels):
        x, y = MARGIN + place % 2 * (wide + GAP), MARGIN + place // 2 * height
        lines += _panel(panel, numbers, x, y, wide)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _panel(
    panel: Panel, numbers: list[tuple[str, float]], x: float, y: float, wide: float
) -> Iterator[str]:
    yield f'<text class="title" x="{x:g}" y="{y + 10:g}">{escape(panel.title)}</text>'
    yield f'<text class="note" x="{x:g}" y="{y + 25:g}">{escape(panel.note)}</text>'
    most = max(number for _, number in numbers)
    for place, (system, number) in enumerate(numbers):
        top, long = y + 34 + place * PITCH, (wide - NAME - 60) * number / most
        kind, name = ("ours" if system.startswith("ours") else "other"), _short(system)
        yield f'<text class="name" x="{x + NAME - 6:g}" y="{top + 10:g}">{escape(name)}</text>'
        yield (
            f'<rect class="{kind}" x="{x + NAME:g}" y="{top:g}" width="{long:.1f}" height="{BAR}"'
            ' rx="2"/>'
        )
        yield f'<text x="{x + NAME + long + 6:.1f}" y="{top + 10:g}">{number:,g}</text>'


def _short(system: str) -> str:
    """A system's name in the width that there is."""
    name = (
        system.replace("`", "")
        .removeprefix("transformers' ")
        .split(" of ")[0]
        .split(" through ")[0]
    )
    return name.removesuffix(", copied in and out").replace(
        "packed, prompts and prefixes once", "prefixes once"
    )


if __name__ == "__main__":
    (DOCS / "figures.svg").write_text(draw((DOCS / "figures.md").read_text()))
