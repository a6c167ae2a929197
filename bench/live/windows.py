"""A run, the server of its page, and pages that come and go: what each took in some seconds."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
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
START_S = 120.0
_PASS_S = 0.1
"""For what pages have asked for to be answered, before the server is stopped."""


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
) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:  # fmt: skip
    """The sorting demo without end, as `python -m MODULE --carry FOLDER` is it, once it has made some steps: its
    metrics.jsonl, and its process."""
    policy = policy or temporary / "policy"
    build(policy=str(policy))
    command = [sys.executable, "-m", module, "--carry", str(temporary / "runs"), "--policy", str(policy), *more]
    with (temporary / "run.log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as running:
        try:
            deadline = time.monotonic() + START_S
            metrics = temporary / "runs" / "latest" / "metrics.jsonl"
            while not metrics.is_file() or len(metrics.read_bytes().splitlines()) < WARM_STEPS:
                if running.poll() is not None or time.monotonic() > deadline:
                    said = (temporary / "run.log").read_text()[-2000:]
                    raise RuntimeError(f"the run made no {WARM_STEPS} steps within {START_S:.0f} s: {said}")
                time.sleep(0.2)
            yield metrics, running
        finally:
            running.send_signal(signal.SIGINT)
            try:
                running.wait(60)
            except subprocess.TimeoutExpired:
                running.kill()


@contextlib.contextmanager
def served(temporary: Path, policy: Path | None) -> Iterator[Place]:
    """The sorting demo without end, and the server of its page."""
    with carried(temporary, "bench.live", policy) as (metrics, running):
        live = [sys.executable, "-m", "dataflow", "live", str(metrics.parent)]
        with subprocess.Popen(live, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            try:
                server.stdout.readline()
                url = server.stdout.readline().strip()
                yield Place(metrics, psutil.Process(running.pid), psutil.Process(server.pid), url)
            finally:
                server.send_signal(signal.SIGCONT)
                server.terminate()


class Beside:
    """Pages beside a run, opened once; without one the server stands still."""

    def __init__(self, place: Place) -> None:
        self._place = place
        command = [sys.executable, "-m", "bench.live.clients", place.url]
        self._clients = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._pages = psutil.Process(self._clients.pid)
        assert self._clients.stdout is not None
        self._clients.stdout.readline()

    def __enter__(self) -> Beside:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._place.server.resume()
        self._clients.kill()
        self._clients.wait(10)

    def show(self, word: str) -> None:
        """Let there be so many pages from now on."""
        if word == "0":
            self._say(word)
            time.sleep(_PASS_S)
            self._place.server.suspend()
        else:
            self._place.server.resume()
            self._say(word)
        self._word = word

    def window(self, seconds: float) -> dict[str, Any]:
        """How things go for so long."""
        self._say(self._word)
        place, size = self._place, self._place.metrics.stat().st_size
        before, began = self._spent(), time.monotonic()
        time.sleep(seconds)
        after, passed = self._spent(), time.monotonic() - began
        took = {name: after[name] - before[name] for name in after}
        rate, steps = steps_of(place.metrics, size)
        told = self._say(self._word)
        cores = os.cpu_count() or 1
        foreign = took["all"] - took["run"] - took["server"] - took["client"]
        return {
            "steps_per_s": rate, "steps": steps, "cpu_per_step": took["run"] / passed / rate if rate else 0.0,
            "server_cpu": 100 * took["server"] / passed, "client_cpu": 100 * took["client"] / passed,
            "foreign": 100 * foreign / passed / cores, "idle": 100 * took["idle"] / passed / cores,
            **told,
        }  # fmt: skip

    def _say(self, word: str) -> dict[str, int]:
        assert self._clients.stdin is not None and self._clients.stdout is not None
        self._clients.stdin.write(f"{word}\n")
        self._clients.stdin.flush()
        found: dict[str, int] = json.loads(self._clients.stdout.readline())
        return found

    def _spent(self) -> dict[str, float]:
        """Processor seconds so far: of the run, the server, the pages, of all together, and of nobody."""
        machine = psutil.cpu_times()
        idle = machine.idle + machine.iowait
        run = [self._place.run, *self._place.run.children(recursive=True)]
        return {
            "run": sum(map(cpu_of, run)), "server": cpu_of(self._place.server), "client": cpu_of(self._pages),
            "idle": idle, "all": sum(machine) - machine.guest - machine.guest_nice - idle,
        }  # fmt: skip


def cpu_of(process: psutil.Process) -> float:
    """Processor seconds so far; 0 where it has ended."""
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def steps_of(metrics: Path, begin: int) -> tuple[float, int]:
    """Steps per second of the lines from a place on, and how many; 0 where there are less than two."""
    with metrics.open("rb") as file:
        file.seek(begin)
        lines = [json.loads(line) for line in file.read().splitlines(keepends=True) if line.endswith(b"}\n")]
    ends = [(line["step"], line["seconds"]) for line in lines if "loss" in line]
    if len(ends) < 2:
        return 0.0, len(ends)
    (first, then), (last, now) = ends[0], ends[-1]
    return (last - first) / (now - then), len(ends)
