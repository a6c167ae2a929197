"""Workers that a signal has stopped are let go on after a while, and the book of faults tells of
it.
"""

import signal
from pathlib import Path

import pytest
from small_table import small_table

from dataflow.folder.faults import STOPPED, Faults, read_faults
from dataflow.limits import Limits
from dataflow.scheduler.events import (
    Command,
    FaultNoticed,
    FaultRecovered,
    ProcessEvent,
    Signal,
    Tick,
)
from dataflow.scheduler.reducer import reduce
from dataflow.scheduler.table import ProcessState
from transport.life import Life

NAME = "prompts-0"


class Watched:
    """One worker, and a clock in the hands of the test."""

    def __init__(self, folder: Path) -> None:
        self.now, self.folder, self.said = 0.0, folder, list[str]()
        self.faults = Faults(str(folder), lambda: self.now, self.said)
        limits = Limits(stopped_s=1.0, hang_s=1e9, start_s=1e9)
        self.table = small_table(limits=limits, begun=True)
        for record in self.table:
            record.process = ProcessState.READY
        self.record = self.table.workers[NAME]
        self.record.life = Life(attempt=2)

    def _execute(self, commands: list[Command]) -> list[Command]:
        for command in commands:
            match command:
                case FaultNoticed():
                    self.faults.noticed(
                        command.worker, command.cause, command.attempt, command.heard_at
                    )
                case FaultRecovered():
                    self.faults.recovered(command.worker, command.notice)
        return commands

    def at(self, now: float) -> bool:
        self.now = now
        return Signal(NAME, signal.SIGCONT) in self._execute(reduce(self.table, Tick(), now))

    def note(self, what: str, status: int | None = None) -> None:
        self._execute(reduce(self.table, ProcessEvent(NAME, what, status), self.now))


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


def test_a_stopped_worker_is_let_go_on_once_when_the_limit_has_passed(watched: Watched) -> None:
    assert not watched.at(0.5), "nobody is stopped"
    watched.note("stopped")
    assert [watched.at(now) for now in (0.5, 1.5, 1.6, 50.0)] == [False, False, True, False]
    watched.now = 2.0
    watched.note("continued")
    assert watched.said == [f"worker {NAME} {STOPPED}, and was let go on"]
    (line,) = read_faults(watched.folder)
    assert (line["worker"], line["cause"], line["attempt"]) == (NAME, STOPPED, 2)
    assert (line["noticed_s"], line["recovered_s"]) == (pytest.approx(1.1), pytest.approx(0.4))


def test_a_worker_that_goes_on_by_itself_is_left_alone_and_nothing_is_told(
    watched: Watched,
) -> None:
    watched.note("stopped")
    watched.now = 0.9
    watched.note("continued")
    assert not watched.at(50.0) and not watched.said and not read_faults(watched.folder)


def test_a_worker_that_was_killed_while_it_stood_still_is_forgotten(watched: Watched) -> None:
    watched.note("stopped")
    watched.note("exited", -9)
    assert watched.record.process is ProcessState.DOWN and not watched.at(50.0)
    watched.faults.close()
    assert [line["cause"] for line in read_faults(watched.folder)] == ["died (SIGKILL)"]


def test_what_is_noticed_of_one_that_starts_again_stays_open_until_it_is_at_work(
    watched: Watched,
) -> None:
    """Its line tells of its death, not of the stop."""
    watched.faults.noticed(NAME, "died (SIGKILL)", 1, heard_at=0.0)
    watched.record.process = ProcessState.STARTING
    watched.note("stopped")
    assert watched.at(1.1), "nobody may stand still"
    watched.note("continued")
    assert not read_faults(watched.folder)
    watched.now = 3.0
    watched.faults.recovered(NAME)
    assert [line["cause"] for line in read_faults(watched.folder)] == ["died (SIGKILL)"]
