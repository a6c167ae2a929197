"""A run, the server of its page, and pages that come and go: what each took in some seconds."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from graphs.sorting import build

ENDLESS = 1_000_000
WARM_STEPS = 30
NO_PAGE = "0"
START_S = 120.0
"""For the run to be warm."""
LINE_S = 60.0
"""For a line of a process that answers: pages wait for the server, 40 s at most."""
END_S = 60.0
_PASS_S = 0.1
"""For what pages have asked for to be answered, before the server is stopped."""
_CLIENTS = "the process of the pages"


@dataclass(frozen=True)
class Place:
    """A run with a page."""

    metrics: Path
    run: psutil.Process
    server: psutil.Process
    url: str


@contextlib.contextmanager
def carried(
    temporary: Path, module: str, policy: Path | None, *more: str
) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    """The sorting demo without end, as `python -m MODULE --carry FOLDER` is it, once it has made
    some steps: its metrics.jsonl, and its process.
    """
    policy = policy or temporary / "policy"
    build(policy=str(policy))
    command = [
        sys.executable,
        "-m",
        module,
        "--carry",
        str(temporary / "runs"),
        "--policy",
        str(policy),
        *more,
    ]
    with (
        (temporary / "run.log").open("wb") as log,
        subprocess.Popen(command, stdout=log, stderr=log) as running,
    ):
        try:
            deadline = time.monotonic() + START_S
            metrics = temporary / "runs" / "latest" / "metrics.jsonl"
            while not metrics.is_file() or len(metrics.read_bytes().splitlines()) < WARM_STEPS:
                if running.poll() is not None or time.monotonic() > deadline:
                    log_tail = (temporary / "run.log").read_text()[-2000:]
                    raise RuntimeError(
                        f"the run made no {WARM_STEPS} steps within {START_S:.0f} s: {log_tail}"
                    )
                time.sleep(0.2)
            yield metrics, running
        finally:
            running.send_signal(signal.SIGINT)
            end(running, END_S)


def end(process: subprocess.Popen[Any], within_s: float) -> None:
    """Wait for a process that was asked to end, and kill it when the time is over."""
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(END_S)


def said_line(process: subprocess.Popen[str], name: str, within_s: float = LINE_S) -> str:
    """The next line of a process. Raises RuntimeError where it says none within so many seconds,
    after which it is killed, or has ended.

    name: for the error.
    """
    assert process.stdout is not None
    late = threading.Timer(within_s, process.kill)
    late.start()
    try:
        line = process.stdout.readline()
    finally:
        late.cancel()
    if not line.endswith("\n"):
        raise RuntimeError(
            f"{name} said nothing within {within_s:.0f} s, or has ended; found {line!r:.80}; run it"
            " again"
        )
    return line


@contextlib.contextmanager
def served(temporary: Path, policy: Path | None) -> Iterator[Place]:
    """The sorting demo without end, and the server of its page."""
    with carried(temporary, "bench.live", policy) as (metrics, running):
        live = [sys.executable, "-m", "dataflow", "live", str(metrics.parent)]
        with subprocess.Popen(live, stdout=subprocess.PIPE, text=True) as server:
            try:
                said_line(server, "the server of the page")
                url = said_line(server, "the server of the page").strip()
                yield Place(metrics, psutil.Process(running.pid), psutil.Process(server.pid), url)
            finally:
                server.send_signal(signal.SIGCONT)
                server.terminate()
                end(server, END_S)


class Beside:
    """Pages beside a run, opened once; without one the server stands still."""

    def __init__(self, place: Place) -> None:
        self._place, self._pages = place, NO_PAGE
        command = [sys.executable, "-m", "bench.live.clients", place.url]
        self._clients = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._client = psutil.Process(self._clients.pid)
        try:
            said_line(self._clients, _CLIENTS, START_S)  # all have loaded
        except BaseException:
            end(self._clients, 0.0)
            raise

    def __enter__(self) -> Beside:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._place.server.resume()
        end(self._clients, 0.0)

    def show(self, pages: str) -> None:
        """Let there be so many from now on: a number, or `clients.NEVER`."""
        self._pages = pages
        if pages == NO_PAGE:
            self._told()
            time.sleep(_PASS_S)
            self._place.server.suspend()
        else:
            self._place.server.resume()
            self._told()

    def window(self, seconds: float) -> dict[str, Any]:
        """How things go for so long."""
        self._told()
        place, size = self._place, self._place.metrics.stat().st_size
        before, began = self._spent(), time.monotonic()
        time.sleep(seconds)
        after, passed = self._spent(), time.monotonic() - began
        took = {name: after[name] - before[name] for name in after}
        rate, steps = steps_of(place.metrics, size)
        counts = self._told()
        cores = os.cpu_count() or 1
        foreign = took["all"] - took["run"] - took["server"] - took["client"]
        return {
            "steps_per_s": rate,
            "steps": steps,
            "cpu_per_step": took["run"] / passed / rate if rate else 0.0,
            "server_cpu": 100 * took["server"] / passed,
            "client_cpu": 100 * took["client"] / passed,
            "foreign": 100 * foreign / passed / cores,
            "idle": 100 * took["idle"] / passed / cores,
            **counts,
        }

    def _told(self) -> dict[str, int]:
        """What pages have done since they were told how many they are, which they are told
        again.
        """
        assert self._clients.stdin is not None
        self._clients.stdin.write(f"{self._pages}\n")
        self._clients.stdin.flush()
        counts: dict[str, int] = json.loads(said_line(self._clients, _CLIENTS))
        return counts

    def _spent(self) -> dict[str, float]:
        """Processor seconds so far: of the run, the server, the pages, of all together, and of
        nobody.
        """
        machine = psutil.cpu_times()
        idle = machine.idle + machine.iowait
        run = [self._place.run, *self._place.run.children(recursive=True)]
        return {
            "run": sum(map(cpu_of, run)),
            "server": cpu_of(self._place.server),
            "client": cpu_of(self._client),
            "idle": idle,
            "all": sum(machine) - machine.guest - machine.guest_nice - idle,
        }


def cpu_of(process: psutil.Process) -> float:
    """Processor seconds so far; 0 where it has ended."""
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def steps_of(metrics: Path, begin: int) -> tuple[float, int]:
    """Steps per second of the lines from a place on, and how many; 0 where there are less than
    two.
    """
    with metrics.open("rb") as file:
        file.seek(begin)
        lines = [
            json.loads(line)
            for line in file.read().splitlines(keepends=True)
            if line.endswith(b"}\n")
        ]
    ends = [(line["step"], line["seconds"]) for line in lines if "loss" in line]
    if len(ends) < 2:
        return 0.0, len(ends)
    (first, then), (last, now) = ends[0], ends[-1]
    return (last - first) / (now - then), len(ends)
