"""The picture of docs/figures.md shows its tables."""

import xml.etree.ElementTree as ET

import pytest

from bench.headline import DOCS, PANELS, bars, draw, table

PAGE = (DOCS / "figures.md").read_text()


def test_the_picture_is_that_of_the_tables() -> None:
    assert (DOCS / "figures.svg").read_text() == draw(PAGE), (
        "python -m bench.headline draws it anew"
    )


def test_a_bar_is_as_long_as_its_number() -> None:
    drawn = ET.fromstring(draw(PAGE))
    rects = [
        each
        for each in drawn.iter("{http://www.w3.org/2000/svg}rect")
        if each.get("class") != "paper"
    ]
    wide = [float(each.attrib["width"]) for each in rects]
    for panel in PANELS:
        found = [number for _, number in bars(table(PAGE, panel.heading), panel)]
        here, wide = wide[: len(found)], wide[len(found) :]
        assert len(found) >= 4
        assert here == pytest.approx([max(here) * number / max(found) for number in found], abs=0.1)


def test_a_table_is_read_by_row_and_column() -> None:
    page = (
        "# Page\n\n## One\n\n| | a | b, c |\n|---|---|---|\n| x | 1,016 | 0.5 |\n| y | 419 (one"
        " turn) | |\n\nOn another machine:\n\n| | a |\n|---|---|\n| x | 5 |\n| z | 6 |\n\n## Two\n"
    )
    assert table(page, "One") == {("x", "a"): 1016, ("x", "b, c"): 0.5, ("y", "a"): 419}
