"""The page of refusals: read, and written anew from the code with the reasons that stand in it."""

import re
from collections.abc import Mapping

from .code import ROOT

PAGE = ROOT / "docs" / "refused.md"
TABLE = "| refused | why | what to do |\n|---|---|---|\n"

Refusals = Mapping[str, Mapping[str, tuple[str, str]]]


def rows(page: str) -> dict[str, tuple[str, str]]:
    """What a page says: by what is refused, why and what to do."""
    found = {}
    for line in page.splitlines():
        cells = [_plain(cell) for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 3 and cells[0] != "refused" and set(cells[0]) != {"-"}:
            found[cells[0]] = cells[1], cells[2]
    return found


def written(page: str, refusals: Refusals) -> str:
    """The page with a table for each part of the code; reasons are kept, new rows have none yet."""
    known = rows(page)
    parts = [page.partition("\n## ")[0].rstrip() + "\n"]
    for heading, refused in refusals.items():
        parts.append(f"\n## {heading}\n\n{TABLE}")
        parts += [
            row(what, known.get(what, ("", ""))[0], todo) for what, (todo, _) in refused.items()
        ]
    return "".join(parts)


def row(what: str, why: str, todo: str) -> str:
    """A line of the page."""
    return f"| {' | '.join(map(_escaped, (what, why, todo)))} |\n"


def lacks(page: str, refusals: Refusals) -> list[str]:
    """What has to be added to a page or taken from it, a sentence each."""
    known, found = (
        rows(page),
        {what: told for refused in refusals.values() for what, told in refused.items()},
    )
    added = [
        f"{where} refuses what {PAGE.name} does not say; run python -m tests.refused, write why"
        f" into its line: {what}"
        for what, (_, where) in found.items()
        if what not in known
    ]
    gone = [
        f"{PAGE.name} says what nothing refuses any more; run python -m tests.refused, or delete"
        f" its line: {what}"
        for what in known
        if what not in found
    ]
    silent = [
        f"{PAGE.name} does not say why; write it into the line: {what}"
        for what, told in known.items()
        if what in found and not told[0]
    ]
    moved = [
        f"{PAGE.name} says to do another thing than {where}; run python -m tests.refused: {what}"
        for what, (todo, where) in found.items()
        if what in known and known[what][1] != todo
    ]
    return added + gone + silent + moved


def _escaped(cell: str) -> str:
    return re.sub(r"([\\|*<>`])", r"\\\1", cell)


def _plain(cell: str) -> str:
    return re.sub(r"\\(.)", r"\1", cell.strip())
