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


def test_an_error_of_the_generator_is_the_rows_reason(tmp_path, monkeypatch):
    with gpu_weights._Generator(torch.device("cpu")) as generator:
        generator.tell(("ours_view", [8], None))
        with pytest.raises(RuntimeError, match="AttributeError"):
            generator.hear()


def test_a_generator_that_died_is_an_error_and_no_wait(tmp_path):
    with gpu_weights._Generator(torch.device("cpu")) as generator:
        generator.tell(
            ("torch_shared", [8], {"w0": torch.zeros(8, dtype=torch.bfloat16).share_memory_()})
        )
        assert generator.hear() is True
        generator._process.kill()
        with pytest.raises((RuntimeError, EOFError)):
            generator.hear()


def test_no_row_begins_without_time_for_it(tmp_path):
    path = tmp_path / "gpu.jsonl"
    assert gpu_weights.measure_weights(Report("gpu", path), 0.0, torch.device("cpu"), tiny=True)
    assert [row["skipped"] for row in rows(path)] == ["too little time is left"] * 6


def test_tensors_hold_all_parameters_between_them():
    assert gpu_weights.split(1000, 300) == [3] * 299 + [103]
    assert gpu_weights.split(7, 1) == [7]


def test_visible_counts_from_the_start_of_publish_and_the_floor_copies_each_byte_once():
    published = [(10.0, 0.2), (20.0, 0.4), (30.0, 0.3)]
    adopted = [(10.5, 0.1), (20.7, 0.2), (30.6, 0.3)]
    assert gpu_weights.figures_of(published, adopted, 2**20, 2**22) == {
        "mib": 1.0,
        "publish_ms": pytest.approx(300),
        "adopt_ms": pytest.approx(200),
        "visible_ms": pytest.approx(600),
        "floor_ms": pytest.approx(500),
        "over_floor": pytest.approx(1.2),
    }


def test_a_value_of_another_version_is_an_error():
    mixed = {"a": torch.full((4,), 2.0), "b": torch.tensor([2.0, 1.0])}
    with pytest.raises(ValueError, match=r"version 2 is mixed or incomplete in \['b'\]"):
        gpu_weights._timed(0.0, 2, mixed)
