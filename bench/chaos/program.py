"""Starts, watches and ends the program of bench.chaos.run, and resumes and judges what it
leaves.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from bench.chaos.nemesis import everyone
from dataflow.folder.run_folder import RunFolder
from dataflow.system.files import RunFolderError

START_S = 300.0
END_S = 240.0
POLL_S = 0.05


class Failed(Exception):
    """The program did not do what it was waited for; the message has the end of what it said."""


class Program:
    """One process that runs, or goes on with, a run."""

    def __init__(
        self, command: Sequence[str], output: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        """output: the file that its output is appended to. environment: its whole environment;
        None: this process's.
        """
        self._said = output
        with output.open("ab") as out:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        self.pid = self._process.pid

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self._process.poll() is not None

    def until(self, holds: Callable[[], bool], within_s: float, goal: str) -> None:
        """Wait until something holds. Errors: Failed, when the program ends before or the time is
        over.
        """
        deadline = time.monotonic() + within_s
        while not holds():
            if self.is_over:
                raise Failed(
                    f"status {self._process.returncode} before {goal}: {self.output_tail()}"
                )
            if time.monotonic() > deadline:
                raise Failed(f"{goal} did not come within {within_s:.0f} s: {self.output_tail()}")
            time.sleep(POLL_S)

    def end(self) -> None:
        """Let it finish its step and end. Errors: Failed."""
        self._process.send_signal(signal.SIGINT)
        self.wait(END_S)

    def wait(self, within_s: float) -> None:
        """Until it has ended with status 0. Errors: Failed."""
        try:
            status = self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise Failed(f"did not end within {within_s:.0f} s: {self.output_tail()}") from None
        if status:
            raise Failed(f"exit status {status}: {self.output_tail()}")

    def kill(self) -> None:
        """SIGKILL to it and to all that it started, as far as it is known; none is left."""
        processes = everyone(self.pid)
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._process.wait()
        psutil.wait_procs(processes, timeout=10.0)

    def output_tail(self) -> str:
        """The end of what it said."""
        return self._said.read_text(errors="replace")[-2000:]


def started(runs: Path, *flags: str) -> Program:
    """A new run below `runs`."""
    runs.mkdir(parents=True, exist_ok=True)
    return Program(
        [sys.executable, "-m", "bench.chaos.run", "--quiet", "--runs", str(runs), *flags],
        runs / "said",
    )


def resumed(runs: Path) -> Program:
    """The newest run below `runs`, gone on with by the command that a user has for it."""
    return Program(
        [sys.executable, "-m", "dataflow", "resume", str(runs / "latest")], runs / "said"
    )


def judged(runs: Path) -> tuple[bool, str]:
    """Whether `dataflow verify` says clean, and what it says."""
    done = subprocess.run(
        [sys.executable, "-m", "dataflow", "verify", str(runs / "latest")],
        capture_output=True,
        text=True,
        timeout=600,
    )
    return done.returncode == 0, (done.stdout + done.stderr).strip()


def steps_made(runs: Path) -> int:
    """The last step that metrics.jsonl tells of; 0 before there is a folder."""
    with contextlib.suppress(RunFolderError, OSError):
        folder = RunFolder.open(runs / "latest")
        return max(
            (int(line["step"]) for line in folder.scan_metrics()[0] if "loss" in line), default=0
        )
    return 0


def left_behind(runs: Path) -> list[int]:
    """Processes that still write into the logs of a run."""
    folder, pids = (runs / "latest").resolve(), []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if Path(f"/proc/{process.pid}/fd/1").readlink().is_relative_to(folder):
                pids.append(process.pid)
    return pids
