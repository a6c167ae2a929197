"""Runs of our own on this machine's cores, made in interleaved rounds, piece by piece: those that
are there stay.
"""

from __future__ import annotations

import math
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from dataflow.foresight.seen import SeenRun

NEAR = 1.15
"""Placements whose step takes so many times the best one's, or less, are run in later rounds too:
others cannot win."""
OTHERS = 0.08
"""Share of a core that others may have while a run is measured."""
_T_95 = {
    1: 6.31,
    2: 2.92,
    3: 2.35,
    4: 2.13,
    5: 2.02,
    6: 1.94,
    8: 1.86,
    10: 1.81,
    15: 1.75,
    20: 1.72,
    30: 1.70,
}
"""Student's: 95% of the distribution lie below, by degrees of freedom."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """One run that is to be made."""

    name: str
    make: Callable[[Path], object]
    """Runs it, with a run folder in the one that it gets."""
    round: int = 0

    def folder(self, keep: Path) -> Path:
        """Where its run folder is."""
        return keep / self.name.replace(" ", "-").replace(",", "") / str(self.round)

    def made(self, keep: Path) -> Path | None:
        """Its run folder, if it has been made to its end."""
        runs = self.folder(keep)
        done = (
            [path for path in runs.iterdir() if not path.is_symlink()]
            if (runs / "done").exists()
            else []
        )
        return next((path for path in done if path.is_dir()), None)


@dataclass(frozen=True, kw_only=True)
class Processor:
    """Seconds of all cores so far."""

    busy_s: float
    """At work, for whomever, or taken by the machine below."""
    own_s: float
    """For this process and those that it has waited for."""
    at_s: float

    @staticmethod
    def now() -> Processor:
        """By /proc/stat."""
        fields = [
            int(ticks)
            for ticks in Path("/proc/stat").read_text("utf-8").split("\n", 1)[0].split()[1:9]
        ]
        idle = fields[3] + fields[4]
        return Processor(
            busy_s=(sum(fields) - idle) / os.sysconf("SC_CLK_TCK"),
            own_s=sum(os.times()[:4]),
            at_s=time.monotonic(),
        )

    def others(self, before: Processor) -> float:
        """Share of one core that others had since then."""
        return (self.busy_s - before.busy_s - (self.own_s - before.own_s)) / (
            self.at_s - before.at_s
        )


class Rounds:
    """Makes runs until its time is over; one that others disturbed is made again, while there is
    time.
    """

    def __init__(self, keep: Path, seconds: float | None) -> None:
        self.kept, self.missing = keep, 0
        self._until = math.inf if seconds is None else time.monotonic() + seconds

    def run(self, planned: Iterable[Planned]) -> dict[str, list[Path]]:
        """Make those that are not there, one after the other; run folders by name. `missing` counts
        what is left.
        """
        by_name: dict[str, list[Path]] = {}
        for plan in planned:
            path = plan.made(self.kept)
            while path is None and time.monotonic() < self._until:
                runs, before = plan.folder(self.kept), Processor.now()
                shutil.rmtree(runs, ignore_errors=True)  # one that was cut off, or disturbed
                runs.mkdir(parents=True)
                plan.make(runs)
                foreign = Processor.now().others(before)
                (runs / "others").write_text(f"{foreign:.3f}\n")
                if foreign <= OTHERS:
                    (runs / "done").touch()
                path = plan.made(self.kept)
            if path is None:
                self.missing += 1
            else:
                by_name.setdefault(plan.name, []).append(path)
        return by_name


@dataclass(frozen=True, kw_only=True, eq=False)
class Measured:
    """Seconds of a step, of one way in several rounds."""

    steps_s: Sequence[float]

    @property
    def step_s(self) -> float:
        """Their geometric mean."""
        return statistics.geometric_mean(self.steps_s)

    @staticmethod
    def of(runs: Iterable[SeenRun]) -> Measured:
        """Of run folders that were read."""
        return Measured(steps_s=[run.step_s for run in runs])


@dataclass(frozen=True, kw_only=True)
class Noise:
    """How much the same run differs from round to round, of the logarithm of its seconds."""

    deviation: float
    freedom: int
    """Degrees of freedom: rounds beside the first of each."""

    @staticmethod
    def of(measured: Iterable[Measured]) -> Noise:
        """Pooled over all that were run in several rounds. ValueError where none was."""
        several = [np.log(measure.steps_s) for measure in measured if len(measure.steps_s) > 1]
        freedom = sum(len(logs) - 1 for logs in several)
        if not freedom:
            raise ValueError(
                "noise is told by runs that were made twice, and none was; make a second round"
            )
        squares = sum(float(((logs - logs.mean()) ** 2).sum()) for logs in several)
        return Noise(deviation=math.sqrt(squares / freedom), freedom=freedom)

    def tie(self, first: Measured, second: Measured) -> float:
        """Share by which the first may be slower than the second, and 95% sure be no slower in
        truth.
        """
        freedom = max(degrees for degrees in _T_95 if degrees <= self.freedom)
        return math.expm1(
            _T_95[freedom]
            * self.deviation
            * math.sqrt(1 / len(first.steps_s) + 1 / len(second.steps_s))
        )


def contenders(measured: Mapping[str, Measured]) -> list[str]:
    """Those that may be the fastest, by what was measured so far."""
    best = min(measure.step_s for measure in measured.values())
    return [name for name, measure in measured.items() if measure.step_s <= NEAR * best]
