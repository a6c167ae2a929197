"""Laws of the trainer bench: every system makes the same step of the same batch, and ratios are
taken turn by turn.
"""

import json
import statistics

import numpy as np
import pytest
import torch

from bench.trainer import __main__ as trainer
from bench.trainer import head as trainer_head
from bench.trainer import systems as trainer_systems
from bench.trainer.batches import PAD, PROMPT_TOKENS, as_groups, as_padded, make_rollouts
from operators.training.learner.rows import step_rows

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


def test_a_system_that_fails_is_a_row_and_the_exit_status_and_the_others_go_on(
    tmp_path, monkeypatch
):
    def broken(setting):
        raise RuntimeError("no such kernel")

    monkeypatch.setitem(trainer_systems.OPEN, "unshared", broken)
    path = tmp_path / "lines.jsonl"
    assert trainer.main([*SMALL, "--systems", *OURS, "--json", str(path)]) == 1
    rows = lines(path)
    assert rows["unshared"]["failed"] == "RuntimeError: no such kernel"
    assert rows["packed"]["over_padded"] > 0


def test_systems_without_time_are_skipped_with_that_reason(tmp_path):
    path = tmp_path / "lines.jsonl"
    assert trainer.main([*SMALL, "--minutes", "0", "--systems", *OURS, "--json", str(path)]) == 0
    assert all(row["skipped"] == "no time is left" for row in lines(path).values())


def test_ratios_are_medians_of_the_ratios_within_a_turn():
    turns = {"packed": [1.0, 2.0, 4.0], "padded": [2.0, 8.0, 4.0], "trl": [3.0, 2.0, 40.0]}
    found = trainer.figures("packed", turns, tokens=100)
    assert found["tokens_per_s"] == 50.0 and found["spread"] == 1.5
    assert found["over_padded"] == 2.0 and found["over_trl"] == statistics.median([3.0, 1.0, 10.0])


def test_a_batch_has_a_heavy_tail_prompts_in_common_and_no_advantage_of_zero():
    rollouts = make_rollouts("tail", groups=8, size="small")
    lengths = sorted(map(len, rollouts.completions))
    assert lengths[-1] >= 8 * lengths[len(lengths) // 2]
    assert all(rollouts.prompts[8 * group] is rollouts.prompts[8 * group + 7] for group in range(8))
    low, high = PROMPT_TOKENS
    assert all(low <= len(prompt) <= high for prompt in rollouts.prompts)
    assert np.all(rollouts.advantage != 0)


def test_rows_and_padded_tensors_hold_the_same_rollouts():
    rollouts = make_rollouts("tail", groups=2, size="tiny")
    rows, padded = step_rows(as_groups(rollouts), ("advantage",)), as_padded(rollouts)
    assert rows.tokens.mask.sum() == padded.completion_mask.sum() == rollouts.tokens
    assert np.array_equal(
        rows.tokens.ids[rows.tokens.mask],
        padded.completion_ids[padded.completion_ids != PAD].numpy(),
    )
    assert np.array_equal(
        rows.tokens.ids[~rows.tokens.mask], padded.prompt_ids[padded.prompt_ids != PAD].numpy()
    )
    assert np.allclose(rows.columns_R["advantage"], padded.advantage.numpy())


def test_the_head_is_measured_at_a_vocabulary_of_150_000_while_there_is_time(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        trainer_head, "measure_head", lambda report, cases, threads: asked.append((cases, threads))
    )
    path = tmp_path / "lines.jsonl"
    assert (
        trainer.main(["--model", "tiny", "--threads", "1", "--cases", "head", "--json", str(path)])
        == 0
    )
    (((case,), threads),) = asked
    assert (case.vocabulary, threads) == (150_000, 1)
    assert (
        trainer.main(["--model", "tiny", "--cases", "head", "--minutes", "0", "--json", str(path)])
        == 0
    )
    assert len(asked) == 1 and "time" in lines(path)["all"]["skipped"]
