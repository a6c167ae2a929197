"""Trackers as a run sees them: whatever one of them does, it is told once, and no line is lost."""

import os
import re
import signal
from collections.abc import Callable
from typing import Any

import pytest
from bad_trackers import Bad, Groups, Held, Lines, Refused, Tables
from tracked_runs import add, line

from dataflow.folder.run_folder import RunFolder
from dataflow.trackers.children import LOG_BYTES, SPARE_BYTES
from dataflow.trackers.tail import TrackerPlace

WHOLE = [
    "trainer 1 1.000",
    "table 1 of 8",
    "trainer 2 0.500",
    "trainer 3 0.333",
    "table 3 of 8",
    "trainer 4 0.250",
    "trainer 5 0.200",
    "table 5 of 8",
]


Keep = Callable[..., Any]


def lines(folder: RunFolder) -> list[str]:
    return (folder.path / "lines.txt").read_text().splitlines()


def test_a_tracker_is_told_all_of_a_run_and_where_to_look_is_said(
    folder: RunFolder, keep: Keep
) -> None:
    said = keep(Lines).finish()
    assert lines(folder) == ["start new 0", *WHOLE, "finish finished"] and said == [
        "Lines: see lines.txt"
    ]


def test_a_tracker_that_goes_on_is_told_what_it_lacks(folder: RunFolder, keep: Keep) -> None:
    keep(Lines).finish()
    add(folder, 6)
    folder.append_metrics(line(6, 1 / 6, seconds_step=9.0))
    folder.append_metrics(line(6, 7.0))
    keep(Lines).finish()
    assert lines(folder)[10:] == [
        "start again 5",
        "trainer 6 0.167",
        "trainer 6 7.000 again",
        "finish finished",
    ]


def test_lines_that_come_while_the_run_goes_on_are_told(folder: RunFolder, keep: Keep) -> None:
    kept = keep(Lines)
    kept.until(
        lambda: TrackerPlace.read_from(folder, "Lines").read == folder.metrics.stat().st_size
    )
    add(folder, 6)
    kept.until(lambda: "trainer 6 0.167" in lines(folder))
    assert kept.finish() == ["Lines: see lines.txt"]


WAYS = {
    "hang": "has been in '{}' for 60 s, and was ended",
    "stop": "has been in '{}' for 60 s, and was ended",
    "raise": "failed in '{}': ValueError: it does not like that",
    "die": "ended with status 3 in '{}'",
    "no room": "failed in '{}': OSError: .* No space left on device",
}


@pytest.mark.parametrize(
    ("how", "call"),
    [
        pytest.param(
            how,
            call,
            id=f"{how}-{call}",
            marks=pytest.mark.slow if how in ("hang", "stop") and call != "log" else (),
        )
        for how in WAYS
        for call in ("start", "log", "rollouts", "flush", "finish")
    ],
)
def test_whatever_a_tracker_does_in_whichever_call_is_told_once(
    how: str, call: str, folder: RunFolder, keep: Keep
) -> None:
    kept = keep(Bad(how=how, at=call), Lines)
    if call == "finish":
        kept.over(1e9)
    if how in ("hang", "stop"):
        kept.until(lambda: kept.in_call(call))
        kept.until(lambda: (folder.path / "lines.txt").exists() and lines(folder)[1:9] == WHOLE)
        kept.pass_by(100.0)
    kept.until(lambda: any("Bad" in text for text in kept.said))
    (text,) = [text for text in kept.said if "Bad" in text]
    assert text.startswith("tracker Bad ") and re.search(WAYS[how].format(call), text)


def test_one_that_fails_is_tried_again_later_each_time_and_silently(
    folder: RunFolder, keep: Keep
) -> None:
    kept = keep(Bad(how="raise"))
    for pause in (10.0, 20.0, 40.0):
        kept.until(lambda: kept.first.process is None and kept.first.fails > 0)
        fails = kept.first.fails
        kept.now += pause - 1.0
        kept.look()
        assert kept.first.process is None
        kept.now += 1.0
        kept.until(lambda fails=fails: kept.first.fails == fails + 1)
    assert len(kept.said) == 1
    kept.finish()
    assert len(kept.said) == 2 and "it lacks the end of the run: dataflow track" in kept.said[1]


