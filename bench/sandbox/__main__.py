"""Hostile programs in the sandbox of `code_reward`, and what a sandbox costs: python -m
bench.sandbox.

Each program runs in a world with things to reach: a listener, sockets, a secret in the home folder
and one in the environment. `contained` says that it got none of them, changed nothing, left nothing
behind and kept to its limits.
"""

import argparse
import contextlib
import os
import secrets
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from bench.report import Report
from bench.sandbox.hostile import GROUPS, Hostile
from operators.sandbox import PythonTest, SandboxLimits, SandboxResult, ScriptTest, fault, run

LIMITS = SandboxLimits(time_s=1.0, total_s=8.0, memory_bytes=512 << 20)
LONGEST_S = 20.0
LARGEST_BYTES = 2 * LIMITS.memory_bytes + LIMITS.file_bytes
_SECRET = "DATAFLOW_BENCH_SECRET"


@dataclass
class World:
    """What a hostile program would like to reach, on this machine."""

    home: Path
    port: int
    abstract: str
    secret: str = field(default_factory=lambda: secrets.token_hex(5))
    reached: list[str] = field(default_factory=list)
    """What was reached of the sockets."""

    def filled(self, text: str) -> str:
        """A program with the names of this world."""
        names = {
            "port": self.port,
            "abstract": self.abstract,
            "home": self.home,
            "secret": self.secret,
        }
        names["socket"] = self.home / "socket"
        for name, value in names.items():
            text = text.replace(f"[[{name}]]", str(value))
        return text


@dataclass(frozen=True)
class Result:
    """What became of a hostile program."""

    outcome: SandboxResult
    seconds: float
    peak_bytes: int
    """Memory of all its processes together, sampled."""
    faults: tuple[str, ...]
    """In what it was not contained."""


@contextlib.contextmanager
def world() -> Iterator[World]:
    """A listener on 127.0.0.1, a socket file, an abstract socket, a home folder and an environment
    with a secret.
    """
    with contextlib.ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        listeners = {
            "tcp": stack.enter_context(socket.socket()),
            "file": stack.enter_context(socket.socket(socket.AF_UNIX)),
            "abstract": stack.enter_context(socket.socket(socket.AF_UNIX)),
        }
        abstract = f"bench-{secrets.token_hex(5)}"
        addresses: dict[str, object] = {
            "tcp": ("127.0.0.1", 0),
            "file": str(home / "socket"),
            "abstract": f"\0{abstract}",
        }
        for name, listener in listeners.items():
            listener.bind(addresses[name])  # type: ignore[arg-type]
            listener.listen()
            listener.setblocking(False)
        attacked = World(home, listeners["tcp"].getsockname()[1], abstract)
        (home / "secret").write_text(attacked.secret)
        os.environ[_SECRET] = attacked.secret
        try:
            yield attacked
        finally:
            del os.environ[_SECRET]
            for name, listener in listeners.items():
                with contextlib.suppress(BlockingIOError):
                    listener.accept()[0].close()
                    attacked.reached.append(name)


_LAST_BREATH_S = 2.0
"""For a killed process to be gone."""


def _alive() -> set[int]:
    """Processes below this one; those that have ended and wait for whoever takes their status are
    not among them.
    """
    pids = set()
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE:
                pids.add(child.pid)
    return pids


def attack(hostile: Hostile) -> Result:
    """Run a hostile program in a new world, and look at what it has done."""
    before = _alive()
    with world() as attacked:
        before_names = sorted(path.name for path in attacked.home.iterdir())
        program = attacked.filled(hostile.program)
        test = ScriptTest("") if hostile.test is None else PythonTest(attacked.filled(hostile.test))
        began = time.monotonic()
        with _peak(before) as peak:
            (outcome,) = run(program, [test], LIMITS)
        seconds = time.monotonic() - began
        deadline = time.monotonic() + _LAST_BREATH_S
        while (orphans := _alive() - before) and time.monotonic() < deadline:
            time.sleep(0.01)
        changed = sorted(path.name for path in attacked.home.iterdir()) != before_names
    printed = f"{outcome.output} {outcome.note}"
    faults = {
        "it says so": "ESCAPED" in outcome.output,
        "it has the secret": attacked.secret in (outcome.output if hostile.test else printed),
        "it passed the test": hostile.test is not None and outcome.passed,
        "it reached a socket": bool(attacked.reached),
        "it changed the home folder": changed,
        "it left processes": bool(orphans),
        "it took too long": seconds > LONGEST_S,
        "it took too much memory": peak[0] > LARGEST_BYTES,
    }
    return Result(
        outcome, seconds, peak[0], tuple(fault for fault, is_so in faults.items() if is_so)
    )


@contextlib.contextmanager
def _peak(before: set[int]) -> Iterator[list[int]]:
    """The most memory that new processes below this one have at once, in bytes, sampled 20 times a
    second.
    """
    peak, is_over = [0], threading.Event()

    def sample() -> None:
        while not is_over.wait(0.05):
            total = 0
            for child in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    total += 0 if child.pid in before else child.memory_info().rss
            peak[0] = max(peak[0], total)

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        yield peak
    finally:
        is_over.set()
        sampler.join()


def cost(tests: int, repeats: int) -> dict[str, float]:
    """Milliseconds of a sandbox with so many assertions, from a program to its outcomes."""
    walls = []
    for _ in range(repeats):
        start = time.perf_counter()
        list(run("def f(x):\n    return x + 1", [PythonTest("assert f(1) == 2")] * tests, LIMITS))
        walls.append((time.perf_counter() - start) * 1e3)
    return {"median_ms": statistics.median(walls), "least_ms": min(walls)}


def rate(at_once: int, rollouts: int) -> float:
    """Sandboxes per second with three assertions each, so many at once."""
    tests = [PythonTest("assert f(1) == 2")] * 3
    start = time.perf_counter()
    with ThreadPoolExecutor(at_once) as pool:
        list(
            pool.map(
                lambda _: list(run("def f(x):\n    return x + 1", tests, LIMITS)), range(rollouts)
            )
        )
    return rollouts / (time.perf_counter() - start)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    if (wrong := fault()) is not None:
        raise SystemExit(wrong)
    report = Report("sandbox", options.json)
    for group, programs in GROUPS.items():
        for hostile in programs:
            result = attack(hostile)
            lines = (result.outcome.note or result.outcome.output).strip().splitlines() or [
                "(nothing)"
            ]
            figures = {"seconds": round(result.seconds, 2), "peak_mb": result.peak_bytes >> 20}
            contained = ", ".join(result.faults) or "yes"
            report.add(
                case=group,
                system=hostile.tries,
                contained=contained,
                it_met=lines[-1][:70],
                **figures,
            )
    for tests in (1, 3, 30):
        report.add(
            case="cost of a sandbox", system=f"{tests} assertions", **cost(tests, options.repeats)
        )
    for at_once in (1, 2, 4):
        report.add(
            case="sandboxes per second",
            system=f"{at_once} at once",
            per_s=rate(at_once, 2 * options.repeats),
        )
    report.show()


if __name__ == "__main__":
    main()
