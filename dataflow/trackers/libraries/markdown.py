"""Tables as Markdown, for libraries that show no other."""

from collections.abc import Iterable, Sequence
from typing import Any


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Rows below heads; what would end a cell or open a tag is shown by other signs.

    >>> print(table(["a"], [["x|<b>"]]))
    | a |
    | --- |
    | x¦&lt;b&gt; |
    """
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    for sign, shown in (
        ("&", "&amp;"),
        ("<", "&lt;"),
        (">", "&gt;"),
        ("|", "¦"),
        ("\r", " "),
        ("\n", "⏎"),
    ):
        text = text.replace(sign, shown)
    return text
