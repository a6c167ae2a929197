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
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from bench.report import Report
from bench.windows import carried, carry, interval, steps_since

CASES: Mapping[str, int | None] = {"no page": None, "one page": 1, "ten pages": 10, "never reads": 0}
"""Pages of each."""
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
        carry(options.carry, options.policy)
        return 0
    known = options.json is not None and options.json.is_file()
    windows: list[dict[str, Any]] = json.loads(options.json.read_text()) if known else []
    if options.minutes > 0:
        with served(options.policy) as (metrics, server, url):
            rounds = 1 + max((window["round"] for window in windows), default=-1)
            over = time.monotonic() + options.minutes * 60 - len(CASES) * (options.window + SETTLE_S)
            while time.monotonic() < over:
                for case in random.Random(rounds).sample(list(CASES), len(CASES)):
                    found = measured(case, options.window, metrics, server, url)
                    windows.append({"round": rounds, "case": case, **found})
                rounds += 1
                if options.json is not None:
                    options.json.write_text(json.dumps(windows, indent=0))
    tell(windows)
    return 0


@contextlib.contextmanager
def served(policy: Path | None) -> Iterator[tuple[Path, psutil.Process, str]]:
    """A run and its page's server: the file of the run's figures, the server's process, the page's address."""
    with carried("bench.live", policy) as metrics:
        live = [sys.executable, "-m", "dataflow", "live", str(metrics.parent)]
        with subprocess.Popen(live, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            try:
                server.stdout.readline()
                yield metrics, psutil.Process(server.pid), server.stdout.readline().strip()
            finally:
                server.send_signal(signal.SIGCONT)
                server.terminate()


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
    rate, steps = steps_since(metrics, size)
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


if __name__ == "__main__":
    sys.exit(main())
