"""Laws of the trainer bench: every system makes the same step of the same batch, and ratios are
taken turn by turn.
"""

import json

import pytest
import torch

from bench.trainer import __main__ as trainer

OURS = ["packed", "unshared", "padded"]
SMALL = ["--model", "tiny", "--groups", "1", "--repeats", "2", "--threads", "1", "--cases", "tail"]


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def lines(path):
    return {line["system"]: line for line in map(json.loads, path.read_text().splitlines())}


def test_every_system_makes_the_same_step_and_packing_computes_the_fewest_positions(
    tmp_path, capsys
):
    path = tmp_path / "lines.jsonl"
    assert trainer.main([*SMALL, "--rows", "4", "--systems", *OURS, "--json", str(path)]) == 0
    rows = lines(path)
    assert list(rows) == OURS
    for row in rows.values():
        assert row["gradient_gap"] < 1e-5 and row["turns"] == 2
        assert row["tokens_per_s"] == pytest.approx(row["tokens"] / row["seconds"])
    assert rows["packed"]["computed"] < rows["unshared"]["computed"] < rows["padded"]["computed"]
    assert rows["padded"]["over_padded"] == 1.0
    assert "tokens_per_s" in capsys.readouterr().out


@pytest.mark.skipif(not trainer.has_trl(), reason="TRL is not installed")
@pytest.mark.filterwarnings("default")
def test_trl_makes_the_same_step(tmp_path):
    path = tmp_path / "lines.jsonl"
    assert (
        trainer.main([*SMALL, "--rows", "4", "--systems", "packed", "trl", "--json", str(path)])
        == 0
    )
    rows = lines(path)
    assert rows["trl"]["gradient_gap"] < 1e-5 and rows["trl"]["over_trl"] == 1.0


@pytest.mark.slow
def test_the_padded_step_does_not_depend_on_the_size_of_its_micro_batches(tmp_path):
    found = {}
    for rows in ("8", "3"):
        path = tmp_path / f"{rows}.jsonl"
        assert (
            trainer.main(
                [*SMALL, "--rows", rows, "--systems", "packed", "padded", "--json", str(path)]
            )
            == 0
        )
        found[rows] = lines(path)["padded"]["gradient_gap"]
    assert max(found.values()) < 1e-5
