"""Laws of the trainer's parts of the GPU bench: they run on a processor too, and flops and steps
are counted right.
"""

import json

import pytest
import torch

from bench.gpu import __main__ as gpu
from bench.gpu import shared as gpu_shared
from bench.gpu import trainer as gpu_trainer
from bench.gpu.systems import TINY
from bench.gpu.trainer import Load, flops, make_module, make_rows
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


def test_every_way_of_a_step_runs_without_a_gpu(tmp_path):
    path = tmp_path / "gpu.jsonl"
    assert gpu.main(["--device", "cpu", "--tiny", "--only", "trainer", "--json", str(path)]) == 0
    found = rows(path)
    assert [row["system"] for row in found] == ["sliced", "all_logits", "recomputed"]
    for row in found:
        assert set(row) == FIGURES
        assert row["tokens_per_s"] == pytest.approx(4 * 24 / row["seconds"])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_both_graphs_run_without_a_gpu(tmp_path):
    path = tmp_path / "gpu.jsonl"
    assert gpu.main(["--device", "cpu", "--tiny", "--only", "shared", "--json", str(path)]) == 0
    found = {row["system"]: row for row in rows(path)}
    assert list(found) == ["sync", "async"]
    assert found["sync"]["staleness"] == 0 and all(
        row["rollouts_per_s"] > 0 for row in found.values()
    )


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


def test_a_graph_that_fails_in_its_process_is_told_in_words(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_shared, "STALENESS", {"unheard_of": 0})
    path = tmp_path / "gpu.jsonl"
    assert not gpu_shared.measure_shared(Report("gpu", path), lambda: 100.0, CPU, tiny=True)
    (row,) = rows(path)
    assert "invalid choice: 'unheard_of'" in row["skipped"]


def test_flops_are_six_per_weight_and_token_and_those_of_causal_attention_besides():
    module, load = make_module(TINY["tiny"], CPU), Load(rollouts=3, tokens=10, prompt=2)
    weights = sum(weight.numel() for weight in module.parameters())
    attention = 0
    for _ in range(load.rollouts * module.config.num_hidden_layers):
        forward = 2 * 2 * load.tokens**2 * 32 // 2
        attention += 3 * forward
    assert flops(module, load) == 6 * weights * 30 + attention
    assert module.get_input_embeddings().weight is module.get_output_embeddings().weight


def test_rows_of_a_step_share_nothing_and_train_all_but_their_prompts():
    made = make_rows(Load(rollouts=4, tokens=24, prompt=4), 101)
    assert made.trained_R.tolist() == [20] * 4 and len(set(made.groups_R.tolist())) == 4
    assert made.signal_R.all()


def test_rates_are_those_of_the_steps_after_the_warmup_and_before_the_pipeline_runs_dry():
    sharing = gpu_shared.Sharing(shape=TINY["tiny"], steps=2, warm=2)
    metrics = [
        {"seconds": at, "rollouts": 6, "staleness_mean": at} for at in (9.0, 10.0, 11.0, 14.0, 99.0)
    ]
    found = gpu_shared.shared_figures(metrics, sharing, 0.5)
    assert found == {"rollouts_per_s": 3.0, "seconds": 4.0, "staleness": 12.5, "efficiency": 0.5}
