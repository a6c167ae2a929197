"""The pages a stranger reads first: short, with links that lead somewhere, and a tour that fits in an afternoon."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "graphs" / "README.md", ROOT / "bench" / "README.md"]
)


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", page.read_text())
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing


STOPS = re.findall(r"^\| \d+ \| `([^`]+)` \|(.*)$", (ROOT / "docs" / "tour.md").read_text(), re.MULTILINE)
"""File, and what is said of it."""


def test_the_tour_fits_in_an_afternoon() -> None:
    """At most 20 files and 4,500 lines."""
    files = {file for file, _ in STOPS}
    assert 15 <= len(files) == len(STOPS) <= 20
    assert sum(len((ROOT / file).read_text().splitlines()) for file in files) <= 4500


@pytest.mark.parametrize(("file", "said"), STOPS, ids=lambda each: each if each.endswith(".py") else "")
def test_what_the_tour_says_to_look_at_is_there(file: str, said: str) -> None:
    words = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", said))))
    assert words <= set(re.findall(r"\w+", (ROOT / file).read_text()))
