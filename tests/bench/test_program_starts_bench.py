"""The bench of programs' starts measures both ways, and says what a program that fails has said."""

import json
from pathlib import Path

from bench.program_starts import measure
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
