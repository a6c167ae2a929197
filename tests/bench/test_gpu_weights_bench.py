"""Laws of the weights part of the GPU bench: it runs on a processor too, and counts bytes and time
right.
"""

import json

import pytest
import torch

from bench.gpu import __main__ as gpu
from bench.gpu import weights as gpu_weights
from bench.report import Report

pytestmark = pytest.mark.usefixtures("forked")

FIGURES = {
    "bench",
    "case",
    "system",
    "tensors",
    "mib",
    "publish_ms",
    "adopt_ms",
    "visible_ms",
    "floor_ms",
    "over_floor",
}


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_every_system_runs_between_two_processes_without_a_gpu(tmp_path):
    path = tmp_path / "gpu.jsonl"
    assert gpu.main(["--device", "cpu", "--tiny", "--only", "weights", "--json", str(path)]) == 0
    found = [row for row in rows(path) if row["case"] != "machine"]
    expected = [
        (f"weights tiny x{count}", system) for count in (1, 300) for system in gpu_weights.SYSTEMS
    ]
    assert [(row["case"], row["system"]) for row in found] == expected
    for row in found:
        assert set(row) == FIGURES
        assert row["mib"] == pytest.approx(200_000 / 2**20)
        assert row["floor_ms"] > 0 and row["over_floor"] == pytest.approx(
            row["visible_ms"] / row["floor_ms"]
        )
        assert 0 < row["adopt_ms"] < row["visible_ms"] and row["publish_ms"] > 0


@pytest.mark.slow
def test_a_row_that_fails_says_why_and_the_next_one_has_a_process_of_its_own(tmp_path, monkeypatch):
    bad = gpu_weights.split
    monkeypatch.setattr(gpu_weights, "SYSTEMS", ("ours_view",))
    monkeypatch.setattr(
        gpu_weights,
        "split",
        lambda parameters, count: [-1] if count == 1 else bad(parameters, count),
    )
    path = tmp_path / "gpu.jsonl"
    assert not gpu_weights.measure_weights(
        Report("gpu", path), 60.0, torch.device("cpu"), tiny=True
    )
    first, second = rows(path)
    assert first["skipped"].startswith("failed: RuntimeError") and set(second) == FIGURES
