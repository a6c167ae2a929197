"""What trackers are told: new lines, tables, groups; and which trackers are refused before a run
begins.
"""

import errno
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bad_trackers import Bad, Lines, NotInstalled, Unfit
from tracked_runs import EVIL, STEPS, add, line

from dataflow import Graph, inline, run
from dataflow.errors import GraphError
from dataflow.folder.ledger import Ledger
from dataflow.folder.run_folder import RunFolder
from dataflow.folder.socket_folder import CONTROL
from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer
from dataflow.trackers import PrometheusTracker, StepFigures, WandbTracker
from dataflow.trackers.chosen import (
    LIBRARIES,
    TRACKER_CODEC,
    ChosenTracker,
    TrackRun,
    choose,
    recorded_names,
)
from dataflow.trackers.libraries.tensorboard import markdown_table as markdown
from dataflow.trackers.process import GroupWatch, RunLeader, in_one_line, table_of
from dataflow.trackers.tail import RunTail, TrackerPlace
from dataflow.trackers.tracker import SPARE_BYTES, TrackedRun, check_room


def told(tail: RunTail) -> list[StepFigures]:
    return [figures for _, figures in tail if figures is not None]


def test_each_whole_line_is_told_once_with_its_numbers_and_its_time(folder: RunFolder) -> None:
    tail = RunTail(folder, 0)
    found = told(tail)
    assert [figures.step for figures in found] == [1, 2, 3, 4, 5] and told(tail) == []
    assert found[1].numbers["loss"] == 0.5 and found[1].numbers["dropped.stale"] == 1
    assert not {"step", "seconds", "kl"} & set(found[1].numbers), "what is no number, or no figure"
    assert not [name for name in found[1].numbers if name.startswith("weights_sent")]
    with Ledger.open(folder.ledger, readonly=True) as ledger:
        assert [f.at for f in found] == [at for _, at in ledger.step_times("trainer")]
    with folder.metrics.open("a") as file:
        file.write('{"step": 6, "node": "trainer", "lo')
    assert told(tail) == []
    with folder.metrics.open("a") as file:
        file.write('ss": 9.0}\n')
    assert [(f.step, f.numbers) for f in told(tail)] == [(6, {"loss": 9.0})]


def test_a_step_that_is_made_while_others_are_told_has_its_own_time(folder: RunFolder) -> None:
    now = time.time()
    steps = iter(RunTail(folder, 0, clock=lambda: now + 1e6))
    next(steps)
    add(folder, STEPS + 1)
    found = [figures for _, figures in steps if figures is not None]
    assert [each.step for each in found] == list(range(2, STEPS + 2))
    assert all(each.at < now + 1e5 for each in found), "not that of its telling"


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


def test_who_goes_on_knows_what_was_told_before(folder: RunFolder) -> None:
    places = [place for place, _ in RunTail(folder, 0)]
    assert [f.step for f in told(RunTail(folder, places[2]))] == [4, 5]
    folder.append_metrics(line(2, 0.5))
    assert told(RunTail(folder, places[-1])) == [], "the same as before that process began"
    assert [f.step for f in told(RunTail(folder, 1 << 40))] == [1, 2, 3, 4, 5], "of another file"


def test_a_place_that_is_torn_or_missing_is_the_beginning(folder: RunFolder) -> None:
    TrackerPlace(read=7, kept={"id": "x"}, steps={"trainer": 3}).write_to(folder, "lines")
    assert TrackerPlace.read_from(folder, "lines") == TrackerPlace(
        read=7, kept={"id": "x"}, steps={"trainer": 3}
    )
    (folder.path / "trackers" / "lines.json").write_text('{"read": "se')
    assert TrackerPlace.read_from(folder, "lines") == TrackerPlace()


def test_figures_of_several_trainers_are_told_apart(folder: RunFolder) -> None:
    config = folder.read_json("config.json") | {"max_staleness": {"actor": 1, "critic": 1}}
    folder.write_json("config.json", config)
    folder.append_metrics(line(6, 0.1) | {"node": "critic"})
    assert told(RunTail(folder, 0))[-1].numbers["critic/loss"] == 0.1


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


