"""The laws as a page of the documentation."""

from collections.abc import Iterable, Mapping

from .law import Law

HEAD = """# Laws

Each law of the design has a test whose name states it, and which fails without the code that keeps the law.
`python -m tests.laws` tries that: in a copy of the tree it deletes the code of one law after the other and runs the
test; with `--page` it writes this page. A quick test holds the list to the tree: what is to be deleted still stands
where it says, and every test is there. The last column is what the last whole try found.
"""


def page(rooms: Mapping[str, Iterable[Law]], unnoticed: Iterable[str] = ()) -> str:
    """The page; `unnoticed`: names of laws whose test did not fail."""
    missed = set(unnoticed)
    parts = [HEAD]
    for room, laws in rooms.items():
        parts.append(f"\n## {room}\n\n| law | test | what was deleted | noticed |\n|---|---|---|---|\n")
        parts += [_row(law, law.name not in missed) for law in laws]
    return "".join(parts)


def _row(law: Law, noticed: bool) -> str:
    file, _, test = law.test.partition("::")
    where = f"`{test.removeprefix('test_')}` ({file.removeprefix('tests/')})"
    cells = (law.says, where, f"{law.deleted} (`{law.file}`)", "yes" if noticed else "**no**")
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"
