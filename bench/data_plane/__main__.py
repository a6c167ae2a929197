"""How many rollouts per second travel between two processes, and how long a single one takes.

    python -m bench.data_plane --json FILE

Case `throughput`: batches of 64 rollouts of about 1,000 tokens are built from flat arrays, encoded, sent,
received, checked and read. Ours has every guarantee on (credit, acknowledgement, checksum, full validation);
the others give what they give. Rounds alternate between the systems; the figure is the median round.
Case `latency`: single rollouts at a fixed rate, from the moment each was due until it was read.
"""

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol, Self

import zmq

from bench.data_plane.rollouts import Arrays, Rollouts, from_batch, make, read, to_batch
from bench.report import Report
from transport.data import Receiver, Sender, keep_freed_memory

BATCH_ROWS = 64
TOKENS = 1000
WINDOW_BATCHES = 4
SYSTEMS = ("ours_ipc", "ours_tcp", "mp_queue", "torch_queue", "pickle_zmq", "ray")
PATIENCE_S = 60.0


class Producer(Protocol):
    """The sending end of a system, in a process of its own."""

    def send(self, rollouts: Rollouts, issued_ns: int) -> None:
        """Build, encode and send; waits when the other side is full."""

    def flush(self) -> None:
        """Return when everything left."""


class System(Protocol):
    """The receiving end of a system, with a producer process behind it."""

    def order(self, command: list[Any]) -> None:
        """Tell the producer what to send."""

    def receive(self) -> tuple[Arrays, int]:
        """The arrays of the next batch, and when it was issued (monotonic ns)."""

    def done(self) -> None:
        """The last batch was read."""

    def close(self) -> None:
        """End the producer."""


def produce(producer: Producer, commands: Iterable[list[Any]]) -> None:
    """Send what is ordered: ["throughput", batches] or ["latency", rollouts, per second]."""
    many, one = make(BATCH_ROWS, TOKENS), make(1, TOKENS)
    for command in commands:
        if command[0] == "throughput":
            for _ in range(command[1]):
                producer.send(many, time.monotonic_ns())
        else:
            begin = time.monotonic_ns() + 10_000_000
            for number in range(command[1]):
                due = begin + number * 1_000_000_000 // command[2]
                time.sleep(max(0.0, (due - time.monotonic_ns()) / 1e9))
                producer.send(one, due)
        producer.flush()


class OurProducer:
    """Sends over our data plane."""

    def __init__(self, address: str) -> None:
        schema = to_batch(make(1, TOKENS), 0).schema
        self._sender = Sender(edge="bench", sender_id="producer", epoch=1, schema=schema, receivers=[address])
        self._poller = zmq.Poller()
        for socket in self._sender.sockets:
            self._poller.register(socket, zmq.POLLIN)

    def send(self, rollouts: Rollouts, issued_ns: int) -> None:
        """Build, encode and send; wait for credit."""
        batch = to_batch(rollouts, issued_ns)
        while not self._sender.send(batch):
            self._wait()
        self._sender.poll()

    def flush(self) -> None:
        """Return when all is acknowledged."""
        while self._sender.unacknowledged:
            self._wait()

    def _wait(self) -> None:
        if not self._poller.poll(int(PATIENCE_S * 1000)):
            raise TimeoutError(f"the producer waited for the consumer; got nothing in {PATIENCE_S} s")
        self._sender.poll()


class Ours:
    """Receives over our data plane, by ipc or tcp."""

    def __init__(self, kind: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        address = f"ipc://{self._folder.name}/bench" if kind == "ours_ipc" else "tcp://127.0.0.1:*"
        self._receiver = Receiver(
            edge="bench",
            schema=to_batch(make(1, TOKENS), 0).schema,
            address=address,
            capacity_rows=WINDOW_BATCHES * BATCH_ROWS,
        )
        command = [sys.executable, "-m", "bench.data_plane", "--produce", self._receiver.address]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
        self._held: Any = None

    def order(self, command: list[Any]) -> None:
        """One JSON line to the producer."""
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(command) + "\n")
        self._child.stdin.flush()

    def receive(self) -> tuple[Arrays, int]:
        """The next batch; the one before is acknowledged, for it was read."""
        self.done()
        self._held = self._receiver.receive(PATIENCE_S)
        if self._held is None:
            raise TimeoutError(f"the consumer waited for the producer; got nothing in {PATIENCE_S} s")
        return from_batch(self._held.batch)

    def done(self) -> None:
        """Acknowledge the last batch."""
        if self._held is not None:
            self._held.ack()
            self._held = None

    def close(self) -> None:
        """End the producer."""
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait(PATIENCE_S)
        self._receiver.close()
        self._folder.cleanup()


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
    from bench.data_plane import pickle_baselines

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


def run(names: list[str], report: Report, rounds: int, batches: int, seconds: float, per_s: int) -> None:
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
    # What every worker does; the consumers of all systems share this process, so it serves the others as well.
    keep_freed_memory()
    parser = argparse.ArgumentParser(prog="python -m bench.data_plane", description=__doc__)
    parser.add_argument("--json", type=Path, help="file for the JSON lines")
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count (default 7)")
    parser.add_argument("--batches", type=int, default=200, help="batches per throughput round (default 200)")
    parser.add_argument("--seconds", type=float, default=1.0, help="of one latency round (default 1.0)")
    parser.add_argument("--rate", type=int, default=1000, help="rollouts/s for latency (default 1000)")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), help="default: all")
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
