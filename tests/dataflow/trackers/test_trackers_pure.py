"""What trackers are told: new lines, tables, groups; and which trackers are refused before a run
begins.
"""

import errno
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bad_trackers import Bad, Lines, NotInstalled, Unfit
from tracked_runs import line

from dataflow.errors import GraphError
from dataflow.folder.run_folder import RunFolder
from dataflow.folder.socket_folder import CONTROL
from dataflow.trackers import PrometheusTracker, StepFigures, WandbTracker
from dataflow.trackers.chosen import (
    LIBRARIES,
    TRACKER_CODEC,
    ChosenTracker,
    TrackRun,
    choose,
    recorded_names,
)
from dataflow.trackers.process import RunLeader, in_one_line, table_of
from dataflow.trackers.tail import RunTail
from dataflow.trackers.tracker import SPARE_BYTES, check_room


def told(tail: RunTail) -> list[StepFigures]:
    return [figures for _, figures in tail if figures is not None]


def test_a_step_made_again_is_told_again_only_where_it_came_out_otherwise(
    folder: RunFolder,
) -> None:
    tail = RunTail(folder, 0)
    told(tail)
    folder.append_metrics(line(4, 0.25, seconds_step=77.0, generated_tokens_per_s=1.0))
    folder.append_metrics(line(5, 0.75))
    assert [(f.step, f.is_again, f.numbers["loss"]) for f in told(tail)] == [(5, True, 0.75)]
    folder.append_metrics({"step": 5, "node": "eval", "eval_accuracy": 0.5, "eval_n": 8})
    folder.append_metrics({"step": 5, "node": "eval", "eval_accuracy": 0.5, "eval_n": 8})
    assert [(f.node, f.is_evaluation, f.is_again) for f in told(tail)] == [("eval", True, False)]


def test_a_table_has_the_best_the_worst_and_the_failed_with_texts_that_do_no_harm(
    folder: RunFolder,
) -> None:
    table = table_of(folder, "trainer", 1)
    assert table is not None
    why, reward, completion = (
        table.columns.index(name) for name in ("why", "reward", "completion")
    )
    best = next(row for row in table.rows if row[why] == "best")
    assert best[reward] == 4.0 and {row[why] for row in table.rows} >= {
        "worst",
        "by chance",
        "with an error",
    }
    texts = "".join(str(row[completion]) for row in table.rows)
    assert "\x1b" not in texts and "\u202e" not in texts and "<script>" in texts
    assert table_of(folder, "trainer", 99) is None, "which was not kept"
    (folder.rollouts / "step-000002.arrow").write_bytes(b"torn")
    assert table_of(folder, "trainer", 2) is None


def test_a_library_that_says_nothing_of_a_full_disk_is_told_nothing_where_there_is_little_room(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Path] = []

    def disk_usage(path: Path) -> Any:
        asked.append(path)
        return SimpleNamespace(free=free)

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    free = SPARE_BYTES
    check_room(tmp_path / "not" / "there yet")
    assert asked == [tmp_path]
    free -= 1
    with pytest.raises(
        OSError, match="No space left on device: 63 MiB are free, and 64 are needed: '"
    ) as caught:
        check_room(tmp_path)
    assert caught.value.errno == errno.ENOSPC


def test_what_a_library_raised_is_said_in_one_line_with_what_it_came_from() -> None:
    full, wrapped = OSError("database or\ndisk is full"), RuntimeError("INSERT\n" * 500)
    wrapped.__cause__ = full
    error = ValueError("could not log")
    error.__context__ = wrapped
    full.__context__ = error
    line = "ValueError: could not log, from OSError: database or disk is full (at unknown line)"
    assert in_one_line(error) == line, "though they lead to each other"
    full.__context__ = None
    said = in_one_line(wrapped)
    assert "\n" not in said and len(said) < 300
    assert (
        said.startswith("RuntimeError: INSERT INSERT ")
        and ", from OSError: database or disk is full" in said
    )
    error.__suppress_context__ = True
    assert in_one_line(error) == "ValueError: could not log (at unknown line)"
    assert in_one_line(OSError("x" * 999)).count("OSError") == 1


@pytest.mark.parametrize(
    ("wished", "said"),
    [
        ("wandbb", r"there is no tracker 'wandbb'; name one of wandb, .*did you mean 'wandb'"),
        ("no_such_module:Tracker", "cannot be imported: ModuleNotFoundError"),
        ("bad_trackers:Missing", "has no tracker 'Missing'"),
        ("pathlib:Path", "is no tracker"),
        ("bad_trackers:Bad", "cannot be made"),
        (
            NotInstalled,
            (
                r"a_library_that_nobody_has, which is not installed; pip install"
                r" 'dataflow-rl\[nothing\]'"
            ),
        ),
        (Unfit(), "make it a dataclass"),
        (Lines(name=object()), "as JSON"),
        (3, "derived from dataflow.trackers.Tracker, but got a int"),
        (PrometheusTracker(port=0), "from 1 to 65535, but --metrics-port is 0"),
    ],
)
def test_a_tracker_that_cannot_be_is_refused(wished: Any, said: str) -> None:
    with pytest.raises(GraphError, match=said):
        choose([wished])


def test_a_tracker_within_a_function_is_refused() -> None:
    class Local(Lines):
        pass

    with pytest.raises(GraphError, match="defined within a function"):
        choose([Local])
    with pytest.raises(GraphError, match="each tracker once, but 'Lines' was given twice"):
        choose([Lines, "bad_trackers:Lines"])


def test_a_tracker_goes_to_its_process_in_a_message_and_is_the_same_there() -> None:
    (chosen,) = choose([Bad(how="hang", at="start")])
    order = TrackRun(folder="", tracker=chosen, path=[], leader=0, within_s=1.0, steps_back=False)
    tracker = TRACKER_CODEC.decode(TRACKER_CODEC.encode(order)).tracker.make()
    assert isinstance(tracker, Bad) and (tracker.how, tracker.at) == ("hang", "start")
    assert chosen.reference == "bad_trackers:Bad" and recorded_names([chosen]) is None


def test_every_library_is_found_by_its_name() -> None:
    for name in LIBRARIES:
        module, _, attribute = LIBRARIES[name].partition(":")
        assert ChosenTracker(name=name, module=module, attribute=attribute).make().extra == name
    assert recorded_names([ChosenTracker(name="wandb", module="", attribute="")]) == ["wandb"]
    assert WandbTracker(project="a").project == "a"


def test_a_tracker_s_scheduler_leads_until_another_stands_in_its_place(
    folder: RunFolder,
) -> None:
    process = RunLeader(folder, 7)
    assert process.is_there, "of an inline run, which takes no commands"
    folder.write_json(CONTROL, {"pid": 6})
    assert process.is_there, "that is the one before it, as it has not begun"
    folder.write_json(CONTROL, {"pid": 7})
    assert process.is_there
    (folder.path / CONTROL).unlink()
    assert process.is_there, "it takes no commands any more"
    folder.write_json(CONTROL, {"pid": 8})
    assert not process.is_there
