"""Laws of the bench of the real model: errors are those of the mean, runs are made once, settings
do not mix.
"""

import itertools
import json
import math
from types import SimpleNamespace

import pytest
import torch

from bench.real import __main__ as real
from bench.real import parity as parity_of
from bench.real import runs
from bench.real.forgetting import kl_of, perplexity, windows
from bench.real.parity import error, figures, learnt, mean
from bench.real.task import task_of
from graphs import arithmetic

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


def test_errors_are_those_of_the_mean_over_the_seeds_and_differences_are_within_a_seed():
    lines = [
        line("aipo-0", 0, 0.5),
        line("aipo-0", 1, 0.6),
        line("aipo-0", 2, 0.7),
        line("aipo-8", 0, 0.4),
        line("aipo-8", 1, 0.6),
        line("aipo-8", 2, 0.8),
        {"case": "parity", "system": "aipo-8", "seed": 3, "failed": "exit status 1"},
    ]
    synchronous, stale = learnt(lines)
    assert synchronous["accuracy"] == pytest.approx(0.6) and synchronous["difference"] is None
    assert synchronous["error"] == pytest.approx(0.1 / math.sqrt(3))
    assert stale["runs"] == 3 and stale["error"] == pytest.approx(0.2 / math.sqrt(3))
    assert stale["difference"] == pytest.approx(0.0, abs=1e-12)
    assert stale["its error"] == pytest.approx(0.1 / math.sqrt(3))
    assert mean([], "accuracy") is None and error(lines[:1], "accuracy") is None


def test_late_staleness_and_the_share_of_capped_weights_are_of_the_trained_steps():
    steps = [
        {
            "node": "trainer",
            "step": number,
            "rollouts": 8,
            "dropped": {},
            "staleness_mean": number - 1.0,
            "staleness_max": number - 1,
            "truncated_share": 0.1 * number,
            "kl": None if number == 1 else 0.5,
        }
        for number in range(1, 5)
    ]
    rounds = [{"step": 0, "eval_accuracy": 0.1}, {"step": 4, "eval_accuracy": 0.3}]
    found = figures(task_of(real.parsed([])), [*steps, *rounds], prompts=4)
    assert (found["staleness"], found["staleness_late"], found["staleness_most"]) == (1.5, 2.5, 3)
    assert (
        found["clipped"] == pytest.approx(0.25)
        and found["kl"] == 0.5
        and found["rollouts"] == 4 * 8
    )


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


def test_finished_runs_are_not_made_again_failed_ones_are_and_other_settings_are_refused(
    given, tmp_path, monkeypatch, capsys
):
    made = []

    def figures_of(module, names, flags, **more):
        made.append(tuple(names))
        return {"failed": "exit status 1"} if len(made) == 2 else line(names[1], int(names[2]), 0.5)

    monkeypatch.setattr(runs, "figures_of", figures_of)
    common = ["--parity", *given, "--seeds", "1", "--only", "aipo-0", "aipo-8"]
    assert real.main(common) == 1
    assert real.main(common) == 0
    assert made == [("parity", name, "0") for name in ("aipo-0", "aipo-8", "aipo-8")]
    path = tmp_path / "lines.jsonl"
    lines = [json.loads(each) for each in path.read_text().splitlines()]
    assert {(each["system"], each["seed"]) for each in lines} == {("aipo-0", 0), ("aipo-8", 0)}
    assert all(each["processor"] and each["threads"] and each["torch"] for each in lines)
    assert (
        "aipo-8 0.500" in path.with_suffix(".svg").read_text()
        and "standard error" in capsys.readouterr().out
    )
    with pytest.raises(SystemExit, match="give another --json FILE"):
        real.main([*common, "--lr", "1e-3"])
    assert runs.finished(path, "parity", lines[0]["setting"]), "a refusal leaves the file as it is"


def test_the_bench_trains_as_the_graph_does_and_holds_out_each_question_once():
    task = task_of(real.parsed([]))
    ours = task.graph("bench", task.prompts(task.train), max_staleness=4).operators
    theirs = arithmetic.build().operators
    assert ours["generator"].knobs() == theirs["generator"].knobs()
    assert ours["trainer"].knobs() == theirs["trainer"].knobs() | {"recover_within_s": math.inf}
    asked = [row["prompt"] for row in task.held_out]
    assert len(set(asked)) == len(asked) == 512 and not set(asked) & {
        row["prompt"] for row in task.train
    }


class Uniform:
    """A model that finds every one of four tokens as likely, or the first of them certain."""

    def __init__(self, certain=False):
        self.certain = certain

    def __call__(self, input_ids, use_cache):
        logits = torch.zeros(*input_ids.shape, 4)
        logits[..., 0] = 50.0 * self.certain
        return SimpleNamespace(logits=logits)


def test_perplexity_is_of_the_scored_tokens_and_kl_of_the_whole_vocabulary():
    texts = [([1, 2, 3], 1), ([0, 1, 2, 3, 0], 3)]
    assert perplexity(Uniform(), iter(texts)) == pytest.approx(4.0)
    kl, places = kl_of(Uniform(certain=True), Uniform(), texts)
    assert kl == pytest.approx(math.log(4)) and places == 2 + 2
    assert kl_of(Uniform(), Uniform(), texts)[0] == 0.0


def test_a_text_is_scored_whole_but_for_the_first_token_of_each_window():
    words = SimpleNamespace(encode=lambda text, add_special_tokens: list(range(len(text.split()))))
    pieces = list(windows(words, "word " * 1200))
    assert sum(len(ids) - given for ids, given in pieces) == 1199
    assert all(later[0] == earlier[-1] for (earlier, _), (later, _) in itertools.pairwise(pieces))


def test_runs_that_no_part_has_are_refused_by_name(given):
    with pytest.raises(SystemExit, match="--only aipo-2 is no run of this part"):
        real.main(["--parity", *given, "--only", "aipo-2"])


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
