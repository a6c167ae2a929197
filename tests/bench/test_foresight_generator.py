"""Constants of a server's step: found again, fitted without one device, held against measured rows
where these are.
"""

import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_tables import put, write_served

from bench.foresight.generator import (
    DOUBTED,
    composed,
    errors,
    fitted,
    generator,
    left_out,
)
from bench.foresight.measured import Served, holding, read_served
from dataflow.errors import GraphError
from dataflow.foresight.kernel_tables import folder
from dataflow.foresight.steps import ServerConstants

CONFIG = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 4,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 10000,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
ROW: dict[str, Any] = {
    "silicon_data_source": "source_file=made.csv; measured=2026-01-01",
    "backend": "vllm",
    "mode": "agg",
    "model_path": "made/model",
    "system": "h100_sxm",
    "precision": "fp8",
    "isl": 1000,
    "osl": 500,
    "batch_size": 8.0,
    "tp_size": 1.0,
    "attention_dp_size": 1.0,
    "moe_tp_size": 1.0,
    "moe_ep_size": 1.0,
    "silicon_ttft_ms": 50.0,
    "silicon_tpot_ms": 10.0,
}
TRUE = ServerConstants(
    memory=1.3, products=2.0, tiles=0.5, links=3.0, hop_s=5e-6, layer_s=60e-6, mixture_s=20e-6
)


def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *changes: dict[str, Any]) -> list[Served]:
    """Rows of a made package."""
    package = put(tmp_path, monkeypatch)
    write_served(package, [ROW | change for change in changes], CONFIG)
    return read_served(folder())


def many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Served]:
    """Of three devices, as long as `TRUE` says."""
    rows = made(
        tmp_path,
        monkeypatch,
        *(
            {
                "system": system,
                "batch_size": batch,
                "tp_size": ranks,
                "moe_tp_size": ranks,
                "osl": answer,
                "isl": prompt,
            }
            for system in ("h100_sxm", "h200_sxm", "b200_sxm")
            for batch in (1, 8, 64, 256)
            for ranks in (1, 2, 8)
            for prompt, answer in ((1000, 500), (4000, 200))
        ),
    )
    return [replace(row, token_s=TRUE.seconds(row.step)) for row in rows]


def test_constants_are_found_again_though_one_row_in_ten_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = many(tmp_path, monkeypatch)
    wrong = [
        replace(row, token_s=row.token_s * 3) if at % 10 == 0 else row
        for at, row in enumerate(rows)
    ]
    for some in (rows, wrong):
        constants = fitted(some)
        assert max(map(abs, errors((row, constants.seconds(row.step)) for row in rows))) < 0.02


def test_a_device_left_out_is_predicted_by_constants_that_never_saw_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = many(tmp_path, monkeypatch)
    found = left_out(rows, lambda row: row.device)
    assert [len(predicted) for predicted in found.values()] == [24, 24, 24] and list(found) == [
        "H100",
        "H200",
        "B200",
    ]
    assert max(abs(each) for predicted in found.values() for each in errors(predicted)) < 1e-3
    slower = [
        replace(row, token_s=2 * row.token_s) if row.device == "B200" else row for row in rows
    ]
    off = {
        name: errors(predicted)
        for name, predicted in left_out(slower, lambda row: row.device).items()
    }
    assert statistics.fmean(off["B200"]) == pytest.approx(-0.5, abs=1e-3)


@pytest.mark.slow
def test_the_installed_rows_are_met_within_the_goals_with_each_device_and_each_model_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    try:
        rows, _ = holding(read_served(folder()))
    except GraphError:
        pytest.skip("aiconfigurator-core is not installed (pip install 'dataflow-rl[foresight]')")
    rows = [row for row in rows if row.model != DOUBTED]
    off = [
        statistics.fmean(map(abs, errors(predicted)))
        for predicted in left_out(rows, lambda row: row.device).values()
    ]
    assert statistics.fmean(off) < 0.10 and max(off) < 0.12
    for predicted in left_out(rows, lambda row: row.model).values():
        assert statistics.fmean(map(abs, errors(predicted))) < 0.20
    hopper = [row for row in rows if "Llama" in row.model and row.device != "B200"]
    assert statistics.fmean(map(abs, errors(composed(hopper)))) < 0.08
    assert generator(None) == 0 and "each device left out: off by" in capsys.readouterr().out
