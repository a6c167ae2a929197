"""What every bench writes: one JSON line per case and system, and a table at the end."""

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

Figure = float | int | str | None
SENTENCES = ("skipped", "failed", "options")
"""Figures that are none: they stand below the table."""


class Report:
    """Figures of one bench, written as they come."""

    def __init__(self, bench: str, path: Path | None = None) -> None:
        """`path` is begun anew; without one, only the table is shown."""
        self._bench = bench
        self._path = path
        self._lines: list[dict[str, Figure]] = []
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("")

    def add(self, *, case: str, system: str, **figures: Figure) -> None:
        """One line: a case, a system, and figures under plain names; `skipped` or `failed` says why
        there are none.
        """
        line: dict[str, Figure] = {"bench": self._bench, "case": case, "system": system, **figures}
        self._lines.append(line)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")

    def show(self, console: Console | None = None) -> None:
        """A table for each case."""
        console = console or Console()
        for case in dict.fromkeys(line["case"] for line in self._lines):
            lines = [line for line in self._lines if line["case"] == case]
            names = list(dict.fromkeys(name for line in lines for name in line))
            columns = [name for name in names if name not in ("bench", "case", *SENTENCES)]
            table = Table(title=f"{self._bench}: {case}")
            for name in columns:
                table.add_column(name, justify="left" if name == "system" else "right")
            for line in lines:
                table.add_row(*(_text(line.get(name)) for name in columns))
            console.print(table)
            notes = [
                (line["system"], name, line[name])
                for line in lines
                for name in SENTENCES
                if line.get(name)
            ]
            for system, name, text in dict.fromkeys(notes):
                console.print(f"{system}, {name}: {text}", markup=False, highlight=False)


def _text(figure: Figure) -> str:
    if figure is None:
        return ""
    if isinstance(figure, float):
        return f"{figure:,.0f}" if abs(figure) >= 1000 else f"{figure:.3g}"
    return str(figure)
