"""Laws of the learning bench: budgets are equal, runs are made once, differences are between runs
of the same seed.
"""

import itertools
import json
import math
import xml.etree.ElementTree as ElementTree

import pytest

from bench.learning import __main__ as learning
from bench.learning.algorithms import ALGORITHMS, budget, build
from bench.learning.figures import curve_of, mean_curve, row_of, summary
from bench.learning.picture import apart, picture
from operators import Prompts

ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(10)]


def run_line(system, seed, accuracy, **more):
    curve = json.dumps([(0, 0.4), (512, accuracy)])
    return {
        "case": "calculator",
        "system": system,
        "seed": seed,
        "accuracy": accuracy,
        "curve": curve,
        **more,
    }


def test_every_named_algorithm_is_a_graph_that_can_run(policy):
    assert tuple(ALGORITHMS) == learning.NAMES
    held_out = Prompts(ROWS, columns=("answer",), name="held_out", group_size=1)
    for name in ALGORITHMS:
        prompts = Prompts(4 * ROWS, columns=("answer",), epochs=1)
        graph = build(
            name,
            policy=str(policy),
            teacher=str(policy),
            prompts=prompts,
            held_out=held_out,
            every_steps=5,
        )
        graph.check()
        trained = [operator.name for operator in graph.operators.values() if operator.trains]
        assert trained == (["trainer", "critic"] if name == "ppo" else ["trainer"])


def test_a_budget_goes_through_all_rows_before_any_comes_again_in_the_order_of_its_seed():
    found = budget(ROWS, 25, seed=1)
    for first in (0, 10):
        assert sorted(row["prompt"] for row in found[first : first + 10]) == sorted(
            row["prompt"] for row in ROWS
        )
    assert len(found) == 25 and found == budget(ROWS, 25, seed=1) != budget(ROWS, 25, seed=2)


def test_rollouts_of_dropped_groups_count_and_the_last_evaluation_stands_at_the_end_of_the_budget():
    def step(number, dropped):
        return {
            "node": "trainer",
            "step": number,
            "rollouts": 256,
            "dropped": dropped,
            "staleness_mean": number,
            "ess": None if number == 1 else 0.5,
        }

    metrics = [
        {"step": 0, "eval_accuracy": 0.4},
        step(1, {}),
        {"node": "critic", "step": 1, "rollouts": 256, "dropped": {}},
        step(2, {"has_signal": 3}),
        {"step": 1, "eval_accuracy": 0.5},
        {"step": 2, "eval_accuracy": 0.6},
    ]
    row = row_of(metrics, group_size=8, total=1024)
    assert curve_of(row) == [(0, 0.4), (256, 0.5), (1024, 0.6)]
    assert (row["accuracy"], row["first"], row["steps"], row["dropped"]) == (0.6, 0.4, 2, 3)
    assert (row["staleness"], row["ess"]) == (1.5, 0.5)


def test_differences_are_taken_within_a_seed_and_failed_runs_are_no_part_of_them():
    lines = [
        run_line("aipo-0", 0, 0.5),
        run_line("aipo-0", 1, 0.7),
        run_line("aipo-4", 0, 0.6),
        run_line("aipo-4", 1, 0.6),
        {"case": "calculator", "system": "aipo-4", "seed": 2, "failed": "exit status 1"},
        run_line("rloo", 2, 0.9),
    ]
    base, late, other = summary(lines, "aipo-0")
    assert base["accuracy"] == pytest.approx(0.6) and "difference" not in base
    assert late["runs"] == 2 and late["difference"] == pytest.approx(0.0, abs=1e-12)
    assert late["error"] == pytest.approx(math.sqrt(0.02) / math.sqrt(2))
    assert other["runs"] == 1 and other["spread"] is None and "difference" not in other


def test_a_mean_curve_goes_as_far_as_all_of_its_runs():
    lines = [{"curve": "[[0, 0.2], [100, 0.4], [200, 0.8]]"}, {"curve": "[[0, 0.4], [120, 0.6]]"}]
    assert mean_curve(lines) == [(0, pytest.approx(0.3)), (110, pytest.approx(0.5))]


def test_the_picture_names_every_line_once_and_is_a_document():
    lines = [
        run_line(name, seed, 0.5 + 0.01 * seed) for name in learning.NAMES for seed in range(2)
    ]
    lines.append({"case": "calculator", "system": "broken", "seed": 0, "failed": "x"})
    root = ElementTree.fromstring(picture(lines))
    words = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert all(sum(text == f"{name} 0.505" for text in words) == 1 for name in learning.NAMES)
    assert not any("broken" in text for text in words)
    assert "no run was finished" in picture([])


def test_names_keep_their_order_and_their_distance():
    wanted = [50.0, 10.0, 11.0, 12.0, 49.0]
    places = apart(wanted, 5.0)
    assert sorted(range(5), key=places.__getitem__) == sorted(range(5), key=wanted.__getitem__)
    ordered = sorted(places)
    assert all(later - earlier >= 5.0 - 1e-9 for earlier, later in itertools.pairwise(ordered))
    assert sum(places) == pytest.approx(sum(wanted))


def test_finished_runs_are_not_made_again_and_failed_ones_are(tmp_path, monkeypatch, capsys):
    made = []

    def measure(name, seed, options):
        made.append((seed, name))
        if name == "rloo" and len(made) < 4:
            return {"failed": "exit status 1"}
        return {
            key: value
            for key, value in run_line(name, seed, 0.5).items()
            if key in ("accuracy", "curve")
        }

    monkeypatch.setattr(learning, "measure", measure)
    monkeypatch.setattr(learning, "_policies", lambda options, names: ("policy", "policy"))
    path = tmp_path / "lines.jsonl"
    common = ["--json", str(path), "--only", "aipo-0", "rloo", "--resume"]
    assert learning.main([*common, "--seeds", "1"]) == 1
    assert learning.main([*common, "--seeds", "2"]) == 1
    assert learning.main([*common, "--seeds", "2"]) == 0
    assert made == [
        (0, "aipo-0"),
        (0, "rloo"),
        (0, "rloo"),
        (1, "aipo-0"),
        (1, "rloo"),
        (0, "rloo"),
    ]
    assert {(line["seed"], line["system"]) for line in learning.finished(path)} == set(made)
    assert (
        "rloo 0.500" in path.with_suffix(".svg").read_text() and "aipo-0" in capsys.readouterr().out
    )


def test_no_run_begins_when_the_time_is_over(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(learning, "_policies", lambda options, names: ("policy", "policy"))
    path = tmp_path / "lines.jsonl"
    assert (
        learning.main(["--json", str(path), "--minutes", "0", "--only", "grpo", "--seeds", "2"])
        == 0
    )
    assert path.read_text() == "" and capsys.readouterr().out.count("go on with --resume") == 2


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_runs_are_made_in_processes_of_their_own_and_learn_from_their_whole_budget(tmp_path):
    path = tmp_path / "lines.jsonl"
    common = [
        "--tiny",
        "--steps",
        "2",
        "--points",
        "2",
        "--seeds",
        "1",
        "--policies",
        str(tmp_path / "policies"),
    ]
    assert learning.main([*common, "--only", "aipo-4", "distill", "--json", str(path)]) == 0
    lines = learning.finished(path)
    assert [line["system"] for line in lines] == ["aipo-4", "distill"]
    for line in lines:
        assert (line["steps"], line["rollouts"]) == (2, 2 * 32 * 8)
        points = [rollouts for rollouts, _ in curve_of(line)]
        assert points in ([0, 256, 512], [0, 512]), (
            "the round between gives way where the last is due already"
        )
