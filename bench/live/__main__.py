"""What an open page takes from a run: python -m bench.live --json FILE --minutes 3.

The sorting demo on real processes, without end, and `dataflow live` beside it. Its learning rate is
almost 0, so that a step is as long at the end as at the beginning. The time is cut into windows of
some seconds; every second one is without a page (the server is stopped by a signal), those between
them are in turn, in an order drawn by lot, with one page, with ten, with one that never reads its
answers. The pages are a process that asks for what page.js asks for, at its pace, at idle priority
and with as little work as may be: what a browser computes is not in the figures, and `client_cpu`
says what these took instead.

steps_per_s of a window: steps over the seconds from its first to its last, as metrics.jsonl has
them. less_percent: by how many percent they are fewer than the mean of the two windows without a
page around it; the mean over all windows, and an interval that holds it with 95% (Student's t, on
logarithms). `no page` itself is compared in the same way with its neighbours of the same kind: what
differs there is chance. cpu_more_percent: by how many percent the run's processes took more
processor time for a step, in the same way. server_cpu, client_cpu: percent of one processor. idle:
percent of all processors that nobody took. FILE keeps all windows: a further call goes on with it,
so that the measurement can be made in short pieces, each with the machine for itself; windows in
which others took more than 3% of it do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.live.intervals import NONE, Window, compared, counting, left_out
from bench.live.windows import ENDLESS, NO_PAGE, Beside, served
from bench.report import Report
from dataflow.runner import run
from graphs.sorting import build

CASES = {"one page": "1", "ten pages": "10", "never reads": "never"}
"""And the word for each."""
SETTLE_S = 0.6
"""After each change, which belongs to no window."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure for a while, and tell what all windows say."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.live",
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
    options = parser.parse_args(arguments)
    if options.carry is not None:
        graph = build(policy=str(options.policy), lr=1e-12, eval_every=ENDLESS)
        run(graph, steps=ENDLESS, runs=options.carry, quiet=True)
        return 0
    goes_on = options.json is not None and options.json.is_file()
    windows: list[dict[str, Any]] = json.loads(options.json.read_text()) if goes_on else []
    if options.minutes > 0:
        began, piece = (
            time.monotonic(),
            1 + max((window["piece"] for window in windows), default=-1),
        )
        with (
            tempfile.TemporaryDirectory() as temporary,
            served(Path(temporary), options.policy) as place,
            Beside(place) as beside,
        ):
            for case in _cases(piece):
                if time.monotonic() - began > options.minutes * 60 - options.window - SETTLE_S:
                    break
                beside.show(CASES.get(case, NO_PAGE))
                time.sleep(SETTLE_S)
                windows.append({"piece": piece, "case": case, **beside.window(options.window)})
        if options.json is not None:
            options.json.write_text(json.dumps(windows, indent=0))
    tell(windows)
    return 0


def _cases(seed: int) -> Iterator[str]:
    """No page, a case, no page, and so on; each of the cases once before any comes again."""
    chance = random.Random(seed)
    while True:
        for case in chance.sample(list(CASES), len(CASES)):
            yield NONE
            yield case


def tell(windows: Sequence[Window]) -> None:
    """A table over all windows."""
    report = Report("live")
    counted = counting(windows)
    for case in (NONE, *CASES):
        mine = [window for window in counted if window["case"] == case]
        if not (figures := compared(counted, case)):
            continue
        report.add(
            case=(
                f"sorting, {sum(bool(window['case']) for window in counted)} windows,"
                f" {os.cpu_count()}"
                " cores"
            ),
            system=case,
            **figures,
            **{
                name: statistics.fmean(window[name] for window in mine)
                for name in ("server_cpu", "client_cpu", "idle")
            },
            answers=sum(window["answers"] for window in mine),
            unanswered=sum(window["failed"] for window in mine),
        )
    report.show(Console(width=max(160, Console().width)))
    if note := left_out(counted):
        print(note)


if __name__ == "__main__":
    sys.exit(main())