def test_what_a_tracker_raised_stands_whole_in_the_log_that_is_named(
    folder: RunFolder, keep: Keep
) -> None:
    kept = keep(Bad(how="raise"))
    kept.until(lambda: bool(kept.said))
    assert kept.said[0].endswith(f"; see {folder.path.name}/logs/tracker-Bad.log")
    log = (folder.logs / "tracker-Bad.log").read_text()
    assert (
        log.count("Traceback") == 1
        and "in _do\n" in log
        and "ValueError: it does not like that" in log
    )


def test_a_tracker_that_is_not_done_at_the_end_is_left_and_the_way_to_go_on_is_said(
    folder: RunFolder, keep: Keep
) -> None:
    kept = keep(Bad(how="hang", at="finish"))
    kept.over(30.0)
    kept.until(lambda: kept.in_call("finish"))
    kept.now += 31.0
    kept.until(lambda: kept.trackers.is_done)
    assert len(kept.said) == 1 and "was not done 30 s after the run" in kept.said[0]
    assert f"dataflow track {folder.path} --to bad_trackers:Bad" in kept.said[0]


def test_who_prints_without_end_fills_no_disk_and_holds_no_other_up(
    folder: RunFolder, keep: Keep
) -> None:
    kept = keep(Bad(how="flood"), Lines)
    flood = kept.first
    kept.until(lambda: flood.printed > LOG_BYTES + 65536)
    assert (folder.logs / "tracker-Bad.log").stat().st_size <= LOG_BYTES
    kept.until(lambda: (folder.path / "lines.txt").exists() and lines(folder)[1:9] == WHOLE)


def test_trackers_stand_still_where_a_run_needs_its_disk(folder: RunFolder, keep: Keep) -> None:
    kept = keep(Lines)
    kept.free = SPARE_BYTES - 1
    kept.until(lambda: bool(kept.said))
    assert "trackers stand still" in kept.said[0] and not (folder.path / "lines.txt").exists()
    kept.free = 2 * SPARE_BYTES - 1
    kept.now += 1.0
    kept.look()
    assert len(kept.said) == 1, "it does not begin and end all the time"
    kept.free = 2 * SPARE_BYTES
    kept.now += 1.0
    kept.until(lambda: len(kept.said) > 1)
    assert kept.finish()[1:] == ["trackers go on: the disk has room again", "Lines: see lines.txt"]
    assert lines(folder)[1:9] == WHOLE


def test_two_that_tell_the_same_run_do_not_mix(folder: RunFolder, keep: Keep) -> None:
    first, second = keep(Lines), keep(Lines)
    first.until(lambda: (folder.path / "lines.txt").exists() and lines(folder)[1:9] == WHOLE)
    second.until(lambda: second.in_call("waiting for the process that told this run before"))
    add(folder, 6)
    first.finish()
    second.finish()
    assert [text for text in lines(folder) if text.startswith("trainer")] == [
        *(text for text in WHOLE if text.startswith("trainer")),
        "trainer 6 0.167",
    ]


def test_groups_are_told_to_who_wants_them_and_never_twice(folder: RunFolder, keep: Keep) -> None:
    keep(Groups).finish()
    add(folder, 6)
    keep(Groups).finish()
    told = (folder.path / "groups.txt").read_text().splitlines()
    assert [text.split()[0] for text in told] == ["1", "2", "3", "4", "5", "6"] and told[
        5
    ] == "6 [10, 11] {}"


