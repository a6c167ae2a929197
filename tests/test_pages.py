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


def test_the_tour_fits_in_an_afternoon() -> None:
    """At most 20 files, which are there, and 4,000 lines."""
    stops = re.findall(r"^\| \d+ \| `([^`]+)` \|", (ROOT / "docs" / "tour.md").read_text(), re.MULTILINE)
    assert len(set(stops)) == len(stops) and 15 <= len(stops) <= 20
    assert not [stop for stop in stops if not (ROOT / stop).is_file()]
    assert sum(len((ROOT / stop).read_text().splitlines()) for stop in stops) <= 4000
