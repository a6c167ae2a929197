"""The laws as a page of the documentation."""

from collections.abc import Iterable, Mapping

from .law import Law

HEAD = """# Laws

Each law of the design has a test whose name states it, and which fails without the code that keeps the law.
`python -m tests.laws` tries that: in a copy of the tree it breaks the code of one law after the other and runs the
test. Code is named by its symbol, `package:Name.method`, wherever below that package it stands. A quick test holds the
list to the tree: each symbol is there, its change still fits, and every test exists. `python -m tests.laws --page`
writes this page.
"""


def page(rooms: Mapping[str, Iterable[Law]]) -> str:
    """The page, a table for each part of the design."""
    parts = [HEAD]
    for room, laws in rooms.items():
        parts.append(f"\n## {room}\n\n| law | test | what is deleted | from |\n|---|---|---|---|\n")
        parts += [_row(law) for law in laws]
    return "".join(parts)


def _row(law: Law) -> str:
    cells = (law.says, f"`{law.test.removeprefix('test_')}`", law.deleted, f"`{law.symbol}`")
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"
