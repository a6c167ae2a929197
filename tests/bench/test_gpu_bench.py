"""Laws of the GPU bench: every part runs on a processor too, bytes are counted right, time that is
over is over.
"""

import json

import pytest
import torch

from bench.gpu import __main__ as gpu
from bench.gpu import public
from bench.report import Report

SERVING = [
    flag for part in ("tests", "ours", "hf", "attention", "weights") for flag in ("--only", part)
]
FIGURES = {
    "bench",
    "case",
    "system",
    "tokens_per_s",
    "roofline_share",
    "floor_share",
    "tokens",
    "seconds",
    "warm_s",
}


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_the_same_code_runs_end_to_end_without_a_gpu(tmp_path, capsys):
    path = tmp_path / "gpu.jsonl"
    assert (
        gpu.main(["--device", "cpu", "--tiny", "--minutes", "5", *SERVING, "--json", str(path)])
        == 0
    )
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    rows = {line["system"]: line for line in lines if line["case"] == "tiny"}
    assert set(rows) == {"graphs", "triton", "eager", "hf_dynamic", "hf_static"}
    for row in rows.values():
        assert set(row) == FIGURES
        assert row["tokens"] == 12 and row["tokens_per_s"] == pytest.approx(8 * 12 / row["seconds"])
        assert 0 < row["floor_share"] < row["roofline_share"]
    assert [line["system"] for line in lines if line["case"] == "attention tiny"] == ["torch"]
    assert "tokens_per_s" in capsys.readouterr().out


def test_without_a_gpu_it_says_so_and_ends_with_2(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 2
    assert "needs a GPU; torch" in capsys.readouterr().err


@pytest.mark.slow
def test_a_system_that_fails_is_a_row_and_the_others_go_on(tmp_path, monkeypatch):
    def broken(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(gpu, "hf", broken)
    path = tmp_path / "gpu.jsonl"
    assert gpu.main(["--device", "cpu", "--tiny", "--only", "hf", "--json", str(path)]) == 1
    lines = [json.loads(line) for line in path.read_text().splitlines() if "tiny" in line]
    assert [line["skipped"] for line in lines] == ["failed: RuntimeError: out of memory"] * 2


def test_the_public_requests_are_those_that_nano_vllm_draws():
    prompts, counts = public.Requests().drawn()
    assert len(prompts) == len(counts) == 256
    assert sum(counts) == 133_966  # the total that its README gives
    assert min(map(len, prompts)) >= 100 and max(map(len, prompts)) <= 1024


@pytest.mark.filterwarnings("default")
def test_the_public_benchmark_draws_every_token_with_log_probabilities_and_without(tmp_path):
    path = tmp_path / "gpu.jsonl"
    command = ["--device", "cpu", "--tiny", "--only", "public", "--json", str(path)]
    assert gpu.main(command) == 0
    rows = [json.loads(line) for line in path.read_text().splitlines() if "public" in line]
    assert [row["system"] for row in rows] == ["logprobs", "bare"]
    for row in rows:
        assert row["tokens"] == sum(public.TINY_REQUESTS.drawn()[1])
        assert row["tokens_per_s"] == pytest.approx(row["tokens"] / row["seconds"])


def test_what_has_no_time_left_is_skipped_and_said(tmp_path):
    path = tmp_path / "gpu.jsonl"
    report, device = Report("gpu", path), torch.device("cpu")
    assert public.measure_public(report, lambda: 1.0, device, tiny=True)
    assert gpu.measure_shared(report, "async", 1.0, device, tiny=True)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["skipped"] for line in lines] == ["too little time is left"] * 3


@pytest.mark.filterwarnings("default")
def test_the_bare_draw_follows_the_probabilities():
    from operators.engine.sampler import Sampling

    torch.manual_seed(0)
    logits = torch.tensor([[0.0, 1.0, 2.0]]).expand(20_000, 3)
    drawn = public.bare_draw(logits, Sampling(temperature=0.6)).tokens
    shares = torch.bincount(drawn, minlength=3) / len(drawn)
    assert torch.allclose(shares, torch.softmax(logits[0] / 0.6, 0), atol=0.02)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_the_asynchronous_graph_is_the_first_row(tmp_path):
    path = tmp_path / "gpu.jsonl"
    command = ["--device", "cpu", "--tiny", "--minutes", "5", "--only", "shared"]
    assert gpu.main([*command, "--json", str(path)]) == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["system"] for row in rows if row["case"] == "shared"] == ["async", "sync"]
    assert rows[0]["system"] == "async" and rows[0]["rollouts_per_s"] > 0
