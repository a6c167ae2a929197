"""The laws as a page of the documentation."""

from collections.abc import Iterable, Mapping

from .law import Law

HEAD = """# Laws

Find here what the engine guarantees, and the test that states each guarantee. `tests/laws/` names
the symbol of the code that keeps it: `python -m tests.laws` breaks one after the other in a copy of
the tree, and its test must fail. `python -m tests.laws --page` writes this page.
"""


def page(rooms: Mapping[str, Iterable[Law]]) -> str:
    """The page, a list for each part of the design: a law and its tests."""
    parts = [HEAD]
    for room, laws in rooms.items():
        tests: dict[str, dict[str, None]] = {}
        for law in laws:
            tests.setdefault(law.says, {})[f"`{law.test.removeprefix('test_')}`"] = None
        parts.append(f"\n## {room}\n\n")
        parts += [f"- {says}: {', '.join(names)}\n" for says, names in tests.items()]
    return "".join(parts)


def _row(law: Law) -> str:
    cells = (law.says, f"`{law.test.removeprefix('test_')}`", f"`{law.symbol}`")
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"
