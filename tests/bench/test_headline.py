"""The picture of docs/figures.md shows its tables."""

from bench.headline import DOCS, draw

PAGE = (DOCS / "figures.md").read_text()


def test_the_picture_is_that_of_the_tables() -> None:
    assert (DOCS / "figures.svg").read_text() == draw(PAGE), (
        "python -m bench.headline draws it anew"
    )
