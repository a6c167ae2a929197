"""The laws as a page of the documentation."""

from collections.abc import Iterable, Mapping

from .law import Law

HEAD = """# Laws

What the engine guarantees, and the test to read for each guarantee. Each law's test states it in
its name and fails without the code that keeps the law. To try that, run `python -m tests.laws`:
in a copy of the tree it breaks the code of one law after the other, at the symbol
`package:Name.method` wherever below that package it is, and runs the test. A quick test checks
that each symbol and test exists and each change still fits. `python -m tests.laws --page` writes
this page.
"""


def page(rooms: Mapping[str, Iterable[Law]]) -> str:
    """The page, a table for each part of the design."""
    parts = [HEAD]
    for room, laws in rooms.items():
        parts.append(f"\n## {room}\n\n| law | test | broken at |\n|---|---|---|\n")
        parts += dict.fromkeys(_row(law) for law in laws)
    return "".join(parts)


def _row(law: Law) -> str:
    cells = (law.says, f"`{law.test.removeprefix('test_')}`", f"`{law.symbol}`")
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"
