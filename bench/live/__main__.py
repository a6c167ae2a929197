"""What an open page takes from a run: python -m bench.live --json FILE --minutes 3.

The sorting demo on real processes, without end, and `dataflow live` beside it. The time is cut into windows, in rounds
of four in an order drawn by lot: no page (the server is stopped by a signal), one page, ten pages, a page that never
reads its answers. The pages are processes that ask for what page.js asks for, at its pace, at idle priority, so that
what a browser computes is not in the figures; `client_cpu` is what these took instead.

steps_per_s of a window: steps over the seconds from its first to its last, as metrics.jsonl has them. less: by how many
percent the steps per second are lower than in the window without a page of the same round; the mean over all rounds,
and an interval that holds it with 95% (Student's t, on logarithms). server_cpu: percent of a processor that the server
took. FILE keeps all windows: a further call goes on with it, so that the measurement can be made in short pieces, each
with the machine for itself.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from bench.report import Report
from dataflow.run import run
from graphs.sorting import build

CASES: Mapping[str, int | None] = {"no page": None, "one page": 1, "ten pages": 10, "never reads": 0}
"""Pages of each."""
ENDLESS = 1_000_000
WARM_STEPS = 20
START_S = 120.0
SETTLE_S = 0.7
"""After each change, which belongs to no window."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure for a while, and tell what all windows say."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.live", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="file of all windows, which further calls go on with")
    parser.add_argument("--minutes", type=float, default=3.0, help="to measure now; 0: tell only (default 3)")
    parser.add_argument("--window", type=float, default=6.0, help="seconds of one (default 6)")
    parser.add_argument("--policy", type=Path, help="folder of the policy, to be made once")
    parser.add_argument("--carry", type=Path, help="internal: be the run, in this folder")
    options = parser.parse_args(arguments)
    if options.carry is not None:
        run(build(policy=str(options.policy), eval_every=ENDLESS), steps=ENDLESS, runs=options.carry, quiet=True)
        return 0
    known = options.json is not None and options.json.is_file()
    windows: list[dict[str, Any]] = json.loads(options.json.read_text()) if known else []
    if options.minutes > 0:
        with tempfile.TemporaryDirectory() as temporary, served(Path(temporary), options.policy) as (runs, server, url):
            rounds = 1 + max((window["round"] for window in windows), default=-1)
            over = time.monotonic() + options.minutes * 60 - len(CASES) * (options.window + SETTLE_S)
            while time.monotonic() < over:
                for case in random.Random(rounds).sample(list(CASES), len(CASES)):
                    windows.append({"round": rounds, "case": case, **measured(case, options.window, runs, server, url)})
                rounds += 1
                if options.json is not None:
                    options.json.write_text(json.dumps(windows, indent=0))
    tell(windows)
    return 0


@contextlib.contextmanager
def served(temporary: Path, policy: Path | None) -> Iterator[tuple[Path, psutil.Process, str]]:
    """A run and its page's server: the folder of the run's figures, the server's process, the page's address."""
    policy = policy or temporary / "policy"
    build(policy=str(policy))
    command = [sys.executable, "-m", "bench.live", "--carry", str(temporary / "runs"), "--policy", str(policy)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as running:
        try:
            deadline = time.monotonic() + START_S
            metrics = temporary / "runs" / "latest" / "metrics.jsonl"
            while not metrics.is_file() or len(metrics.read_bytes().splitlines()) < WARM_STEPS:
                if running.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the run made no {WARM_STEPS} steps within {START_S:.0f} s")
                time.sleep(0.2)
            live = [sys.executable, "-m", "dataflow", "live", str(metrics.parent)]
            with subprocess.Popen(live, stdout=subprocess.PIPE, text=True) as server:
                assert server.stdout is not None
                try:
                    server.stdout.readline()
                    yield metrics, psutil.Process(server.pid), server.stdout.readline().strip()
                finally:
                    server.send_signal(signal.SIGCONT)
                    server.terminate()
        finally:
            running.send_signal(signal.SIGINT)
            try:
                running.wait(60)
            except subprocess.TimeoutExpired:
                running.kill()


def measured(case: str, seconds: float, metrics: Path, server: psutil.Process, url: str) -> dict[str, Any]:
    """One window."""
    pages, told = CASES[case], {"cpu_s": 0.0, "answers": 0, "failed": 0, "received": 0}
    if pages is None:
        server.suspend()
        clients = None
    else:
        server.resume()
        command = [sys.executable, "-m", "bench.live.clients", url, str(pages), str(seconds + 2 * SETTLE_S)]
        clients = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    time.sleep(SETTLE_S)
    size, spent, began = metrics.stat().st_size, _cpu(server), time.monotonic()
    time.sleep(seconds)
    took, passed = _cpu(server) - spent, time.monotonic() - began
    rate, steps = _steps(metrics, size)
    if clients is not None:
        told = json.loads(clients.communicate(timeout=60)[0])
    return {
        "steps_per_s": rate, "steps": steps, "server_cpu": 100 * took / passed,
        "client_cpu": 100 * told["cpu_s"] / passed,
        **{name: told[name] for name in ("answers", "failed", "received")},
    }  # fmt: skip


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _steps(metrics: Path, begin: int) -> tuple[float, int]:
    """Steps per second of the lines from a place on, and how many."""
    with metrics.open("rb") as file:
        file.seek(begin)
        lines = [json.loads(line) for line in file.read().splitlines(keepends=True) if line.endswith(b"}\n")]
    ends = [(line["step"], line["seconds"]) for line in lines if "loss" in line]
    (first, then), (last, now) = ends[0], ends[-1]
    return (last - first) / (now - then), len(ends)


def tell(windows: Sequence[Mapping[str, Any]]) -> None:
    """A table over all rounds."""
    report = Report("live")
    by_round: dict[int, dict[str, Mapping[str, Any]]] = {}
    for window in windows:
        by_round.setdefault(window["round"], {})[window["case"]] = window
    whole = [each for each in by_round.values() if len(each) == len(CASES)]
    for case in CASES if whole else ():
        mine = [each[case] for each in whole]
        logs = [math.log(each[case]["steps_per_s"] / each["no page"]["steps_per_s"]) for each in whole]
        less, low, high = (100 * (1 - math.exp(value)) for value in interval(logs))
        report.add(
            case=f"sorting, {len(whole)} rounds, {os.cpu_count()} cores", system=case,
            steps_per_s=statistics.median(each["steps_per_s"] for each in mine),
            less_percent=None if case == "no page" else round(less, 2),
            interval_95=None if case == "no page" else f"{high:.2f} to {low:.2f}",
            server_cpu=statistics.fmean(each["server_cpu"] for each in mine),
            client_cpu=statistics.fmean(each["client_cpu"] for each in mine),
            answers=sum(each["answers"] for each in mine), unanswered=sum(each["failed"] for each in mine),
        )  # fmt: skip
    report.show(Console(width=max(130, Console().width)))


QUANTILES = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 8: 2.306, 10: 2.228, 15: 2.131, 20: 2.086,
             30: 2.042, 60: 2.0, 120: 1.98}  # fmt: skip
"""97.5% of Student's t, by degrees of freedom; between two the wider."""


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean of some values, and between which two numbers it lies with 95%."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, -math.inf, math.inf
    quantile = QUANTILES[max(freedom for freedom in QUANTILES if freedom <= len(values) - 1)]
    half = quantile * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


if __name__ == "__main__":
    sys.exit(main())
