"""How many rollouts per second travel between two processes, and how long a single one takes.

    python -m bench.data_plane --json FILE

Case `throughput`: batches of 64 rollouts of about 1,000 tokens are built from flat arrays, encoded,
sent, received, checked and read. Ours has every guarantee on (credit, acknowledgement, checksum,
full validation); the others give what they give. Rounds alternate between the systems; the figure
is the median round. Case `latency`: single rollouts at a fixed rate, from the moment each was due
until it was read.
"""

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Self

from bench.data_plane import pickle_baselines
from bench.data_plane.ends import BATCH_ROWS, System, produce
from bench.data_plane.ours import OurProducer, Ours
from bench.data_plane.rollouts import read
from bench.report import Report
from transport.data import keep_freed_memory

SYSTEMS = ("ours_ipc", "ours_tcp", "mp_queue", "torch_queue", "pickle_zmq", "ray")


class Systems:
    """Every system that can run here, with its producer waiting."""

    def __init__(self, names: Iterable[str]) -> None:
        self.running: dict[str, System] = {}
        self.skipped: dict[str, str] = {}
        for name in names:
            if name == "ray" and importlib.util.find_spec("ray") is None:
                self.skipped[name] = "skipped: install the bench extra"
            else:
                self.running[name] = _open(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for system in self.running.values():
            system.close()


def _open(name: str) -> System:
    if name.startswith("ours"):
        return Ours(name)
    if name == "ray":
        from bench.data_plane.ray_baseline import RayActors

        return RayActors()
    return pickle_baselines.SYSTEMS[name]()


def throughput(system: System, batches: int) -> float:
    """Rollouts per second of one round."""
    begin = time.perf_counter()
    system.order(["throughput", batches])
    for _ in range(batches):
        arrays, _issued_ns = system.receive()
        read(arrays)
    system.done()
    return batches * BATCH_ROWS / (time.perf_counter() - begin)


def latency(system: System, rollouts: int, per_s: int) -> tuple[float, float]:
    """Median and 99th percentile of one round, in milliseconds."""
    taken_ms = []
    system.order(["latency", rollouts, per_s])
    for _ in range(rollouts):
        arrays, issued_ns = system.receive()
        read(arrays)
        taken_ms.append((time.monotonic_ns() - issued_ns) / 1e6)
    system.done()
    taken_ms.sort()
    return taken_ms[len(taken_ms) // 2], taken_ms[len(taken_ms) * 99 // 100]


def run(
    names: list[str], report: Report, rounds: int, batches: int, seconds: float, per_s: int
) -> None:
    """All cases; rounds alternate between the systems, and the first of each only warms up."""
    with Systems(names) as systems:
        rates: dict[str, list[float]] = {name: [] for name in systems.running}
        for _ in range(rounds + 1):
            for name, system in systems.running.items():
                rates[name].append(throughput(system, batches))
        waits: dict[str, list[tuple[float, float]]] = {name: [] for name in systems.running}
        for _ in range(rounds):
            for name, system in systems.running.items():
                waits[name].append(latency(system, max(1, round(seconds * per_s)), per_s))
        for name in names:
            if name in systems.skipped:
                report.add(case="throughput", system=name, skipped=systems.skipped[name])
                continue
            counted = rates[name][1:]
            report.add(
                case="throughput",
                system=name,
                rollouts_per_s=round(statistics.median(counted)),
                least=round(min(counted)),
                most=round(max(counted)),
            )
        for name in names:
            if name in systems.skipped:
                report.add(case="latency", system=name, skipped=systems.skipped[name])
                continue
            middle, high = (statistics.median(column) for column in zip(*waits[name], strict=True))
            report.add(case="latency", system=name, p50_ms=round(middle, 3), p99_ms=round(high, 3))


def _commands() -> Iterator[list[Any]]:
    for line in sys.stdin:
        yield json.loads(line)


def main() -> None:
    """Run the bench, or, with --produce, the sending end of one system."""
    # What every worker does; the consumers of all systems share this process, so it serves the
    # others as well.
    keep_freed_memory()
    parser = argparse.ArgumentParser(prog="python -m bench.data_plane", description=__doc__)
    parser.add_argument("--json", type=Path, help="file for the JSON lines")
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count (default 7)")
    parser.add_argument(
        "--batches", type=int, default=200, help="batches per throughput round (default 200)"
    )
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="of one latency round (default 1.0)"
    )
    parser.add_argument(
        "--rate", type=int, default=1000, help="rollouts/s for latency (default 1000)"
    )
    parser.add_argument(
        "--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), help="default: all"
    )
    parser.add_argument("--produce", metavar="ADDRESS", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.produce:
        produce(OurProducer(options.produce), _commands())
        return
    report = Report("data_plane", options.json)
    run(options.systems, report, options.rounds, options.batches, options.seconds, options.rate)
    report.show()


if __name__ == "__main__":
    main()
