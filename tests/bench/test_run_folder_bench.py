"""The bench of run folders makes one that its own subject judges, and reads back what it
encodes.
"""

from pathlib import Path

import pyarrow as pa

from bench.report import Report
from bench.run_folder import decoded, encoded, make, measure_files, measure_verify, step_rows


def test_the_folder_is_that_of_a_clean_run_and_its_figures_are_written(tmp_path: Path) -> None:
    report = Report("run_folder", tmp_path / "figures.json")
    folder = make(tmp_path / "runs", 11, prompts=3, group=2, tokens=4)
    measure_verify(report, folder, 1)
    measure_files(report, 4, 2, 1)
    figures = (tmp_path / "figures.json").read_text()
    assert '"clean": "True"' in figures and '"case": "11 steps"' in figures and "zstd" in figures


def test_what_is_encoded_is_read_back() -> None:
    rows = step_rows(5, 8, 2, 2, 20)
    for codec in (None, pa.Codec("zstd", 1)):
        content = encoded(rows, codec)
        decoded(content)
        assert pa.ipc.open_file(content).read_all().equals(rows)
