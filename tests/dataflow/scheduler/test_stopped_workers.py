"""Workers that a signal has stopped are let go on after a while, and the book of faults tells of it."""

from pathlib import Path

import pytest

from dataflow.folder.faults import STOPPED, Faults, read_faults
from dataflow.scheduler.attempts import WorkerState
from dataflow.scheduler.sigstop_watch import Stops
from dataflow.worker.host import Settings


class Desk:
    """One worker, and a clock in the hands of the test."""

    def __init__(self, folder: Path) -> None:
        self.now, self.folder, self.said = 0.0, folder, list[str]()
        self.faults = Faults(str(folder), lambda: self.now, self.said)
        self.stops = Stops(self.faults, 1.0, lambda: self.now)
        settings = Settings(folder=str(folder), attempt=2)
        self.state = WorkerState("w-0", ["w"], settings, forked=0.0, heard=0.0, state="ready")

    def at(self, now: float) -> bool:
        self.now = now
        return self.stops.let_go_on(self.state)

    def note(self, event: str) -> bool:
        return self.stops.note(self.state, event)


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def test_a_stopped_worker_is_let_go_on_once_when_the_limit_has_passed(desk: Desk) -> None:
    assert not desk.at(100.0), "nobody is stopped"
    assert desk.note("stopped")
    assert [desk.at(now) for now in (100.0, 101.0, 101.1, 150.0)] == [False, False, True, False]
    desk.now = 101.5
    assert desk.note("continued")
    assert desk.said == [f"worker w-0 {STOPPED}, and was let go on"]
    (line,) = read_faults(desk.folder)
    assert (line["worker"], line["cause"], line["attempt"]) == ("w-0", STOPPED, 2)
    assert (line["noticed_s"], line["recovered_s"]) == (pytest.approx(1.1), pytest.approx(0.4))


def test_a_worker_that_goes_on_by_itself_is_left_alone_and_nothing_is_told(desk: Desk) -> None:
    desk.note("stopped")
    desk.now = 0.9
    desk.note("continued")
    assert not desk.at(50.0) and not desk.said and not read_faults(desk.folder)


def test_a_worker_that_was_killed_while_it_stood_still_is_forgotten(desk: Desk) -> None:
    desk.note("stopped")
    assert not desk.note("exited"), "that is about something else"
    assert not desk.at(50.0) and not read_faults(desk.folder)


def test_what_is_noticed_of_one_that_starts_again_stays_open_until_it_is_at_work(desk: Desk) -> None:
    """Its line tells of its death, not of the stop."""
    desk.faults.noticed("w-0", "died (SIGKILL)", 1, heard=0.0)
    desk.state.state = "starting"
    desk.note("stopped")
    assert desk.at(1.1), "nobody may stand still"
    desk.note("continued")
    assert not read_faults(desk.folder)
    desk.now = 3.0
    desk.faults.recovered("w-0")
    assert [line["cause"] for line in read_faults(desk.folder)] == ["died (SIGKILL)"]
