"""Published step times: constants are found again, and what cannot be predicted is said."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.foresight.__main__ import MODELS, predict
from bench.foresight.fit import by_costs, fitted, left_out
from bench.foresight.published import PRACTICES, Run, read_models, seen
from bench.foresight.unlike import CASES, alone, both, build, dealt
from dataflow.foresight.rates import ASSUMED

ROW = {
    "system": "NeMo-RL-0.6",
    "model": "Qwen3-30B-A3B",
    "mode": "sync",
    "gpu": "H100",
    "gpus": "32",
    "max_tokens": "4096",
    "rollouts_per_generation": "2048",
    "rollouts_per_step": "512",
    "mean_tokens": "3203",
    "generator_tp": "2",
    "generator_pp": "1",
    "trainer_tp": "1",
    "trainer_cp": "1",
    "trainer_ep": "8",
    "trainer_pp": "1",
}
OTHERS = (
    {},
    {"mode": "async"},
    {"gpus": "64"},
    {"mode": "async", "gpus": "128"},
    {"model": "Qwen3-32B", "generator_tp": "4"},
)


def runs_at(memory: float, compute: float) -> list[Run]:
    """Runs that took as long as the costs say at these rates."""
    rates, found = replace(ASSUMED, memory=memory, compute=compute), []
    for other in OTHERS:
        run = seen(ROW | other, read_models(MODELS), PRACTICES["NeMo-RL-0.6"])
        found.append(replace(run, row={**run.row, "step_s": str(run.predicted_s(rates))}))
    return found


@pytest.mark.parametrize(("memory", "compute"), [(0.6, 0.2), (0.8, 0.1)])
def test_a_fit_finds_the_rates_at_which_runs_were_made_and_predicts_what_it_has_not_seen(
    memory: float, compute: float
) -> None:
    runs = runs_at(memory, compute)
    found = fitted(runs)
    assert (found.memory, found.compute) == pytest.approx((memory, compute), rel=0.05)
    assert left_out(runs, by_costs) == pytest.approx([run.step_s for run in runs], rel=0.1)


def test_rows_are_predicted_line_by_line_and_one_that_cannot_be_says_why(tmp_path: Path) -> None:
    rows, out = tmp_path / "rows.csv", tmp_path / "out.jsonl"
    with rows.open("w", newline="") as file:
        table = csv.DictWriter(file, [*ROW, "step_s"])
        table.writeheader()
        table.writerows(
            [ROW, ROW | {"gpu": "H10"}, ROW | {"system": "another"}, ROW | {"model": "none"}]
        )
    assert predict(rows, MODELS, out) == 1
    known, unlike, another, missing = map(json.loads, out.read_text().splitlines())
    assert known["model"] == "Qwen3-30B-A3B" and 100 < known["predicted_s"] < 400
    assert unlike["predicted_s"] == known["predicted_s"] and unlike["gpu"] == "H10"
    assert unlike["assumed"] == "devices 'H10' are taken for H100"
    assert another["predicted_s"] > 0 and "another was not fitted" in another["constants"]
    assert "none" in missing["failed"]


def test_devices_of_two_kinds_are_dealt_out_by_hand_without_a_rest(tmp_path: Path) -> None:
    hosts = {host.name for host in both().hosts}
    assert [text.partition("x")[0] for text in alone().values()] == [
        "64",
        "64",
    ] and both().gpus == 128
    for places in dealt().values():
        assert set(places["trainer"]) | set(places["generator"]) == hosts
        assert (
            not set(places["trainer"]) & set(places["generator"])
            and len(places["trainer"]) == len(hosts) / 2
        )
    for case in CASES:
        made = build(case, tmp_path)
        assert (
            made.feedbacks[0].max_staleness == case.max_staleness
            and case.steps > 2 * (case.max_staleness + 1) + 3
        )
        assert case.workload.lengths(made.operators["generator"]).most <= case.max_tokens
