"""What it takes a run to know what its nodes are at: python -m bench.state_clock --json FILE
--minutes 3.

The sorting demo on real processes, without end, with a learning rate of almost 0, so that a step is
as long at the end as at the beginning. Its workers are forked from a process in which a switch
stands around `NodeLoop.turn`: on, the loop is as it is; off, it asks neither its clock nor what
state it is in (`StateClock.begin` and `end`, `Runtime.starved` and `beside`), so that nobody could
say what the node's time goes into. The trace gets its work and its rests both ways. The switch is a
byte that all processes share; to look at it costs the same either way. The time is cut into windows
of some seconds, with and without in turn.

steps_per_s of a window: steps over the seconds from its first to its last, as metrics.jsonl has
them. less_percent: by how many percent they are fewer with the clock than the mean of the two
windows without around it; the mean over all windows, and an interval that holds it with 95%
(Student's t, on logarithms). `without` itself is compared in the same way with its neighbours of
the same kind: what differs there is chance. cpu_more_percent: by how many percent the run's
processes took more processor time for a step. turns_per_s: transitions of all clocks of the run,
counted in a stretch that belongs to no window; core_percent: of one processor, what so many take by
the table below. FILE keeps all windows: a further call goes on with it; those in which others took
more than 3% of the machine do not count.

Below: nanoseconds of one transition (the beginning of a turn and its end), in this process, without
the run.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from bench.live.intervals import Window, compared, counting, left_out
from bench.live.windows import ENDLESS, carried, cpu_of, steps_of
from bench.report import Report
from dataflow.runner import run
from dataflow.worker.loop import NodeLoop
from dataflow.worker.state_clock import StateClock
from graphs.sorting import build

OFF, ON, COUNT = 0, 1, 2
CASES = {"with": ON, "without": OFF}
"""Of windows, and how the switch stands in them."""
SETTLE_S = 0.3
"""After each change, which belongs to no window."""
COUNT_S = 4.0
TURNS, REPEATS = 50_000, 9


class Switch:
    """A byte in a file that several processes share."""

    def __init__(self, path: Path) -> None:
        """It is made where it is not there, and on."""
        if not path.exists():
            path.write_bytes(bytes([ON]))
        with path.open("r+b") as file:
            self._byte = mmap.mmap(file.fileno(), 1)

    @property
    def stands(self) -> int:
        """OFF, ON, or COUNT: on, and turns are counted."""
        return self._byte[0]

    def put(self, to: int) -> None:
        """Let it stand so."""
        self._byte[0] = to


def switched(switch: Switch, counts: Path) -> Callable[[NodeLoop], bool]:
    """What takes the place of `NodeLoop.turn`. counts: folder for the turns of each process, once
    they were counted.
    """
    whole, byte, counted = NodeLoop.turn, switch._byte, Counter[str]()

    def turn(loop: NodeLoop) -> bool:
        stands = byte[0]
        if stands == OFF:
            began = loop._clock()
            moved = loop._turn()
            loop.spans.turned(began, loop._clock(), "waiting", is_work=moved, beside=0.0)
            return moved
        if stands == COUNT:
            counted[loop.node] += 1
        elif counted:
            (counts / f"turns-{os.getpid()}.json").write_text(json.dumps(counted))
            counted.clear()
        return whole(loop)

    return turn


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure for a while, and tell what all windows say."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.state_clock",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--json", type=Path, help="file of all windows, which further calls go on with"
    )
    parser.add_argument(
        "--minutes", type=float, default=3.0, help="to measure now; 0: tell only (default 3)"
    )
    parser.add_argument("--window", type=float, default=4.0, help="seconds of one (default 4)")
    parser.add_argument("--policy", type=Path, help="folder of the policy, to be made once")
    parser.add_argument("--carry", type=Path, help="internal: be the run, in this folder")
    parser.add_argument("--switch", type=Path, help="internal: where the switch is")
    options = parser.parse_args(arguments)
    if options.carry is not None:
        turn: Any = switched(Switch(options.switch), options.switch.parent)
        NodeLoop.turn = turn  # type: ignore[method-assign]
        graph = build(policy=str(options.policy), lr=1e-12, eval_every=ENDLESS)
        run(graph, steps=ENDLESS, runs=options.carry, quiet=True)
        return 0
    goes_on = options.json is not None and options.json.is_file()
    windows: list[dict[str, Any]] = json.loads(options.json.read_text()) if goes_on else []
    if options.minutes > 0:
        piece = 1 + max((window["piece"] for window in windows), default=-1)
        windows += measured(options.minutes * 60, options.window, options.policy, piece)
        if options.json is not None:
            options.json.write_text(json.dumps(windows, indent=0))
    tell(windows, transitions())
    return 0


def measured(
    seconds: float, window_s: float, policy: Path | None, piece: int
) -> list[dict[str, Any]]:
    """Windows of one run, with and without in turn, which last so long together."""
    began, windows = time.monotonic(), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        temporary = Path(folder)
        switch = Switch(temporary / "switch")
        more = "--switch", str(temporary / "switch")
        with carried(temporary, "bench.state_clock", policy, *more) as (metrics, process):
            switch.put(COUNT)
            time.sleep(COUNT_S)
            switch.put(ON)
            time.sleep(SETTLE_S)
            counts = [json.loads(path.read_text()) for path in temporary.glob("turns-*.json")]
            turns_per_s = sum(sum(count.values()) for count in counts) / COUNT_S
            whole = psutil.Process(process.pid)
            while time.monotonic() - began < seconds - window_s - SETTLE_S:
                case = ("without", "with")[len(windows) % 2]
                switch.put(CASES[case])
                time.sleep(SETTLE_S)
                windows.append(
                    {
                        "piece": piece,
                        "case": case,
                        "turns_per_s": turns_per_s,
                        **window(metrics, whole, window_s),
                    }
                )
    return windows


def window(metrics: Path, process: psutil.Process, seconds: float) -> dict[str, float]:
    """How a run goes for so long."""
    size, before, began = metrics.stat().st_size, _spent(process), time.monotonic()
    time.sleep(seconds)
    after, passed = _spent(process), time.monotonic() - began
    took = {name: after[name] - before[name] for name in after}
    rate, steps = steps_of(metrics, size)
    return {
        "steps_per_s": rate,
        "steps": steps,
        "cpu_per_step": took["run"] / passed / rate if rate else 0.0,
        "foreign": 100 * (took["all"] - took["run"]) / passed / (os.cpu_count() or 1),
    }


def _spent(process: psutil.Process) -> dict[str, float]:
    """Processor seconds so far, of the run and of all together."""
    machine = psutil.cpu_times()
    idle = machine.idle + machine.iowait
    return {
        "run": sum(map(cpu_of, [process, *process.children(recursive=True)])),
        "all": sum(machine) - machine.guest - machine.guest_nice - idle,
    }


def transitions() -> dict[str, float]:
    """Nanoseconds of one, by what it is, the least of some repeats: with both readings of the time,
    as in a loop.
    """
    clock = StateClock(time.monotonic())

    def nothing() -> None:
        time.monotonic()
        time.monotonic()

    def idle() -> None:
        clock.begin(time.monotonic())
        clock.end(time.monotonic(), "waiting", is_work=False)

    def work() -> None:
        clock.begin(time.monotonic())
        clock.end(time.monotonic(), "waiting", is_work=True)

    def beside() -> None:
        clock.begin(time.monotonic())
        clock.end(time.monotonic(), "blocked", is_work=True, beside=0.5)

    def read() -> None:
        clock.read(time.monotonic())

    kinds = {
        "two readings of the time": nothing,
        "a turn that found nothing": idle,
        "a turn that worked": work,
        "a turn that worked, beside processes": beside,
        "a report": read,
    }
    return {name: _nanoseconds(kind) for name, kind in kinds.items()}


def _nanoseconds(call: Callable[[], None]) -> float:
    def once() -> float:
        began = time.perf_counter()
        for _ in range(TURNS):
            call()
        return 1e9 * (time.perf_counter() - began) / TURNS

    return min(once() for _ in range(REPEATS))


def tell(windows: Sequence[Window], nanoseconds: dict[str, float]) -> None:
    """Both tables."""
    report = Report("state clock")
    counted = counting(windows)
    for case in CASES:
        if not (figures := compared(counted, case, none="without")):
            continue
        mine = [window for window in counted if window["case"] == case]
        turns = statistics.fmean(window["turns_per_s"] for window in mine)
        per_turn = nanoseconds["a turn that worked"]
        report.add(
            case=(
                f"sorting, {sum(bool(window['case']) for window in counted)} windows,"
                f" {os.cpu_count()}"
                " cores"
            ),
            system=case,
            **figures,
            **(
                {"turns_per_s": turns, "core_percent": 1e-7 * turns * per_turn}
                if case == "with"
                else {}
            ),
        )
    for name, figure in nanoseconds.items():
        report.add(case="one transition, in one process", system=name, nanoseconds=figure)
    report.show(Console(width=max(160, Console().width)))
    if note := left_out(counted):
        print(note)


if __name__ == "__main__":
    sys.exit(main())