def test_markdown_has_no_tags_and_no_cells_of_its_contents(folder: RunFolder) -> None:
    text = markdown(["a"], [[EVIL + "\nnext"]])
    assert "<script>" not in text and text.count("\n") == 2 and text.splitlines()[2].count("|") == 2


def test_knobs_and_edges_of_a_graph_are_told_by_name(folder: RunFolder) -> None:
    run_ = TrackedRun(
        name="x",
        folder=folder.path,
        graph=folder.read_json("graph.json"),
        config=folder.read_json("config.json"),
        goes_on=False,
    )
    assert (
        run_.knobs["seed"] == 7
        and run_.knobs["version.torch"] == "9"
        and "trainer.operator" in run_.knobs
    )
    assert "prompts -> generator" in run_.edges and "trainer => generator" in run_.edges


def test_groups_are_seen_as_they_go_and_told_with_their_step(folder: RunFolder) -> None:
    clock = iter(range(10_000)).__next__
    watch = GroupWatch(folder, ["trainer"], {}, clock)
    assert [(g.step, sorted(g.seen)) for g in watch] == [
        (k, [2 * k - 2, 2 * k - 1]) for k in range(1, STEPS + 1)
    ]
    with Ledger.open(folder.ledger) as ledger:
        ledger.issue("prompts", [(10, "a"), (11, "b")])
        assert list(watch) == []
        for state in ("generating", "generated", "scored"):
            ledger.advance("prompts", [10, 11], state)
            assert list(watch) == []
        ledger.commit_step(
            "trainer", 6, version=6, source="prompts", trained=[10], dropped={11: "stale"}
        )
    (made,) = list(watch)
    assert list(made.seen[10]) == [
        "issued",
        "generating",
        "generated",
        "scored",
    ] and made.dropped == {11: "stale"}
    assert sorted(made.seen[10].values()) == list(made.seen[10].values())
    assert made.began is not None and made.began <= made.at
    assert list(GroupWatch(folder, ["trainer"], watch.last, clock)) == []


def test_groups_of_steps_that_are_made_again_are_told_again(folder: RunFolder) -> None:
    watch = GroupWatch(folder, ["trainer"], {})
    list(watch)
    with Ledger.open(folder.ledger) as ledger:
        ledger.roll_back_to(3, "trainer")
        assert list(watch) == [] and watch.last == {"trainer": 3}
        ledger.commit_step("trainer", 4, version=4, source="prompts", trained=[6, 7])
    assert [g.step for g in watch] == [4]


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


def test_a_refused_tracker_leaves_no_run_folder(tmp_path: Path) -> None:
    g = Graph("tiny")
    FakeTrainer(prompts_per_step=2)(FakeGenerator()(g.source(FakePrompts())))
    with pytest.raises(GraphError, match="not installed"):
        run(g, on=inline(), steps=2, runs=tmp_path / "runs", quiet=True, track=[NotInstalled])
    assert not (tmp_path / "runs").exists()


def test_a_tracker_goes_to_its_process_in_a_message_and_is_the_same_there() -> None:
    (chosen,) = choose([Bad(how="hang", at="start")])
    order = TrackRun(folder="", tracker=chosen, path=[], leader=0, within_s=1.0, steps_back=False)
    tracker = TRACKER_CODEC.decode(TRACKER_CODEC.encode(order)).tracker.make()
    assert isinstance(tracker, Bad) and (tracker.how, tracker.at) == ("hang", "start")
    assert chosen.reference == "bad_trackers:Bad" and recorded_names([chosen]) is None


def test_a_program_that_runs_a_graph_when_a_tracker_is_imported_is_refused(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "from dataflow import Graph, inline, run\n"
        "from dataflow.testing import *\n"
        "from dataflow.trackers import Tracker\n"
        "class Mine(Tracker):\n    pass\n"
        "g = Graph('tiny')\n"
        "FakeTrainer(prompts_per_step=2)(FakeGenerator()(g.source(FakePrompts())))\n"
        "run(g, on=inline(), steps=1,"
        f" runs={str(tmp_path / 'runs')!r}, quiet=True, track=[Mine])\n"
    )
    with pytest.raises(GraphError, match="imports this program, and found that it runs a graph"):
        choose([f"{program}:Mine"])
    assert not (tmp_path / "runs").exists()


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
