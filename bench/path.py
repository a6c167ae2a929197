"""Which modules a rollout passes: follows those of the demo through all processes of a run, function by function.

    python -m bench.path --json FILE

The demo runs as `make demo` runs it, with a hook in every process that notes each function of the product that is
called while one of the steps in the middle is made. Steps before and after are not looked at, so what starts and ends a
run does not count. Nor do the scheduler and threads that carry no rollout (heartbeats, checkpoints).

rollouts: modules and lines from the prompts to the acknowledgement of the step. weights: those that move weights, which
run in between. Lines are all lines of a module.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from bench.report import Report
from dataflow import run
from graphs import sorting

ROOT = Path(__file__).parents[1]
PRODUCT = ("dataflow", "operators", "transport")
WITHOUT_ROLLOUTS = {"link", "heartbeat", "view", "aside", "checkpoint", "ranks-watch"}
"""Threads by the names that they give themselves."""
FIRST, LAST, STEPS = 20, 40, 60
"""The steps between which is looked, and how many the run makes."""
WAITING, LOOKING, OVER = 0, 1, 2


class Tracer:
    """Notes the functions that are called in this process and in all that are forked from it.

    `folder`: where each process leaves the paths of their files, as PID.json, once looking is over.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._phase = mmap.mmap(-1, 1)  # shared with forks
        self._scheduler = os.getpid()
        self._seen: set[CodeType] = set()
        self._left = False

    def install(self) -> None:
        """In this thread, in all that this process starts, and in its forks."""
        threading.setprofile(self._hook)
        sys.setprofile(self._hook)

    def remove(self) -> None:
        """From this thread and those to come."""
        threading.setprofile(None)
        sys.setprofile(None)

    def enter(self, phase: int) -> None:
        """Tells all processes."""
        self._phase[0] = phase

    def _hook(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or self._phase[0] == WAITING:
            return
        if self._phase[0] == OVER:
            self._leave()
        elif frame.f_code not in self._seen and threading.current_thread().name not in WITHOUT_ROLLOUTS:
            self._seen.add(frame.f_code)

    def _leave(self) -> None:
        if not self._left and os.getpid() != self._scheduler:
            self._left = True
            names = sorted({code.co_filename for code in self._seen})
            (self._folder / f"{os.getpid()}.json").write_text(json.dumps(names))


def modules(folder: Path) -> set[str]:
    """Files of the product in which a process that carries rollouts called a function, from the repository's root."""
    found: set[str] = set()
    for left in folder.glob("*.json"):
        paths = {Path(name) for name in json.loads(left.read_text())}
        own = {str(path.relative_to(ROOT)) for path in paths if path.is_relative_to(ROOT)}
        if any(name.endswith(("/loop.py", "/calls.py")) for name in own):
            found |= {name for name in own if name.split("/")[0] in PRODUCT}
    return found


def follow(work: Path) -> set[str]:
    """Runs the demo under the tracer. Returns `modules` of it; RuntimeError when the run ends too early."""
    tracer, traced, runs = Tracer(work / "traced"), work / "traced", work / "runs"
    traced.mkdir()
    graph = sorting.build(policy=str(work / "policy"), eval_every=1000)
    done = threading.Event()

    def watch() -> None:
        marks = [(FIRST, LOOKING), (LAST, OVER)]
        while marks and not done.wait(0.02):
            lines = [metrics.read_text().count('"step"') for metrics in runs.glob("*/metrics.jsonl")]
            if max(lines, default=0) >= marks[0][0]:
                tracer.enter(marks.pop(0)[1])

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    tracer.install()
    try:
        run(graph, steps=STEPS, runs=runs, quiet=True)
    finally:
        tracer.remove()
        done.set()
        watching.join()
    deadline = time.monotonic() + 10
    while not (found := modules(traced)):
        if time.monotonic() > deadline:
            raise RuntimeError(f"no process left what it called in {traced}; the run may have ended before step {LAST}")
        time.sleep(0.1)
    return found


def lines(names: set[str]) -> int:
    """Of these files together."""
    return sum((ROOT / name).read_text().count("\n") for name in names)


def main() -> None:
    """The command."""
    asks = argparse.ArgumentParser(prog="python -m bench.path", description=__doc__)
    asks.add_argument("--json", type=Path)
    asks.add_argument("--list", action="store_true", help="name the modules too")
    given = asks.parse_args()
    report = Report("path", given.json)
    with tempfile.TemporaryDirectory() as work:
        found = follow(Path(work))
    weights = {name for name in found if name.startswith(("transport/weights", "transport/native"))}
    for case, names in {"rollouts": found - weights, "weights": weights}.items():
        report.add(case=case, system="ours", modules=len(names), lines=lines(names))
        if given.list:
            print(*sorted(names), sep="\n")
    report.show()


if __name__ == "__main__":
    main()
