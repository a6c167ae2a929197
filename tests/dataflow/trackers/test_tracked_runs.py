"""Runs with trackers: the same steps and losses whatever these do; a run that is resumed goes on
there.
"""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bad_trackers import Bad, Lines
from rigs.graphs import tiny_graph
from rigs.machine import alive, wait_until

from dataflow import GraphError, inline, run
from dataflow.folder.run_folder import RunFolder
from dataflow.limits import Limits
from dataflow.trackers.children import TrackersOfRun
from dataflow.trackers.command import track_run

STEPS = 4


LIMITS = Limits(track_s=30.0)


def losses(folder: Path) -> list[tuple[int, float]]:
    return [
        (line["step"], line["loss"])
        for line in RunFolder.open(folder).read_metrics()
        if "loss" in line
    ]


def tracked(folder: Path) -> list[str]:
    return [
        text
        for text in (folder / "lines.txt").read_text().splitlines()
        if text.startswith("trainer ")
    ]


def expected(folder: Path) -> list[str]:
    return [f"trainer {step} {loss:.3f}" for step, loss in losses(folder)]


def notices(folder: Path) -> list[str]:
    """What was said to the user."""
    return (folder / "logs" / "trackers.log").read_text().splitlines()


@pytest.fixture(scope="module")
def plain(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, float]]:
    """The losses of a run that nobody is told of."""
    return losses(done(policy, tmp_path_factory.mktemp("plain")))


def done(policy: Path, runs: Path, **how: Any) -> Path:
    """The folder of a run with the same numbers each time."""
    graph = tiny_graph(policy, max_staleness=0, checkpoint_every=2)
    made = run(graph, **{"steps": STEPS, "on": inline(), "runs": runs, "quiet": True, **how})
    assert made.verdict.clean
    return made.folder


@pytest.mark.parametrize(
    ("how", "at"),
    [
        ("die", "log"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("hang", "log"), ("raise", "start"), ("flood", "log"), ("hang", "finish"))
        ),
    ],
)
def test_a_run_has_its_steps_and_losses_whatever_a_tracker_does(
    how: str,
    at: str,
    plain: list[tuple[int, float]],
    policy: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    look, end = TrackersOfRun.look, TrackersOfRun.end
    monkeypatch.setattr(
        TrackersOfRun,
        "look",
        lambda of_run, wait_s=0.0: said.extend(texts := look(of_run, wait_s)) or texts,
    )
    monkeypatch.setattr(
        TrackersOfRun, "end", lambda of_run, outcome, say, s: end(of_run, outcome, said.append, s)
    )
    folder = done(policy, tmp_path, track=[Bad(how=how, at=at)], limits=Limits(track_s=2.0))
    assert losses(folder) == plain
    told = {text for text in said if "Bad" in text and not text.startswith("waiting")}
    assert 1 <= len(told) <= 2 and sum("the run goes on" in text for text in told) <= 1
    assert sum(f"dataflow track {folder} --to bad_trackers:Bad" in text for text in told) == 1


def test_a_tracker_is_told_every_step_of_a_run_in_one_process(
    plain: list[tuple[int, float]], policy: Path, tmp_path: Path
) -> None:
    folder = done(policy, tmp_path, track=["bad_trackers:Lines"], limits=LIMITS)
    assert losses(folder) == plain and tracked(folder) == expected(folder)
    assert (folder / "lines.txt").read_text().endswith("finish finished\n")
    assert notices(folder) == ["Lines: see lines.txt"]


@pytest.mark.slow
def test_a_tracker_is_told_every_step_of_a_run_in_processes(policy: Path, tmp_path: Path) -> None:
    folder = done(policy, tmp_path, track=[Lines, Bad(how="raise")], limits=LIMITS, on=None)
    assert tracked(folder) == expected(folder) and len(notices(folder)) == 3


def test_a_run_that_is_resumed_goes_on_in_the_same_tracker(
    plain: list[tuple[int, float]], policy: Path, tmp_path: Path
) -> None:
    first = done(policy, tmp_path, track=[Lines], limits=LIMITS, steps=2)
    folder = done(policy, tmp_path, track=[Lines], limits=LIMITS, resume=first)
    assert losses(folder) == plain and tracked(folder) == expected(folder)
    starts = [
        text for text in (folder / "lines.txt").read_text().splitlines() if text.startswith("start")
    ]
    assert starts == ["start new 0", "start again 2"]


def test_a_run_that_is_over_is_told_later(
    plain: list[tuple[int, float]],
    policy: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = done(policy, tmp_path)
    monkeypatch.setattr("dataflow.system.priority.step_back", lambda: None)
    assert track_run(folder, to=("bad_trackers:Lines",)) == 0
    assert (
        tracked(folder) == expected(folder) and capsys.readouterr().out == "Lines: see lines.txt\n"
    )
    with pytest.raises(GraphError, match="no tracker was named; give --to wandb"):
        track_run(folder)


def test_the_libraries_of_a_run_are_recorded_and_a_users_own_are_not(
    policy: Path, tmp_path: Path
) -> None:
    folder = done(policy, tmp_path, track=[Lines], limits=LIMITS, steps=1)
    assert RunFolder.open(folder).read_json("config.json")["track"] is None


def test_a_tracker_ends_with_the_process_that_started_it(folder: RunFolder) -> None:
    """It is asked of the kernel who its parent is: no word of the run is needed."""
    program = (
        "import os\nfrom dataflow.folder.run_folder import RunFolder\nfrom"
        " dataflow.trackers import children\nfrom dataflow.trackers.children import"
        " TrackersOfRun\nfrom dataflow.trackers.chosen import choose\nchildren.STEPS_BACK = False"
        f"\nof_run = TrackersOfRun(RunFolder.open({str(folder.path)!r}),"
        " choose(['bad_trackers:Lines']))\nof_run.look()\nprint(of_run.trackers[0].process.pid,"
        " flush=True)\nos._exit(9)\n"
    )
    made = subprocess.run(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    tracker = int(made.stdout)
    wait_until(lambda: not alive([tracker]), 60.0)
    assert (folder.path / "lines.txt").read_text().endswith("finish died\n")


def test_the_tracker_of_the_page_takes_in_a_run(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[3] / "docs" / "trackers.md").read_text()
    (tmp_path / "my_module.py").write_text(page.split("```python\n")[1].split("```")[0])
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    wished = importlib.import_module("my_module").Rewards(path=str(tmp_path / "r.txt"))
    folder = done(policy, tmp_path / "runs", track=[wished], limits=LIMITS)
    told = [
        f"{line['step']} {line['reward_mean']:.3f}"
        for line in RunFolder.open(folder).read_metrics()
        if "loss" in line
    ]
    assert (tmp_path / "r.txt").read_text().splitlines() == told
    assert len(page.split("class Rewards")[1].split("```")[0].splitlines()) <= 10
