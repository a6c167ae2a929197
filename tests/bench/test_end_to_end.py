"""Laws of the end-to-end bench: what counts as time, and that every system is measured the same
way.
"""

import argparse
import json
from pathlib import Path

import pytest

from bench.end_to_end.__main__ import has_trl, run_all
from bench.end_to_end.pace import Measured, Stopwatch, seconds_to
from bench.report import Report


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


ROLLOUTS = 256


def measured(ends: list[float], accuracies: list[tuple[int, float]] | None = None) -> Measured:
    lengths = [[4] * ROLLOUTS for _ in ends]
    return Measured(
        startup_s=1.0, wall_s=9.0, ends=ends, lengths=lengths, accuracies=accuracies or []
    )


def test_evaluations_take_no_time_on_the_stopwatch() -> None:
    clock = Clock()
    watch = Stopwatch(born=90.0, clock=clock)

    def evaluation() -> float:
        clock.now += 50.0
        return 0.5

    watch.evaluate(evaluation)
    clock.now += 2.0
    watch.step([3, 4])
    watch.evaluate(evaluation)
    clock.now += 3.0
    watch.step([5, 6])
    found = watch.measured()
    assert found.ends[1] - found.ends[0] == 3.0
    assert found.startup_s == 12.0
    assert found.wall_s == 115.0
    assert found.accuracies == [(0, 0.5), (1, 0.5)]
    assert found.lengths == [[3, 4], [5, 6]]


def test_seconds_to_accuracy_start_after_the_warmup_and_lie_between_evaluations() -> None:
    found = measured([8.0, 10.0, 11.0, 12.0, 13.0, 14.0], [(0, 0.1), (2, 0.2), (4, 0.4), (6, 0.8)])
    assert seconds_to(found, 0.6, warmup=2) == pytest.approx(3.0)
    assert seconds_to(found, 0.4, warmup=2) == pytest.approx(2.0)
    assert seconds_to(found, 0.1, warmup=2) == 0.0
    assert seconds_to(found, 0.9, warmup=2) is None


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("cases", "systems"),
    [(["even"], ["plain", "sync", "async", "trl"]), (["tail", "slow_scorer"], ["plain", "async"])],
)
def test_every_case_and_system_writes_its_line(
    tmp_path: Path, cases: list[str], systems: list[str]
) -> None:
    systems = [system for system in systems if system != "trl" or has_trl()]
    options = argparse.Namespace(
        systems=systems,
        cases=cases,
        policies=tmp_path / "policies",
        quick=True,
        repeats=1,
        threads=1,
    )
    out = tmp_path / "lines.jsonl"
    assert not run_all(options, Report("end_to_end", out)), out.read_text()
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert {(line["case"], line["system"]) for line in lines} == {
        (c, s) for c in cases for s in systems
    }
    for line in lines:
        assert line["rollouts_per_s"] > 0
        assert line["startup_s"] < line["wall_s"]
        assert (line["efficiency"] is None) == (line["system"] in ("plain", "trl"))
        assert (line["seconds_to_accuracy"] is None) == (line["case"] != "even")


def test_a_missing_trl_is_a_line_that_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.end_to_end.__main__.has_trl", lambda: False)
    monkeypatch.setattr("bench.end_to_end.__main__.make_policy", lambda *args, **knobs: None)
    options = argparse.Namespace(
        systems=["trl"], cases=["even"], policies=tmp_path, quick=True, repeats=1, threads=1
    )
    assert not run_all(options, Report("end_to_end", tmp_path / "lines.jsonl"))
    (line,) = map(json.loads, (tmp_path / "lines.jsonl").read_text().splitlines())
    assert line["system"] == "trl" and "pip install" in line["skipped"]


def test_a_run_that_fails_is_a_line_and_the_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.end_to_end.__main__.make_policy", lambda *args, **knobs: None)
    monkeypatch.setattr(
        "bench.end_to_end.__main__.measure", lambda *args: "exit status 1: no policy"
    )
    options = argparse.Namespace(
        systems=["plain"], cases=["tail"], policies=tmp_path, quick=True, repeats=1, threads=1
    )
    assert run_all(options, Report("end_to_end", tmp_path / "lines.jsonl"))
    (line,) = map(json.loads, (tmp_path / "lines.jsonl").read_text().splitlines())
    assert line["failed"] == "exit status 1: no policy"
