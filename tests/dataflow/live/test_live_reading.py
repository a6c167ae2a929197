"""What is read of a run folder for the page: series, marks, how the run stands; each within a
bound.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from under_way import told

from dataflow.errors import DeadlineError, RunError
from dataflow.folder.faults import FILE
from dataflow.folder.ledger import Ledger
from dataflow.folder.run_folder import RunFolder
from dataflow.live.command import PageAnswers
from dataflow.live.looks import Looks, Marks
from dataflow.live.series import MOST_SERIES, Metrics

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


def test_all_pages_get_one_answer_until_charts_have_something_new(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("dataflow.live.series.time.monotonic", lambda: now[0])
    answers = PageAnswers([folder], lambda where, patience_s: {})
    before = [answers(f"api/series?run=0&key={LOSS}") for _ in range(2)]
    before.append(answers(f"api/series?run=0&key={LOSS}"))
    assert before[1] is before[2], "the first has read the file"
    with folder.metrics.open("a") as file:
        file.write('ner", "loss": 0.125}\n')
    assert answers(f"api/series?run=0&key={LOSS}") is before[2]
    now[0] += 2.0
    answers("api/now?run=0")
    assert (
        json.loads(answers(f"api/series?run=0&key={LOSS}").body)["series"][LOSS]["steps"][-1] == 7
    )


def test_a_table_of_rollouts_is_kept_for_fifty_times_what_it_took_and_for_ten_seconds_at_most(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, worked, took = [100.0], [0.0], [0.1]
    monkeypatch.setattr("dataflow.live.command.time.monotonic", lambda: now[0])

    def process_time() -> float:
        worked[0] += took[0]
        return worked[0]

    monkeypatch.setattr("dataflow.live.command.time.process_time", process_time)
    answers = PageAnswers([folder], lambda where, patience_s: {})

    def is_kept(seconds: float, question: str = "rollouts") -> bool:
        before = answers(f"api/{question}?run=0")
        now[0] += seconds
        return answers(f"api/{question}?run=0") is before

    assert [is_kept(4.9), is_kept(5.1)] == [True, False]
    took[0] = 30.0
    now[0] += 20.0
    assert [is_kept(9.9), is_kept(10.1)] == [True, False]
    now[0] += 20.0
    assert [is_kept(0.8, "graph"), is_kept(1.0, "graph")] == [True, False]


def test_what_is_no_number_is_told_as_missing_and_a_line_of_anything_is_passed_over(
    folder: RunFolder,
) -> None:
    metrics = Metrics(folder)
    for line in (
        {},
        {"step": None},
        {"step": "1"},
        {"step": True},
        {"step": 1e400},
        {"step": float("nan")},
    ):
        metrics.take(line)
    assert metrics.changes == 0
    metrics.take(
        {
            "step": 1,
            "node": "t",
            "kl": 0.5,
            "x": [1],
            "y": "z",
            "deep": {"a": {"b": {"c": {"d": 1}}}},
        }
    )
    metrics.take({"step": 2, "node": "t", "kl": None, "big": 10**400})
    assert [each["key"] for each in metrics.names()] == ["t/kl"]
    assert metrics.points("t/kl", 10)["missing"] == 1
    with pytest.raises(LookupError, match="no series"):
        metrics.points("t/none", 10)


def test_series_are_bounded_in_number_and_in_points(folder: RunFolder) -> None:
    metrics = Metrics(folder, most_points=2000)
    metrics.take({"step": 0, "node": "t", **{f"n{at}": 1 for at in range(MOST_SERIES + 50)}})
    assert len(metrics.names()) == MOST_SERIES and metrics.left_out == 50
    metrics = Metrics(folder, most_points=2000)
    for step in range(5000):
        metrics.take({"step": step, "node": "t", "loss": 100.0 if step == 777 else step % 7})
    found = metrics.points("t/loss", 300)
    assert found["of"] <= 3000 and len(found["steps"]) <= 300
    assert max(found["values"]) == 100.0 and found["steps"][0] == 0 and found["steps"][-1] == 4999
    zoomed = metrics.points("t/loss", 300, 700, 800)
    assert (
        zoomed["steps"][0] >= 700 and zoomed["steps"][-1] <= 800 and max(zoomed["values"]) == 100.0
    )


def test_shares_at_work_are_series_over_the_steps_of_the_activity(folder: RunFolder) -> None:
    for seconds, busy, step in ((0.0, 0.0, 0), (10.0, 4.0, 2), (20.0, 12.0, 5)):
        said = {"replicas": 2, "busy": busy}
        folder.note_activity(seconds, {"g": said, "trainer": {"busy": busy / 8, "step": step}})
    metrics = Metrics(folder)
    metrics.look()
    assert metrics.points("g/busy_share", 10) == {
        "steps": [2, 5],
        "values": [0.2, 0.4],
        "of": 2,
        "missing": 0,
        "mean": None,
    }
    assert metrics.points("/efficiency", 10)["values"] == [0.2, 0.4]


def test_faults_stand_at_the_step_that_was_the_last_before_them(folder: RunFolder) -> None:
    with Ledger.open(folder.ledger, readonly=True) as ledger:
        times = ledger.step_times("trainer")
        assert [step for step, _ in times] == [1, 2, 3, 4, 5, 6] and ledger.step_times(
            "trainer", 4
        ) == times[4:]
    line = {
        "worker": "g-0",
        "cause": "was killed",
        "attempt": 0,
        "noticed_s": 0.1,
        "rollouts_again": 0,
    }
    for at in (times[0][1] - 50, times[3][1], "never"):
        folder.extras.append(folder.path / FILE, json.dumps({**line, "at": at, "recovered_s": 1.0}))
    folder.extras.append(folder.path / FILE, json.dumps({"at": 1e12}))
    found = Marks(folder).look([3], [0, 6])
    assert found["faults"][0]["step"] == 0 and found["faults"][-1]["step"] == 6
    assert found["faults"][1]["step"] in (4, 5, 6) and found["faults"][2]["step"] is None
    assert (
        found["restarts"] == [3]
        and found["rounds"] == [0, 6]
        and "g-0 was killed" in found["faults"][0]["text"]
    )


def test_processes_that_workers_have_started_are_looked_for_every_five_seconds(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, looked = [100.0], []

    def below_each(pids: Iterable[int]) -> Mapping[int, list[int]]:
        looked.append(now[0])
        return {pid: [] for pid in pids}

    monkeypatch.setattr("dataflow.live.looks.processes.below_each", below_each)
    looks = Looks(folder, lambda where, patience_s: told(10, 1.0), clock=lambda: now[0])
    for seconds in (0.0, 2.0, 2.0, 2.0, 2.0):
        now[0] += seconds
        looks.look()
    assert looked == [100.0, 106.0]


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


def test_a_run_that_nobody_leads_is_told_from_its_folder(folder: RunFolder) -> None:
    def silent(where: RunFolder, patience_s: float) -> Mapping[str, Any]:
        raise DeadlineError("it has not answered")

    def gone(where: RunFolder, patience_s: float) -> Mapping[str, Any]:
        raise RunError("takes no commands")

    for seconds in (0.0, 4.0):
        said = {
            "rows_in": seconds,
            "rows_out": 2 * seconds,
            "busy": seconds / 2,
            "measured": seconds,
            "waiting": seconds / 2,
        }
        folder.note_activity(seconds, {"generator": {"replicas": 1, **said}})
    assert Looks(folder, gone).look()["state"] == "not finished"
    folder.write_json("times.json", {"outcome": "finished", "seconds": 904.0})
    found = Looks(folder, gone).look()
    assert "finished after 15:04 of training" in found["sentence"], (
        "all parts of a run that was resumed"
    )
    assert found["state"] == "finished" and found["over_s"] == 4.0
    node = next(n for n in found["nodes"] if n["name"] == "generator")
    assert (
        node["shares"] == {"busy": 0.5, "blocked": 0.0, "waiting": 0.5, "starved": 0.0}
        and node["rows_out_s"] == 2.0
    )
    assert next(n for n in found["nodes"] if n["name"] == "prompts")["shares"] is None
    silenced = Looks(folder, silent).look()
    assert silenced["state"] == "silent" and "not answered" in silenced["sentence"]


def test_a_folder_that_holds_nothing_is_shown_as_nothing(tmp_path: Any) -> None:
    def gone(where: RunFolder, patience_s: float) -> Mapping[str, Any]:
        raise RunError("takes no commands")

    folder = RunFolder(tmp_path)
    assert Looks(folder, gone).look()["nodes"] == [] and Metrics(folder).look() == 1.0
    assert Marks(folder).look([], [])["faults"] == []
