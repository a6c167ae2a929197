"""The page of refusals: read, and written anew from the code with the reasons that stand in it."""

import re
from collections.abc import Mapping

from .code import ROOT

PAGE = ROOT / "docs" / "refused.md"
TABLE = "| refused | why |\n|---|---|\n"

Refusals = Mapping[str, Mapping[str, str]]
"""By heading, by what is refused: the file that refuses it."""


def rows(page: str) -> dict[str, str]:
    """The reason of each refusal that a page lists."""
    reasons = {}
    for line in page.splitlines():
        cells = [_plain(cell) for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 2 and cells[0] != "refused" and set(cells[0]) != {"-"}:
            reasons[cells[0]] = cells[1]
    return reasons


def written(page: str, refusals: Refusals) -> str:
    """The page with a table for each part of the code; reasons are kept, new rows have none yet."""
    reasons = rows(page)
    parts = [page.partition("\n## ")[0].rstrip() + "\n"]
    for heading, refused in refusals.items():
        parts.append(f"\n## {heading}\n\n{TABLE}")
        parts += [row(what, reasons.get(what, "")) for what in refused]
    return "".join(parts)


def row(what: str, why: str) -> str:
    """A line of the page."""
    return f"| {_escaped(what)} | {_escaped(why)} |\n"


def lacks(page: str, refusals: Refusals) -> list[str]:
    """What has to be added to a page or taken from it, a sentence each."""
    reasons, files = (
        rows(page),
        {what: file for refused in refusals.values() for what, file in refused.items()},
    )
    added = [
        f"{file} refuses what {PAGE.name} does not list; run python -m tests.refused, write why"
        f" into its line: {what}"
        for what, file in files.items()
        if what not in reasons
    ]
    gone = [
        f"{PAGE.name} lists what nothing refuses any more; run python -m tests.refused, or delete"
        f" its line: {what}"
        for what in reasons
        if what not in files
    ]
    silent = [
        f"{PAGE.name} does not say why; write it into the line: {what}"
        for what, why in reasons.items()
        if what in files and not why
    ]
    return added + gone + silent


def _escaped(cell: str) -> str:
    return re.sub(r"([\\|*<>`])", r"\\\1", cell)


def _plain(cell: str) -> str:
    return re.sub(r"\\(.)", r"\1", cell.strip())
