"""Laws of the trainer's parts of the GPU bench: they run on a processor too, and flops and steps
are counted right.
"""

import json

import pytest
import torch

from bench.gpu import __main__ as gpu
from bench.gpu import trainer as gpu_trainer
from bench.report import Report

pytestmark = pytest.mark.usefixtures("forked")

FIGURES = {
    "bench",
    "case",
    "system",
    "tokens_per_s",
    "matrix_share",
    "flops_per_s",
    "seconds",
    "step_s",
    "warm_s",
}
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def rows(path):
    return [
        row for row in map(json.loads, path.read_text().splitlines()) if row["case"] != "machine"
    ]


@pytest.mark.slow
def test_every_way_of_a_step_runs_without_a_gpu(tmp_path):
    path = tmp_path / "gpu.jsonl"
    assert gpu.main(["--device", "cpu", "--tiny", "--only", "trainer", "--json", str(path)]) == 0
    found = rows(path)
    assert [row["system"] for row in found] == ["sliced", "all_logits", "recomputed"]
    for row in found:
        assert set(row) == FIGURES
        assert row["tokens_per_s"] == pytest.approx(4 * 24 / row["seconds"])


@pytest.mark.slow
def test_a_way_that_fails_is_a_row_and_the_others_go_on(tmp_path, monkeypatch):
    right = gpu_trainer.step_figures

    def figures(shape, way, *rest):
        if way.all_logits:
            raise RuntimeError("out of memory")
        return right(shape, way, *rest)

    monkeypatch.setattr(gpu_trainer, "step_figures", figures)
    path = tmp_path / "gpu.jsonl"
    assert not gpu_trainer.measure_trainer(Report("gpu", path), 300.0, CPU, tiny=True)
    found = {row["system"]: row for row in rows(path)}
    assert found["all_logits"]["skipped"] == "failed: RuntimeError: out of memory"
    assert found["recomputed"]["tokens_per_s"] > 0
