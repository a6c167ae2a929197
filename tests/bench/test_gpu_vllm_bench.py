"""The GPU bench's part over vLLM: rehearsed on a processor where DATAFLOW_VLLM_PYTHON names an
interpreter that has it, and skipped in words where there is none.
"""

import json
import os
import sys
from pathlib import Path

import pytest

from bench.gpu import __main__ as gpu
from operators.engine.vllm.process import PYTHON

TINY = ["--device", "cpu", "--tiny", "--minutes", "5", "--only", "vllm", "--json"]


def rows(path: Path) -> list[dict[str, object]]:
    assert gpu.main([*TINY, str(path)]) == 0
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if str(line["case"]).startswith("vllm")]


def test_without_vllm_it_is_skipped_with_the_lines_that_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.delenv(PYTHON, raising=False)
    (row,) = rows(tmp_path / "gpu.jsonl")
    assert "engine 'vllm' needs vLLM" in str(row["skipped"]) and "install" in str(row["skipped"])


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(PYTHON not in os.environ, reason=f"{PYTHON} names no interpreter")
def test_versions_are_taken_while_requests_are_under_way(tmp_path: Path) -> None:
    (row,) = rows(tmp_path / "gpu.jsonl")
    assert row["tokens"] == 95 and row["updates"] >= 3 and 0 < row["held_ms"] < 60_000  # type: ignore[operator]
    assert row["mismatch"] < 1e-5  # type: ignore[operator]
