"""Laws of the bench for eight GPUs: a bound says what was measured, the whole day runs small on a
processor, and its bounds can be read without a GPU.
"""

import json

import pytest
import torch

from bench.cluster import __main__ as cluster
from bench.cluster.run import figures_of_metrics, replayed_share
from bench.cluster.stages import STAGES, Bound, rehearsed

LINE = {"rollouts": 8, "loss": 0.0, "staleness_max": 1}


@pytest.mark.parametrize(
    ("relation", "measured", "verdict"),
    [
        ("<=", 2.0, "holds"),
        ("<=", 2.1, "misses"),
        (">=", 2.0, "holds"),
        (">=", 1.9, "misses"),
        ("==", 2, "holds"),
        ("==", 1, "misses"),
        ("<=", None, "not measured"),
    ],
)
def test_a_bound_holds_or_is_missed_or_was_not_measured(relation, measured, verdict):
    bound = Bound(figure="seconds", relation=relation, value=2.0, source="a test")
    assert bound.verdict({} if measured is None else {"seconds": measured}) == verdict


def test_figures_are_of_the_steps_that_count_alone():
    """Those that fill the pipeline and those that drain it are left out, but for staleness."""
    stage = rehearsed(STAGES[0])
    sent = {"seconds": 0.5, "held_seconds": 0.002, "nbytes": 10, "version": 1}
    lines = [{**LINE, "seconds": 90.0, "seconds_settle": 9.0, "staleness_max": 2}]
    lines += [{**LINE, "seconds": 100.0 + 2 * n, "seconds_settle": 0.1 * n} for n in range(3)]
    lines[2]["weights_sent"] = {"generator-0": sent}
    lines += [{**LINE, "seconds": 900.0, "seconds_settle": 9.0}]
    figures = figures_of_metrics([{"node": "eval"}, *lines], cluster_stage(stage))
    assert figures["step_s"] == pytest.approx(2.0)
    assert figures["rollouts_per_s"] == pytest.approx(4.0)
    assert figures["settle_s"] == pytest.approx(0.2)
    assert figures["weights_s"] == 0.5 and figures["held_ms"] == pytest.approx(2.0)
    assert figures["staleness_over"] == 2 - stage.max_staleness


def test_the_replayed_share_is_that_of_all_decode_steps_of_the_run():
    lines = [
        {"nodes": {"generator": {"decode_steps": steps, "replayed_steps": steps - 5}}}
        for steps in (10, 100)
    ]
    lines.append({"nodes": {"generator": {}, "trainer": {}}})
    assert replayed_share(lines) == {"replayed_share": 0.95}
    assert replayed_share(lines[2:]) == {}


def cluster_stage(stage):
    """With one step to fill the pipeline and two that count, after the first line."""
    from dataclasses import replace

    return replace(stage, warm=2, steps=2)


def test_every_stage_fits_on_eight_gpus_and_rehearses_its_own_way():
    for stage in STAGES:
        small = rehearsed(stage)
        assert stage.gpus <= 8
        assert (small.engine, small.lora_rank > 0) == (stage.engine, stage.lora_rank > 0)
        assert (small.tensor_parallel > 1) == (stage.tensor_parallel > 1)
        assert all(bound.anywhere for bound in small.bounds) and small.bounds


def test_too_few_gpus_end_with_2_and_say_what_can_be_done(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cluster.main([]) == 2
    assert "needs 8 GPUs" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_the_day_is_rehearsed_whole_on_a_processor(tmp_path, capsys):
    path = tmp_path / "cluster.jsonl"
    assert cluster.main(["--rehearse", "--json", str(path)]) == 0
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    ended = {line["case"] for line in lines if line.get("verdict") == "holds"}
    skipped = {line["case"] for line in lines if "skipped" in line}
    assert ended | skipped == set(cluster.names()) and skipped <= {"grpo-7b-vllm"}
