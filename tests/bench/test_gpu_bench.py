"""Laws of the GPU bench: every part runs on a processor too, bytes are counted right, time that is
over is over.
"""

import json

import pytest
import torch

from bench.gpu import __main__ as gpu

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
