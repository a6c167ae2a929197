"""The bench of programs' starts measures both ways, and says what a program that fails has said."""

import json
from pathlib import Path

import pytest

from bench.program_starts import measure, start, starter
from bench.report import Report


def test_a_program_is_started_in_both_ways(tmp_path: Path) -> None:
    report = Report("program_starts", tmp_path / "figures.json")
    measure(report, "urllib.request", 2)
    lines = [json.loads(line) for line in (tmp_path / "figures.json").read_text().splitlines()]
    assert [line["system"] for line in lines] == ["without", "with imports="]
    for line in lines:
        assert (
            0 < line["fastest ms"] <= line["could call ms"] <= line["slowest ms"]
            and line["ended ms"] > 0
        )


def test_a_program_that_fails_gives_no_figure(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("import sys\nsys.exit('no such thing')\n")
    with starter(()) as line, pytest.raises(RuntimeError, match="status 1; found no such thing"):
        start(line, 0, script)
