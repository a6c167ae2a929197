"""Published step times: constants are found again, and what cannot be predicted is said."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.foresight.__main__ import MODELS, predict, rates_of
from bench.foresight.constants import FITTED
from bench.foresight.fit import by_costs, fitted, left_out, predicted_at, ratios
from bench.foresight.published import PRACTICES, Run, cuts, read_models, seen
from bench.foresight.unlike import CASES, alone, both, build, dealt
from dataflow.foresight.catalogue import device_kind
from dataflow.foresight.parts import Parts
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


def test_one_run_that_nothing_explains_does_not_decide_the_constants() -> None:
    plain, odd = runs_at(0.6, 0.2), runs_at(0.6, 0.2)
    odd[0] = replace(odd[0], row={**odd[0].row, "step_s": str(3 * odd[0].step_s)})
    found, off = fitted(odd), [run.predicted_s(fitted(odd)) / run.step_s - 1 for run in odd]
    assert (found.memory, found.compute) != (fitted(plain).memory, fitted(plain).compute)
    assert off[0] < -0.5 and max(abs(each) for each in off[1:]) < 0.15


def test_what_no_run_tells_stays_as_it_is_assumed() -> None:
    reads = replace(
        runs_at(0.4, 0.2)[0], generation=Parts(memory=10.0), training=Parts(), exchange=Parts()
    )
    found = fitted([replace(reads, row={**reads.row, "step_s": "25"})])
    assert found.memory == pytest.approx(0.4, rel=0.05) and found.compute == pytest.approx(
        ASSUMED.compute, rel=0.03
    )
    assert fitted([]).memory == pytest.approx(ASSUMED.memory, rel=0.03)


def test_a_ratio_is_of_runs_of_one_model_on_as_many_devices_and_knows_neither() -> None:
    runs = runs_at(0.6, 0.2)
    (found,) = ratios(runs)  # on 64, and on 128 devices there is one run each
    assert found.case == "Qwen3-30B-A3B, 32 H100"
    assert found.published == runs[0].step_s / runs[1].step_s
    assert found.predicted == pytest.approx(found.published, rel=0.1)
    odd = [replace(runs[0], row={**runs[0].row, "step_s": "1"}), *runs[1:]]
    assert ratios(odd)[0].predicted == found.predicted and ratios(odd)[0].off > 1


@pytest.mark.parametrize(
    ("model", "found"),
    [
        ("Llama-3.1-8B", [(2, 1), (4, 1), (8, 1)]),
        ("Llama-3.1-70B", [(8, 2)]),
        ("Llama-3.1-405B", [(8, 16)]),
    ],
)
def test_what_is_trained_is_cut_over_the_devices_that_hold_it(
    model: str, found: list[tuple[int, int]]
) -> None:
    assert cuts(read_models(MODELS)[model], device_kind("H100")) == found


def test_a_system_whose_sides_share_devices_gains_more_from_parting_them_the_larger_its_model() -> (
    None
):
    """The figure of the paper, as far as the costs explain it."""
    known, gains = read_models(MODELS), []
    for model, devices in (("Llama-3.1-8B", 256), ("Llama-3.1-70B", 256), ("Llama-3.1-405B", 1024)):
        row = {"system": "LlamaRL", "model": model, "gpu": "H100", "gpus": str(devices)}
        slow, fast = (
            seen({**row, "mode": mode}, known, PRACTICES["LlamaRL"]) for mode in ("sync", "async")
        )
        assert (
            not slow.overlaps and fast.overlaps and slow.exchange.links == 0 < fast.exchange.links
        )
        gains.append(slow.predicted_s(FITTED["LlamaRL"]) / fast.predicted_s(FITTED["LlamaRL"]))
    assert 2 < gains[0] < gains[1] < gains[2] < 10.7


def test_cuts_that_a_row_gives_are_taken_as_they_are() -> None:
    row = {
        "system": "LlamaRL",
        "model": "Llama-3.1-70B",
        "mode": "sync",
        "gpu": "H100",
        "gpus": "256",
    }
    ours, given = (
        seen(each, read_models(MODELS), PRACTICES["LlamaRL"])
        for each in (row, {**row, "generator_tp": "16"})
    )
    # 16 ranks read what 8 read in each of two stages
    assert given.generation.memory < 0.6 * ours.generation.memory
    assert given.generation.fixed > ours.generation.fixed  # over two nodes


def test_the_fewer_prompts_begin_early_the_longer_an_asynchronous_step_waits() -> None:
    row = {"system": "verl", "model": "Qwen2.5-7B", "mode": "async", "gpu": "H20", "gpus": "128"}
    runs = [
        seen({**row, "staleness": each}, read_models(MODELS), PRACTICES["verl"])
        for each in ("0", "0.1", "", "1")
    ]
    none, tenth, half, one = (run.predicted_s(FITTED["verl"]) for run in runs)
    # from some bound on the trainer decides
    assert none > 1.5 * tenth and tenth > 1.01 * half and half == one
    for run in (*runs, *runs_at(0.6, 0.2)):
        at = predicted_at(run, np.array([0.3, 0.412]), np.array([0.5, 0.767]))
        assert at.tolist() == pytest.approx(
            [
                run.predicted_s(replace(ASSUMED, memory=memory, compute=compute))
                for memory, compute in ((0.3, 0.5), (0.412, 0.767))
            ]
        )


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


@pytest.mark.parametrize(
    ("odd", "told"),
    [
        ({"model": "qwen3-30b-a3b-instruct"}, "is taken for Qwen3-30B-A3B"),
        ({"model": "Nobody-14B"}, "is taken for a dense one of"),
        ({"gpu": "NVIDIA H100 80GB HBM3"}, "taken for H100"),
        ({"mode": "one-step-off"}, "mode 'one-step-off' is taken for async"),
        ({"gpus": "", "gpus_trainer": "16", "gpus_generator": "16", "mode": "async"}, ""),
        ({"generator_tp": "two"}, "generator_tp 'two' is passed over"),
        ({"gpus": "1,024", "rollouts_per_step": "-3"}, "rollouts_per_step '-3' is passed over"),
        ({"mean_tokens": "9000"}, ""),
        ({"gpus": "1", "generator_tp": "64", "trainer_pp": "64"}, ""),
        (
            dict.fromkeys(
                ("max_tokens", "mean_tokens", "rollouts_per_generation", "rollouts_per_step"), ""
            ),
            "",
        ),
        ({"gpus_trainer": "64", "gpus": "32", "mode": "async"}, ""),
    ],
)
def test_odd_rows_are_predicted_as_what_they_are_nearest_to(
    odd: dict[str, str], told: str, tmp_path: Path
) -> None:
    rows, out = tmp_path / "rows.csv", tmp_path / "out.jsonl"
    with rows.open("w", newline="") as file:
        table = csv.DictWriter(file, list(ROW | odd))
        table.writeheader()
        table.writerow(ROW | odd)
        file.write(",".join(["x"] * 40) + "\nNeMo-RL-0.6\n")  # too many columns, and too few
    assert predict(rows, MODELS, out) == 1
    first, much, little = map(json.loads, out.read_text().splitlines())
    assert 0 < first["predicted_s"] < 1e6 and told in first.get("assumed", "")
    assert first.items() >= (ROW | odd).items()
    assert "say how many" in little["failed"] and "failed" in much


def test_a_system_that_is_not_known_gets_the_mean_of_those_that_are() -> None:
    found = rates_of("unknown")
    assert (
        min(r.memory for r in FITTED.values())
        < found.memory
        < max(r.memory for r in FITTED.values())
    )


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
