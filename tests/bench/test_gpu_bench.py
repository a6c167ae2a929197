"""Laws of the GPU bench: every part runs on a processor too, bytes are counted right, time that is
over is over.
"""

import json

import pytest
import torch

from bench.gpu import __main__ as gpu
from bench.gpu import shared as gpu_shared
from bench.gpu import trainer as gpu_trainer
from bench.gpu.systems import TINY, Load, bytes_read, make_model

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


def test_what_does_not_fit_into_the_time_is_skipped_with_its_reason(tmp_path):
    path = tmp_path / "gpu.jsonl"
    assert gpu.main(["--device", "cpu", "--tiny", "--minutes", "0", "--json", str(path)]) == 0
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert all("skipped" in line for line in lines if line["case"] != "machine")
    assert len(lines) == 14 + len(gpu_trainer.served(torch.device("cpu"))) + len(
        gpu_shared.STALENESS
    )


@pytest.mark.slow
def test_a_system_that_fails_is_a_row_and_the_others_go_on(tmp_path, monkeypatch):
    def broken(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(gpu, "hf", broken)
    path = tmp_path / "gpu.jsonl"
    assert gpu.main(["--device", "cpu", "--tiny", "--only", "hf", "--json", str(path)]) == 1
    lines = [json.loads(line) for line in path.read_text().splitlines() if "tiny" in line]
    assert [line["skipped"] for line in lines] == ["failed: RuntimeError: out of memory"] * 2


def test_time_is_granted_only_while_there_is_enough():
    now = [0.0]
    clock = gpu.Clock(100.0, now=lambda: now[0])
    granted = []
    for now[0] in (40.0, 75.0, 85.0, 120.0):
        granted.append(clock.grant(30.0, 20.0))
    assert granted == [30.0, 25.0, None, None]


def test_bytes_are_those_of_every_step_and_every_position_before_it():
    load = Load(rollouts=4, group=2, prompt=20, tokens=3)
    weights, each = 1000, 7
    slow = 0
    for length in (3, 3, 1, 2):
        for drawn in range(1, length):
            slow += (load.prompt + drawn) * each
    assert bytes_read([3, 3, 1, 2], load, weights, each, shared=False) == 3 * weights + slow
    saved = 16 * each * ((2 + 2) - 2 + (0 + 1) - 1)
    assert bytes_read([3, 3, 1, 2], load, weights, each, shared=True) == 3 * weights + slow - saved


def test_models_are_the_same_every_time_and_share_their_two_largest_matrices():
    one, two = (make_model(TINY["tiny"], torch.device("cpu")) for _ in range(2))
    for ours, theirs in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert one.get_input_embeddings().weight is one.get_output_embeddings().weight
