"""python -m bench.program_starts [--n 20]: how long a program of an agent takes to start, with and
without `imports=`.

Milliseconds from the order until the program has its client and could call, and until its end is
known; medians of starts one after the other, with and without in turn. A program with `openai` is
measured where that is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import select
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.report import Report
from operators.agents.host_line import HostLine

SCRIPTS = {
    "urllib.request": "import json, urllib.request\n",
    "openai": (
        "import openai\nclient = openai.OpenAI(base_url='http://127.0.0.1:9/v1', api_key='none')\n"
    ),
}
"""By what it imports: what a program does until it could call."""
TOLD = "import time\nprint(time.monotonic())\n"
END_S = 60.0


@contextlib.contextmanager
def starter(modules: Sequence[str]) -> Iterator[HostLine]:
    """The process that starts programs, ready."""
    line = HostLine(sys.executable, modules)
    try:
        while not line.is_ready:
            select.select([line], [], [], END_S)
            line.ended()
        yield line
    finally:
        line.close()


def start(line: HostLine, number: int, script: Path) -> tuple[float, float]:
    """Milliseconds until it could call, and until its end is known."""
    began = time.monotonic()
    line.start(
        number,
        {
            "argv": [sys.executable, str(script)],
            "env": {},
            "without": [],
            "marker": f"start-{number}",
            "input": "\n",
            "memory_mb": None,
            "output_bytes": 1 << 20,
        },
    )
    while not (ended := line.ended()):
        select.select([line], [], [], END_S)
    if ended[0].status:
        raise RuntimeError(
            f"the program ended with status {ended[0].status}; found {ended[0].errors}"
        )
    return 1e3 * (float(ended[0].last) - began), 1e3 * (time.monotonic() - began)


def measure(report: Report, name: str, count: int) -> None:
    """A row for each way of one program."""
    ways = {"without": (), "with imports=": (name,)}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as open_:
        script = Path(folder) / "agent.py"
        script.write_text(SCRIPTS[name] + TOLD)
        lines = {way: open_.enter_context(starter(modules)) for way, modules in ways.items()}
        took: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        for number in range(count):
            for way, line in lines.items():
                took[way].append(start(line, number, script))
    for way, pairs in took.items():
        ready, ended = (sorted(column) for column in zip(*pairs, strict=True))
        report.add(
            case=f"a program with {name}, {count} starts",
            system=way,
            **{
                "could call ms": statistics.median(ready),
                "fastest ms": ready[0],
                "slowest ms": ready[-1],
                "ended ms": statistics.median(ended),
            },
        )


def main() -> None:
    """Print a row per program and way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report = Report("program_starts", options.json)
    for name in SCRIPTS:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            measure(report, name, options.n)
    report.show()


if __name__ == "__main__":
    main()
