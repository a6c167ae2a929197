"""`dataflow compare`: what differs, nothing else, and the figures beside each other."""

import json
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from dataflow import cli
from dataflow.display.formatting import sparkline
from dataflow.errors import GraphError
from dataflow.folder.ledger import Ledger
from dataflow.folder.run_folder import RunFolder
from dataflow.runs.compare import figure_rows, setting_differences, sides_of
from dataflow.runs.tables import Course, figures


def changed(made: Path, to: Path) -> Path:
    """Another run: another knob, seed and version, a faster and better one."""
    path = shutil.copytree(made, to)
    with Ledger.open(path / "ledger.db") as ledger:
        facts = ledger.facts()
        for node in facts["graph"]["nodes"]:
            if node["name"] == "trainer":
                node["knobs"]["prompts_per_step"] = "8"
        facts["config"]["seed"] = 7
        facts["config"]["environment"]["packages"]["pyarrow"] = "1.2.3"
        ledger.set_facts({"graph": facts["graph"], "config": facts["config"]})
    return path


def lines(pace: float, gain: float) -> list[dict[str, Any]]:
    return [
        {
            "step": step,
            "seconds": pace * step,
            "reward_mean": gain * step / 100,
            "loss": 1 / step,
            "rollouts": 10,
            "staleness_mean": 1.5,
            "staleness_max": 3,
            "dropped": {"stale": 1},
        }
        for step in range(1, 41)
    ]


def test_a_run_differs_in_nothing_from_itself(
    made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.compare_runs(made, made) == 0
    text = capsys.readouterr().out
    assert text.count("  the same") == 2


def test_what_differs_is_named_and_what_does_not_is_left_out(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = changed(made, tmp_path / "other")
    (other / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines(0.5, 2.0))
    )
    assert cli.compare_runs(made, other, draw=tmp_path / "both.svg") == 0
    text = capsys.readouterr().out
    assert "prompts_per_step of 'trainer' was 4 and is 8" in text
    told = [line.split() for line in text.splitlines()]
    assert ["seed", "0", "7"] in told
    assert any(line[:3] == ["version", "of", "pyarrow"] and line[-1] == "1.2.3" for line in told)
    assert not any(line[:3] == ["version", "of", "numpy"] for line in told)
    assert any(line[:2] == ["steps", "12"] for line in told)
    with Ledger.open(other / "ledger.db") as ledger:
        config = ledger.facts()["config"]
        ledger.set_facts(
            {"config": {**config, "command": [*config["command"], "--note", "x" * 80]}}
        )
    cli.compare_runs(made, other)
    assert any(
        line.startswith("    B  ") and line.endswith("x" * 80)
        for line in capsys.readouterr().out.splitlines()
    )
    root = ElementTree.fromstring((tmp_path / "both.svg").read_text())
    assert {made.name, "other"} <= {each.text for each in root.iter() if each.text}
    assert cli.compare_runs(made, other, json=True) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["figures"][1]["step_s"] == pytest.approx(0.5)
    assert {each["name"] for each in plain["settings"]} == {"seed", "version of pyarrow", "command"}
    with pytest.raises(GraphError, match="the picture of two runs is an .svg, but got 'both.png'"):
        cli.compare_runs(made, other, draw=tmp_path / "both.png")


def test_two_curves_stand_below_each_other_on_one_scale(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, gain in (("slow", 1.0), ("fast", 2.0)):
        shutil.copytree(made, tmp_path / name)
        text = "".join(json.dumps(line) + "\n" for line in lines(1.0, gain))
        (tmp_path / name / "metrics.jsonl").write_text(text)
    cli.compare_runs(tmp_path / "slow", tmp_path / "fast")
    told = capsys.readouterr().out.splitlines()
    at = next(
        number
        for number, line in enumerate(told)
        if line.startswith("  reward, mean of a step, 0.01 to 0.8")
    )
    slow, fast = told[at + 1], told[at + 2]
    assert slow.endswith(" 0.4")
    assert fast.endswith(" 0.8")
    assert sparkline([0, 1], 2, "abcd", (0, 2)) == "ac"
    assert sparkline([-9, 9], 2, "abcd", (0, 2)) == "ad"


def test_a_folder_of_an_older_version_is_compared_as_far_as_it_says(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = tmp_path / "old"
    old.mkdir()
    (old / "metrics.jsonl").write_text('{"step": 1, "reward_mean": 0.5}\n')
    assert cli.compare_runs(made, old) == 0
    text = capsys.readouterr().out
    assert "the graph of old is not known" in text
    differs = {
        each.name: each.second
        for each in setting_differences(*sides_of(RunFolder.open(made), RunFolder.open(old)))
    }
    assert differs["environment"] == "not recorded"


def test_means_of_two_runs_are_over_as_many_steps_however_long_the_one_is(tmp_path: Path) -> None:
    def run_of(name: str, steps: int) -> RunFolder:
        (tmp_path / name).mkdir()
        folder = RunFolder.open(tmp_path / name)
        for step in range(1, steps + 1):
            folder.append_metrics(
                {"step": step, "node": "trainer", "loss": 1 / step, "reward_mean": step / 100}
            )
        return folder

    short, long = sides_of(run_of("short", 40), run_of("long", 400))
    rows = {name: values for name, *values in figure_rows(short.figures, long.figures)}
    assert rows["reward, first 13 steps"] == ["0.07", "0.07", ""]
    assert rows["loss, first 13 steps"][0] == rows["loss, first 13 steps"][1]
    assert rows["reward, last 13 steps"][:2] == ["0.34", "3.94"]


def test_figures_are_of_the_steps_without_the_first_tenth_and_best_is_of_means() -> None:
    slow_start = [
        {**line, "seconds": line["seconds"] + 100 * (line["step"] > 1)} for line in lines(0.5, 1.0)
    ]
    found = figures(
        slow_start,
        [{"step": 0, "eval_accuracy": 0.1}, {"step": 40, "eval_accuracy": 0.4}],
        {"seconds": 40.0, "busy_seconds": {"generator": 30.0, "trainer": 10.0}},
        {},
        faults=2,
        restarts=1,
    )
    assert found.step_s == pytest.approx(0.5)
    assert (found.rollouts, found.rollouts_per_s, found.dropped) == (400, 10.0, 40)
    assert (found.efficiency, found.bounded_by) == (0.75, "generator")
    assert found.accuracy == Course(0.1, 0.4, 0.4)
    assert found.reward is not None and found.reward.best == pytest.approx(found.reward.last)
    assert found.loss is not None and found.loss.best == found.loss.last < found.loss.first
    assert figures([], [], {}, {}).step_s is None
