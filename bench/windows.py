"""Windows of a run that goes on, each under another condition, in rounds: what else the machine does meets all."""

from __future__ import annotations

import contextlib
import json
import math
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from dataflow.run import run
from graphs.sorting import build

ENDLESS = 1_000_000
WARM_STEPS = 20
START_S = 120.0
QUANTILES = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 8: 2.306, 10: 2.228, 15: 2.131, 20: 2.086,
             30: 2.042, 60: 2.0, 120: 1.98}  # fmt: skip
"""97.5% of Student's t, by degrees of freedom; between two the wider."""


def carry(folder: Path, policy: Path) -> None:
    """Be the run: the sorting demo, without end."""
    run(build(policy=str(policy), eval_every=ENDLESS), steps=ENDLESS, runs=folder, quiet=True)


@contextlib.contextmanager
def carried(module: str, policy: Path | None) -> Iterator[Path]:
    """The run that `python -m MODULE --carry FOLDER --policy POLICY` is, at work until this ends: its metrics.jsonl.

    policy: where the demo's is, to be made once; None: it is made now."""
    with tempfile.TemporaryDirectory() as temporary:
        runs, policy = Path(temporary) / "runs", policy or Path(temporary) / "policy"
        build(policy=str(policy))
        command = [sys.executable, "-m", module, "--carry", str(runs), "--policy", str(policy)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as running:
            try:
                deadline = time.monotonic() + START_S
                metrics = runs / "latest" / "metrics.jsonl"
                while not metrics.is_file() or len(metrics.read_bytes().splitlines()) < WARM_STEPS:
                    if running.poll() is not None or time.monotonic() > deadline:
                        raise RuntimeError(f"the run made no {WARM_STEPS} steps within {START_S:.0f} s")
                    time.sleep(0.2)
                yield metrics
            finally:
                running.send_signal(signal.SIGINT)
                try:
                    running.wait(60)
                except subprocess.TimeoutExpired:
                    running.kill()


def steps_since(metrics: Path, begin: int) -> tuple[float, int]:
    """Steps per second of the lines from a place on, and how many."""
    with metrics.open("rb") as file:
        file.seek(begin)
        lines = [json.loads(line) for line in file.read().splitlines(keepends=True) if line.endswith(b"}\n")]
    ends = [(line["step"], line["seconds"]) for line in lines if "loss" in line]
    (first, then), (last, now) = ends[0], ends[-1]
    return (last - first) / (now - then), len(ends)


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean of some values, and between which two numbers it lies with 95%."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, -math.inf, math.inf
    quantile = QUANTILES[max(freedom for freedom in QUANTILES if freedom <= len(values) - 1)]
    half = quantile * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half
