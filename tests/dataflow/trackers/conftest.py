"""A run folder as a run of fakes leaves it, and its trackers, whose clock a test moves."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tracked_runs import made

from dataflow.folder.run_folder import RunFolder
from dataflow.trackers import children
from dataflow.trackers.children import TrackerChild, TrackersOfRun
from dataflow.trackers.chosen import Wished, choose

TURNS = 3_000
"""After which a test has failed."""


@pytest.fixture(autouse=True)
def in_front(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine gives nothing to processes that step back."""
    monkeypatch.setattr(children, "STEPS_BACK", False)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return made(tmp_path)


class Kept:
    """Trackers of a run, what is said of them, their clock, and how much room there is."""

    def __init__(self, folder: RunFolder, *wished: Wished) -> None:
        self.said: list[str] = []
        self.now, self.free = 1000.0, 1 << 40
        self.trackers = TrackersOfRun(
            folder,
            choose(wished),
            forks=True,
            clock=lambda: self.now,
            free_bytes=lambda path: self.free,
        )

    @property
    def first(self) -> TrackerChild:
        return self.trackers.trackers[0]

    def look(self, wait_s: float = 0.0) -> None:
        self.said += self.trackers.look(wait_s)

    def over(self, within_s: float = 60.0) -> None:
        self.trackers.over("finished", within_s)

    def until(self, is_so: Callable[[], bool]) -> None:
        """Let it look until something is so."""
        for _ in range(TURNS):
            if is_so():
                return
            self.look(0.02)
        raise AssertionError(f"it has not come to that: {self.said}")

    def in_call(self, call: str) -> bool:
        """Whether the first tracker has said that it is in that call now."""
        return self.first.process is not None and self.first.call == call

    def pass_by(self, seconds: float) -> None:
        """Let time go by, in which all but the first give their signs of life."""
        for _ in range(10):
            self.now += seconds / 10
            self.look()
            self.until(
                lambda: all(
                    each.is_done or each.heard >= self.now for each in self.trackers.trackers[1:]
                )
            )

    def finish(self) -> list[str]:
        """End it as a run does; what it has said."""
        self.over()
        self.until(lambda: self.trackers.is_done)
        return self.said


@pytest.fixture
def keep(folder: RunFolder) -> Iterator[Callable[..., Kept]]:
    """Starts trackers of that run, which end with the test."""
    all_kept: list[Kept] = []

    def start(*wished: Wished) -> Kept:
        all_kept.append(Kept(folder, *wished))
        return all_kept[-1]

    yield start
    for kept in all_kept:
        kept.trackers.close()
