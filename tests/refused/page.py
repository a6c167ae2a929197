"""The page of refusals: read, and written anew from the code with the reasons that stand in it."""

import re
from collections.abc import Collection, Mapping

from .code import ROOT

PAGE = ROOT / "docs" / "refused.md"


TABLE = "| refused | why |\n|---|---|\n"


EVIDENT = frozenset((ROOT / "tests" / "refused" / "evident.txt").read_text("utf-8").splitlines())


"""Refusals that the page leaves out, because their messages say all: values out of range, names
that are misspelled, files that are missing or damaged.
"""


WHY = ": *"


"""Between a refusal and its reason, which ends with the line's last star."""


Refusals = Mapping[str, Mapping[str, str]]


"""By heading, by what is refused: the file that refuses it."""


def rows(page: str) -> dict[str, str]:
    """The reason of each refusal that a page lists."""
    lines = [line[2:].partition(WHY) for line in page.splitlines() if line.startswith("- ")]
    return {_plain(what): _plain(why.removesuffix("*")) for what, sep, why in lines if sep}


def written(page: str, refusals: Refusals, evident: Collection[str] = EVIDENT) -> str:
    """The page with a list for each part of the code; reasons are kept, new lines have none yet."""
    reasons = rows(page)
    parts = [page.partition("\n## ")[0].rstrip() + "\n"]
    for heading, refused in refusals.items():
        parts.append(f"\n## {heading}\n\n")
        parts += [row(what, reasons.get(what, "")) for what in refused if what not in evident]
    return "".join(parts)


def row(what: str, why: str) -> str:
    """A line of the page."""
    return f"- {_escaped(what)}{WHY}{_escaped(why)}*\n"


def lacks(page: str, refusals: Refusals, evident: Collection[str] = EVIDENT) -> list[str]:
    """What has to be added to a page or taken from it, a sentence each."""
    reasons = rows(page)
    files = {what: file for refused in refusals.values() for what, file in refused.items()}
    added = [
        f"{file} refuses what {PAGE.name} does not list; run python -m tests.refused and write why"
        f" into its line, or move it to evident.txt: {what}"
        for what, file in files.items()
        if what not in reasons and what not in evident
    ]
    gone = [
        f"{PAGE.name} or evident.txt lists what nothing refuses any more; delete its line: {what}"
        for what in (*reasons, *sorted(evident))
        if what not in files
    ]
    silent = [
        f"{PAGE.name} does not say why; write it into the line: {what}"
        for what, why in reasons.items()
        if what in files and not why
    ]
    return added + gone + silent


def _escaped(text: str) -> str:
    return re.sub(r"([\\|*<>`])", r"\\\1", text)


def _plain(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text.strip())
