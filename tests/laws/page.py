"""The laws as a page of the documentation."""

from collections.abc import Iterable, Mapping

from .law import Law

HEAD = """# Laws

Find here what the engine guarantees, the test that states each guarantee, and the symbol
`package:Name.method` of the code that keeps it. `python -m tests.laws` breaks one symbol after the
other in a copy of the tree, and its test must fail. `python -m tests.laws --page` writes this page.
"""


def page(rooms: Mapping[str, Iterable[Law]]) -> str:
    """The page, a list for each part of the design: a law, its tests, and where each breaks it."""
    parts = [HEAD]
    for room, laws in rooms.items():
        tests: dict[str, dict[str, None]] = {}
        for law in laws:
            tried = f"`{law.test.removeprefix('test_')}` (`{law.symbol}`)"
            tests.setdefault(law.says, {})[tried] = None
        parts.append(f"\n## {room}\n\n")
        parts += [f"- {says}: {', '.join(tried)}\n" for says, tried in tests.items()]
    return "".join(parts)
