"""Laws of the bench of the real model: errors are those of the mean, runs are made once, settings
do not mix.
"""

import json

import pytest

from bench.real import __main__ as real
from bench.real import parity as parity_of
from bench.real.task import task_of

ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(10)]


def line(system, seed, accuracy, **more):
    curve = json.dumps([(0, 0.1), (64, accuracy)])
    return {
        "case": "parity",
        "system": system,
        "seed": seed,
        "accuracy": accuracy,
        "greedy": accuracy,
        "first": 0.1,
        "curve": curve,
        "staleness": 1.0,
        "seconds": 2.0,
        **more,
    }


@pytest.fixture
def given(tmp_path):
    """A command line over a tiny task."""
    flags = ["--no-chat", "--prompts-per-step", "4", "--group-size", "2", "--questions", "10"]
    return [*flags, "--json", str(tmp_path / "lines.jsonl")]


def test_every_arm_is_a_graph_that_can_run_and_differs_in_staleness_and_loss_alone(policy, given):
    task = task_of(real.parsed([*given, "--policy", str(policy)]))
    losses = {}
    for name, arm in parity_of.ARMS.items():
        graph = task.graph(
            name, task.prompts(ROWS), max_staleness=arm.max_staleness, corrected=arm.corrected
        )
        graph.check()
        losses[name] = graph.operators["trainer"].knobs().get("loss", "aipo")
    assert losses == {
        name: "rloo" if name == "uncorrected-8" else "aipo(rho=4.0)" for name in parity_of.ARMS
    }


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", ["--systems", "--asynchronous", ""])
def test_systems_and_stages_of_a_small_model_have_figures(policy, given, tmp_path, part):
    names = {
        "--systems": ["plain", "ours", "hf_generate"],
        "--asynchronous": ["sync"],
        "": ["run", "generator-float32"],
    }[part]
    flags = [
        "--policy",
        str(policy),
        "--steps",
        "2",
        "--few-steps",
        "1",
        "--seeds",
        "1",
        "--group-size",
        "8",
    ]
    assert real.main([*[part] * bool(part), *given, *flags, "--only", *names]) == 0
    lines = [json.loads(each) for each in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert [each["system"] for each in lines] == names
    assert all(each["rollouts_per_s"] > 0 and each["peak_mib"] > 0 for each in lines)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_of_parity_learns_from_its_whole_budget_and_says_how_stale_it_was(
    policy, given, tmp_path
):
    flags = [
        "--policy",
        str(policy),
        "--steps",
        "3",
        "--points",
        "1",
        "--seeds",
        "1",
        "--only",
        "aipo-4",
    ]
    assert real.main(["--parity", *given, *flags]) == 0
    (found,) = [json.loads(each) for each in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert (found["steps"], found["rollouts"], found["questions"]) == (3, 3 * 4 * 2, 10)
    assert 0 <= found["staleness"] <= found["staleness_most"] <= 4
    assert 0 <= found["greedy"] <= 1
