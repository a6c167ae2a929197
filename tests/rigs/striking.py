"""Ranks of a run that are killed, or stopped, while it goes on."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dataflow.folder.faults import read_faults
from rigs.machine import alive, wait_until
from rigs.ranks import processes_of

WAIT_S = 120.0


class Striking(threading.Thread):
    """Strikes one rank after the other, each when the run has made a step since the last one was
    made up for.
    """

    def __init__(
        self, runs: Path, sizes: Mapping[str, int], victims: list[tuple[str, int]]
    ) -> None:
        """runs: folder of the run. sizes: of workers that have to be complete before one is struck,
        in ranks.
        """
        super().__init__(daemon=True)
        self._runs, self._sizes, self._victims = runs, sizes, victims
        self.struck: list[tuple[str, int]] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            for worker, rank in self._victims:
                self._next_step()
                wait_until(
                    lambda: all(
                        len(processes_of(name)) == size for name, size in self._sizes.items()
                    ),
                    WAIT_S,
                )
                self.strike(processes_of(worker)[rank])
                self.struck.append((worker, rank))
        except BaseException as error:
            self.error = error

    def strike(self, pid: int) -> None:
        before = len(self.faults())
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: len(self.faults()) > before, WAIT_S, "the fault on record")

    def faults(self) -> list[dict[str, Any]]:
        return (
            read_faults((self._runs / "latest").resolve())
            if (self._runs / "latest").exists()
            else []
        )

    def step(self) -> int:
        return max(
            (int(path.stem.split("-")[1]) for path in self._runs.glob("*/rollouts/step-*.arrow")),
            default=0,
        )

    def _next_step(self) -> None:
        begin = self.step()
        wait_until(lambda: self.step() >= begin + 2, WAIT_S, f"a step after {begin}")


class Stopping(Striking):
    """Stops a rank for so many seconds."""

    def __init__(
        self, runs: Path, sizes: Mapping[str, int], victims: list[tuple[str, int]], stopped_s: float
    ) -> None:
        super().__init__(runs, sizes, victims)
        self._stopped_s = stopped_s

    def strike(self, pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        deadline = time.monotonic() + self._stopped_s
        # its worker may be started again meanwhile
        while alive([pid]) and time.monotonic() < deadline:
            time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
