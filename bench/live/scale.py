"""How large a run the page shows: python -m bench.live.scale, with 1,000 operators and 100,000
steps.

The folder is written by the writers of runs; its scheduler is a function that answers for every
node, each time with other figures, so that everything on the page changes once a second. answers:
seconds until the server has answered, the first time and the median of the next ten, and bytes.
browser (headless Chromium, with a software renderer): seconds until the page shows charts, nodes
and rollouts; milliseconds between two frames over ten seconds in which it is asked for a frame all
the time, median, 95th percentile and longest; milliseconds in tasks longer than 50 ms a second;
seconds of its processor a second.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from bench.live.large import graph_of, told, write
from bench.report import Report
from dataflow.folder.run_folder import RunFolder
from dataflow.live.command import PageAnswers
from dataflow.live.server import PageServer

TOKEN = "bench"
AGAIN = 10
WATCHED_S = 10.0
FRAMES = """new Promise(done => {
  const frames = [], tasks = [];
  const observer = new PerformanceObserver(
    list => tasks.push(...list.getEntries().map(e => e.duration)));
  observer.observe({type: 'longtask'});
  const began = performance.now();
  let last = began;
  const next = now => {
    frames.push(now - last);
    last = now;
    if (now - began < %d) requestAnimationFrame(next); else done([frames.slice(1), tasks]);
  };
  requestAnimationFrame(next);
})"""
SHOWN = (
    "document.querySelectorAll('.chart path.a').length >= 6 && document.querySelectorAll('#nodes"
    " td').length > 0 && document.querySelectorAll('#rows tbody tr').length > 0"
)


def main() -> int:
    """Measure, and show the tables."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.live.scale",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, help="file for the JSON lines")
    parser.add_argument("--operators", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--picture", type=Path, help="a photograph of the page, to look at")
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
    report, case = (
        Report("live.scale", options.json),
        f"{options.operators:,} operators, {options.steps:,} steps",
    )
    with tempfile.TemporaryDirectory(prefix="dataflow-bench-") as temporary:
        began = time.monotonic()
        folder = write(Path(temporary), options.operators, options.steps)
        print(f"the folder took {time.monotonic() - began:.0f} s to write", flush=True)
        with served(folder, options.operators) as port:
            for name, figures in answers(port).items():
                report.add(case=f"answers, {case}", system=name, **figures)
            in_browser = browsed(port, Path(temporary), options.picture)
            report.add(case=f"browser, {case}", system="headless Chromium", **in_browser)
    report.show(Console(width=max(120, Console().width)))
    return 0


@contextlib.contextmanager
def served(folder: RunFolder, operators: int) -> Iterator[int]:
    """The page's server in a thread; its port."""
    rows, graph = [0], graph_of(operators)

    def ask(where: RunFolder, patience_s: float) -> Mapping[str, Any]:
        rows[0] += 7
        return told(graph, rows[0])

    loop, server = asyncio.new_event_loop(), PageServer(PageAnswers([folder], ask), TOKEN)
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(server.start(), loop).result(10)
    try:
        yield server.port
    finally:
        asyncio.run_coroutine_threadsafe(server.close(), loop).result(20)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


def get(port: int, address: str) -> bytes:
    """What stands there."""
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        client.request("GET", f"/{TOKEN}/{address}")
        return client.getresponse().read()
    finally:
        client.close()


def answers(port: int) -> dict[str, dict[str, float | int]]:
    """By question: seconds and bytes."""
    while b'"read":1' not in get(port, "api/now").replace(b" ", b"").replace(b"1.0", b"1"):
        pass  # a long file is read in several looks
    keys = "&".join(
        f"key=trainer/{name}"
        for name in (
            "reward_mean",
            "loss",
            "kl",
            "staleness_mean",
            "staleness_max",
            "trained_tokens_per_s",
            *(f"figure_{at}" for at in range(6)),
        )
    )
    questions = {
        "graph": "api/graph",
        "now": "api/now",
        "names": "api/names",
        "marks": "api/marks",
        "twelve series": f"api/series?points=600&{keys}",
        "rollouts": "api/rollouts?node=trainer",
        "rollouts searched": "api/rollouts?node=trainer&search=17",
        "one rollout": "api/rollout?node=trainer&kind=step&step=100000&row=3",
    }
    by_question: dict[str, dict[str, float | int]] = {}
    for name, address in questions.items():
        took = []
        for _ in range(1 + AGAIN):
            began = time.perf_counter()
            size = len(get(port, address))
            took.append(time.perf_counter() - began)
        by_question[name] = {
            "first_ms": took[0] * 1e3,
            "next_ms": statistics.median(took[1:]) * 1e3,
            "bytes": size,
        }
    return by_question


def browsed(
    port: int, temporary: Path, picture: Path | None
) -> dict[str, float | int | str | None]:
    """What a browser does with it; `skipped` says why there is none."""
    from rigs.browsing.chromium import browser, program

    if program() is None:
        return {"skipped": "no Chromium here: apt-get install chromium-headless-shell"}
    with browser(temporary / "browser") as page:
        page.look_like(1280, 900)
        began = time.monotonic()
        page.open(f"http://127.0.0.1:{port}/{TOKEN}/")
        page.wait(SHOWN, 120)
        shown = time.monotonic() - began
        time.sleep(3)
        spent = cpu(page.pid)
        frames, tasks = page.ask(FRAMES % int(WATCHED_S * 1e3))
        spent = cpu(page.pid) - spent
        if picture is not None:
            page.photograph(picture)
        elements = page.ask("document.querySelectorAll('*').length")
    ordered = sorted(frames)
    return {
        "shown_s": shown,
        "frame_ms": statistics.median(ordered),
        "frame_95_ms": ordered[int(len(ordered) * 0.95)],
        "frame_most_ms": ordered[-1],
        "long_ms_per_s": sum(tasks) / WATCHED_S,
        "longest_task_ms": max(tasks, default=0),
        "cpu_per_s": spent / WATCHED_S,
        "elements": elements,
    }


def cpu(pid: int) -> float:
    """Seconds of processor of a process and all below it."""
    whole = 0.0
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            whole += times.user + times.system
    return whole


if __name__ == "__main__":
    sys.exit(main())
