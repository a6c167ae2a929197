"""What is read of a run folder for the page: series, marks, how the run stands; each within a
bound.
"""

from collections.abc import Mapping
from typing import Any

import pytest
from under_way import told

from dataflow.errors import RunError
from dataflow.folder.run_folder import RunFolder
from dataflow.live.looks import Looks, Marks
from dataflow.live.series import Metrics

LOSS = "trainer/loss"


def test_a_line_that_is_half_written_is_read_once_it_is_whole(folder: RunFolder) -> None:
    metrics = Metrics(folder)
    assert metrics.look() == 1.0 and metrics.points(LOSS, 100)["steps"] == [1, 2, 3, 4, 5, 6]
    with folder.metrics.open("a") as file:
        file.write('ner", "loss": 0.125}\n')
    assert metrics.look() == 1.0
    assert (
        metrics.points(LOSS, 100)["steps"][-1] == 7
        and metrics.points(LOSS, 100)["values"][-1] == 0.125
    )


def test_steps_that_are_made_again_take_the_place_of_those_before(folder: RunFolder) -> None:
    metrics = Metrics(folder)
    metrics.look()
    metrics.take({"step": 4, "node": "trainer", "loss": 9.0})
    assert (
        metrics.points(LOSS, 100)["steps"] == [1, 2, 3, 4]
        and metrics.points(LOSS, 100)["values"][-1] == 9.0
    )
    assert metrics.restarts == [4]
    metrics.take({"step": 4, "node": "eval", "eval_accuracy": 0.5})
    metrics.take({"step": 4, "node": "eval", "eval_accuracy": 0.5})
    assert metrics.restarts == [4] and metrics.rounds == [4], (
        "a round that is recorded again is no return"
    )


def test_charts_are_new_with_each_point_every_two_seconds_and_with_less_than_one_after_ten(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics, now, step = Metrics(folder), [100.0], iter(range(1, 10**6))
    monkeypatch.setattr("dataflow.live.series.time.monotonic", lambda: now[0])

    def shown(after_s: float, lines: int) -> int:
        now[0] += after_s
        for _ in range(lines):
            metrics.take({"step": next(step), "node": "t", "loss": 1.0})
        return metrics.shown()

    assert [shown(0.0, 1), shown(1.9, 3), shown(0.1, 0)] == [1, 1, 4]
    assert [shown(2.0, 1196), shown(2.0, 1), shown(0.0, 1)] == [1200, 1200, 1202], (
        "of 1,200 two are a point"
    )
    assert [shown(9.9, 1), shown(0.1, 0)] == [1202, 1203]


def test_a_run_under_way_is_told_by_its_scheduler_once_for_all_who_ask(folder: RunFolder) -> None:
    now, asked = [100.0], []
    answers = iter([told(10, 1.0), told(30, 2.0), told(5, 0.1)])

    def ask(where: RunFolder, patience_s: float) -> Mapping[str, Any]:
        asked.append(patience_s)
        return next(answers)

    looks = Looks(folder, ask, clock=lambda: now[0])
    first = looks.look()
    assert (
        first["state"] == "under way"
        and first["step"] == 6
        and "Nothing is wrong" in first["sentence"]
    )
    assert next(n for n in first["nodes"] if n["name"] == "generator")["shares"] is None, (
        "nothing is measured yet"
    )
    assert looks.look() is first and len(asked) == 1, "a second page asks nobody again"
    now[0] += 2.0
    node = next(n for n in looks.look()["nodes"] if n["name"] == "generator")
    assert node["rows_in_s"] == 10.0 and node["rows_out_s"] == 80.0 and node["version"] == 3
    assert node["shares"] == {"busy": 0.5, "blocked": 0.0, "waiting": 0.0, "starved": 0.0}, (
        "the rest is nobody's"
    )
    edge = next(e for e in looks.look()["edges"] if e["to"] == "generator")
    assert (edge["depth"], edge["capacity"], edge["rows_s"], edge["bytes_s"]) == (
        4,
        8,
        10.0,
        1000.0,
    )
    now[0] += 2.0
    node = next(n for n in looks.look()["nodes"] if n["name"] == "generator")
    assert node["shares"] is None, "its worker counts from nothing again"


def test_a_folder_that_holds_nothing_is_shown_as_nothing(tmp_path: Any) -> None:
    def gone(where: RunFolder, patience_s: float) -> Mapping[str, Any]:
        raise RunError("takes no commands")

    folder = RunFolder(tmp_path)
    assert Looks(folder, gone).look()["nodes"] == [] and Metrics(folder).look() == 1.0
    assert Marks(folder).look([], [])["faults"] == []