def test_what_a_tracker_took_before_it_failed_is_not_told_again(
    folder: RunFolder, keep: Keep
) -> None:
    """Of five lines it takes two each time, as one whose disk has so much room again."""
    kept = keep(Refused)
    for fails, pause in enumerate((10.0, 20.0), 1):
        kept.until(lambda fails=fails: kept.first.fails == fails)
        kept.now += pause
    said = kept.finish()
    assert [text for text in said if text.startswith("tracker ")] == said[1:]
    assert (
        len(said) == 2 and "failed in 'log': OSError: [Errno 28] No space left on device" in said[1]
    )
    steps = [
        text
        for text in (folder.path / "steps.txt").read_text().splitlines()
        if text.startswith("step")
    ]
    assert steps == [f"step {step}" for step in range(1, 6)]


def steps_of(folder: RunFolder) -> list[str]:
    path = folder.path / "steps.txt"
    return path.read_text().splitlines() if path.exists() else []


def has_taken(kept: Any) -> bool:
    """Whether the first tracker was told all that there is."""
    return kept.first.well_since is not None and kept.in_call("")


def test_a_step_whose_rollouts_were_refused_is_told_once_and_they_are_told_later(
    folder: RunFolder, keep: Keep
) -> None:
    kept = keep(Tables)
    for fails, pause in enumerate((10.0, 20.0), 1):
        kept.until(lambda fails=fails: kept.first.fails == fails)
        kept.now += pause
    assert steps_of(folder) == ["start new", "step 1", "start again"]
    (folder.path / "room").touch()
    assert sum("failed in 'rollouts'" in text for text in kept.finish()) == 1
    rest = [
        "table 1",
        "step 2",
        "step 3",
        "table 3",
        "step 4",
        "step 5",
        "table 5",
        "finish finished",
    ]
    assert [text for text in steps_of(folder) if not text.startswith("start")] == ["step 1", *rest]


def test_what_a_tracker_holds_back_it_brings_out_before_trackers_stand_still(
    folder: RunFolder, keep: Keep
) -> None:
    kept = keep(Held)
    kept.until(lambda: has_taken(kept))
    assert steps_of(folder) == [] and TrackerPlace.read_from(folder, "Held").read == 0
    kept.free, kept.now = 0, kept.now + 1.0
    kept.until(lambda: len(kept.said) == 2 and kept.first.process is None)
    first = ["start new", *(f"step {step}" for step in range(1, 6))]
    assert steps_of(folder) == first
    add(folder, 6)
    kept.free, kept.now = 2 * SPARE_BYTES, kept.now + 1.0
    kept.finish()
    assert steps_of(folder) == [*first, "start again", "step 6", "finish finished"]


def test_what_a_tracker_holds_back_it_brings_out_before_it_fails(
    folder: RunFolder, keep: Keep
) -> None:
    kept = keep(Held(takes=3))
    kept.until(lambda: kept.first.fails == 1)
    kept.now += 10.0
    kept.finish()
    assert steps_of(folder) == [
        "start new",
        "step 1",
        "step 2",
        "step 3",
        "start again",
        "step 4",
        "step 5",
        "finish finished",
    ]


def test_what_a_killed_tracker_held_back_is_told_again(folder: RunFolder, keep: Keep) -> None:
    kept = keep(Held)
    kept.until(lambda: has_taken(kept))
    process = kept.first.process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    kept.until(lambda: kept.first.fails == 1)
    kept.now += 10.0
    kept.finish()
    assert steps_of(folder) == [
        "start again",
        *(f"step {step}" for step in range(1, 6)),
        "finish finished",
    ]


def test_who_leaves_a_run_that_is_over_has_brought_out_what_it_held_back(
    folder: RunFolder, keep: Keep
) -> None:
    kept = keep(Held)
    kept.until(lambda: has_taken(kept))
    kept.trackers.close()
    assert steps_of(folder)[-1] == "step 5"
    assert keep(Held).finish() == ["Held: see steps.txt"]
    assert [text for text in steps_of(folder) if text.startswith("step")] == [
        f"step {step}" for step in range(1, 6)
    ]
