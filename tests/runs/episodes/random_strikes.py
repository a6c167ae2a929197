"""Processes of a run of episodes that are killed or stopped at random moments, by a schedule that a
seed makes.
"""

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from rigs.machine import alive, wait_until
from rigs.operators import Around, wrapped
from rigs.ranks import processes_of

from dataflow.folder.faults import read_faults
from dataflow.node import Operator
from dataflow.runtime import Batch, Runtime

WAIT_S = 120.0


@dataclass(frozen=True)
class Place:
    """Where a blow may fall."""

    worker: str
    below: int = 0
    """0: the worker itself; 1: a child of it (the server of a pool, what starts programs); 2: a
    child of that (where functions run, a program); 3: all that is below these (sandboxes)."""

    def pids(self) -> list[int]:
        """Processes that are there now."""
        found = processes_of(self.worker)[:1]
        with contextlib.suppress(psutil.Error):
            for level in range(self.below):
                found = [
                    child.pid
                    for pid in found
                    for child in psutil.Process(pid).children(recursive=level == 2)
                ]
            return sorted(found)
        return []

    def family(self) -> list[int]:
        """All processes of the worker."""
        with contextlib.suppress(psutil.Error):
            first = processes_of(self.worker)[:1]
            return first + [
                child.pid for pid in first for child in psutil.Process(pid).children(recursive=True)
            ]
        return []


@dataclass(frozen=True)
class Strike:
    """A blow: SIGKILL, or SIGSTOP and SIGCONT."""

    place: Place
    which: float
    """Of the processes there, from 0 to 1."""
    stopped_s: float | None
    """Between SIGSTOP and SIGCONT; None: SIGKILL."""
    steps: int
    """Of the run, since the last blow was mended."""
    after_s: float
    """Behind these."""


def schedule(
    seed: int, places: Sequence[Place], strikes: int, *, kills: float = 0.7
) -> list[Strike]:
    """So many blows: each place gets one before any gets a second. kills: their share."""
    rng = random.Random(seed)
    order: list[Place] = []
    while len(order) < strikes:
        order += rng.sample(list(places), len(places))
    return [
        Strike(
            place,
            rng.random(),
            None if rng.random() < kills else rng.uniform(0.3, 2.5),
            rng.choice((1, 1, 2, 3)),
            rng.uniform(0.0, 0.4),
        )
        for place in order[:strikes]
    ]


class RandomStriking(threading.Thread):
    """Strikes by a schedule, each blow when the run has gone on since the last one."""

    def __init__(
        self, runs: Path, strikes: Sequence[Strike], *, server: Callable[[], int] | None = None
    ) -> None:
        """runs: folder of the run. server: the pid of the worlds' server, where a place has the
        worker "server".
        """
        super().__init__(daemon=True)
        self._runs, self._strikes, self._server = runs, strikes, server
        self._mark = runs / "blows"
        runs.mkdir(exist_ok=True)
        self._over = threading.Event()
        self.done: list[Strike] = []
        self.hit: set[int] = set()
        """Processes that may have died of the blows: those struck, and all of their workers."""
        self.error: BaseException | None = None

    @property
    def steps(self) -> int:
        """How many the run needs to have."""
        return sum(strike.steps for strike in self._strikes) + len(self._strikes) + 6

    def kills(self, *workers: str) -> int:
        """How often one of these was killed, itself."""
        return sum(
            strike.stopped_s is None and strike.place.below == 0 and strike.place.worker in workers
            for strike in self.done
        )

    def finish(self) -> None:
        """The run is over: all blows must have fallen."""
        self._over.set()
        self.join(10.0)
        if self.error is not None:
            raise AssertionError(f"{len(self.done)} blows fell: {self.done}") from self.error
        assert len(self.done) == len(self._strikes), f"only {self.done} fell"

    def run(self) -> None:
        try:
            for strike in self._strikes:
                begin = self._step()
                wanted = min(begin + strike.steps, self.steps - 3)
                self._until(lambda wanted=wanted: self._step() >= wanted, f"a step after {begin}")
                time.sleep(strike.after_s)
                self._strike(strike)
                self.done.append(strike)
        except BaseException as error:
            self.error = error
        finally:
            self._mark.touch()

    def held(self, trainer: Operator) -> Operator:
        """The trainer, which makes its last steps only when all blows have fallen."""
        return wrapped(
            trainer, lambda inner: _Held(inner, self._mark, lambda: self._step() >= self.steps - 3)
        )

    def _strike(self, strike: Strike) -> None:
        self._until(lambda: self._pids(strike.place), f"a process at {strike.place}")
        found = self._pids(strike.place)
        pid = found[min(int(strike.which * len(found)), len(found) - 1)]
        self.hit |= {pid, *(strike.place.family() if strike.place.worker != "server" else ())}
        faults = len(self._faults())
        with contextlib.suppress(ProcessLookupError):  # one of a rollout may have ended by itself
            if strike.stopped_s is None:
                os.kill(pid, signal.SIGKILL)
            else:
                os.kill(pid, signal.SIGSTOP)
                until = time.monotonic() + strike.stopped_s
                while alive([pid]) and time.monotonic() < until:
                    time.sleep(0.05)
                os.kill(pid, signal.SIGCONT)
        if strike.stopped_s is not None:
            return
        self._until(lambda: not alive([pid]), f"the end of {pid}")
        if strike.place.below == 0 and strike.place.worker != "server":
            self._until(lambda: len(self._faults()) > faults, "the fault on record")

    def _pids(self, place: Place) -> list[int]:
        if place.worker != "server":
            return place.pids()
        assert self._server is not None, "a place names it"
        return alive([self._server()])

    def _until(self, holds: Callable[[], object], what: str) -> None:
        wait_until(lambda: holds() or self._over.is_set(), WAIT_S, what)
        assert holds(), f"the run ended before {what}"

    def _faults(self) -> list[dict[str, object]]:
        return (
            read_faults((self._runs / "latest").resolve())
            if (self._runs / "latest").exists()
            else []
        )

    def _step(self) -> int:
        return max(
            (int(path.stem.split("-")[1]) for path in self._runs.glob("*/rollouts/step-*.arrow")),
            default=0,
        )


class _Held(Around):
    """Does nothing while it is at its last steps, and the mark is not there."""

    def __init__(self, inner: Runtime, mark: Path, is_late: Callable[[], bool]) -> None:
        super().__init__(inner)
        self._mark, self._is_late, self._is_free = mark, is_late, False

    def work(self) -> list[Batch] | None:
        self._is_free = self._is_free or self._mark.exists()
        if not self._is_free and self._is_late():
            return None
        return super().work()
