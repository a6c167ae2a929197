"""A run folder as a run of fakes leaves it, and a keeper whose clock a test moves."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tracked_runs import made

from dataflow.folder.run_folder import RunFolder
from dataflow.trackers.chosen import Wished, choose
from dataflow.trackers.keeper import TrackerKeeper

TURNS = 3_000
"""Of a keeper, after which a test has failed."""


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return made(tmp_path)


class Kept:
    """A keeper, what it says, its clock, and how much room there is."""

    def __init__(self, folder: RunFolder, *wished: Wished) -> None:
        self.said: list[str] = []
        self.now, self.free = 1000.0, 1 << 40
        self.keeper = TrackerKeeper(
            folder,
            choose(wished),
            self.said.append,
            path=sys.path,
            clock=lambda: self.now,
            free_bytes=lambda path: self.free,
        )

    def until(self, is_so: Callable[[], bool]) -> None:
        """Let it look until something is so."""
        for _ in range(TURNS):
            if is_so():
                return
            self.keeper.turn(0.02)
        raise AssertionError(f"it has not come to that: {self.said}")

    def in_call(self, call: str) -> bool:
        """Whether the first tracker has said that it is in that call now."""
        first = self.keeper._kept[0]
        return first.process is not None and first.call == call

    def pass_by(self, seconds: float) -> None:
        """Let time go by, in which all but the first give their signs of life."""
        for _ in range(10):
            self.now += seconds / 10
            self.until(
                lambda: all(
                    each.is_done or each.heard >= self.now for each in self.keeper._kept[1:]
                )
            )

    def finish(self) -> list[str]:
        """End it as a run does; what it has said."""
        self.keeper.end("finished", within_s=60.0)
        self.until(lambda: self.keeper.is_done)
        return self.said


@pytest.fixture
def keep(folder: RunFolder) -> Iterator[Callable[..., Kept]]:
    """Starts keepers of that run, which end with the test."""
    all_kept: list[Kept] = []

    def start(*wished: Wished) -> Kept:
        all_kept.append(Kept(folder, *wished))
        return all_kept[-1]

    yield start
    for kept in all_kept:
        kept.keeper.close()
