"""python -m bench.ledger_service [--steps 300]: what the ledger costs a run, as a file and by way
of its service.

The pattern of the demo: per step 32 groups are issued, marked three times on their way, eight at a
time, and trained. Milliseconds are those that whoever calls waits; a mark is not waited for where
the service has the ledger.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from bench.report import Report
from dataflow.folder.ledger import BaseLedger, Ledger
from dataflow.folder.ledger_service.client import LedgerClient
from dataflow.folder.ledger_service.service import LedgerProcess
from dataflow.system.security import RunKeys

GROUPS, MARKED = 32, 8
METRICS = dict.fromkeys(
    ("loss", "reward", "grad_norm", "kl", "ratio", "staleness", "seconds", "tokens"), 0.123456
)


@contextlib.contextmanager
def as_file(path: Path) -> Iterator[Callable[[str], BaseLedger]]:
    """Each process opens the file, as on one host."""
    yield lambda worker: Ledger.open(path)


@contextlib.contextmanager
def by_service(
    path: Path, address: str, keys: RunKeys | None
) -> Iterator[Callable[[str], BaseLedger]]:
    """A process has it open for all."""
    with LedgerProcess() as service:
        at = service.serve(path, address, keys)
        yield lambda worker: LedgerClient(path, at, worker=worker, keys=keys)


def measure(opened: Callable[[str], BaseLedger], steps: int) -> dict[str, float]:
    """Milliseconds of each kind of call, and groups per second of all together."""
    waited: dict[str, list[float]] = {"issue": [], "mark": [], "step": [], "flush": []}

    def timed(kind: str, call: Callable[[], object]) -> None:
        began = time.perf_counter()
        call()
        waited[kind].append(1e3 * (time.perf_counter() - began))

    with (
        opened("prompts-0") as prompts,
        opened("generator-0") as generator,
        opened("trainer-0") as trainer,
    ):
        began = time.perf_counter()
        for step in range(1, steps + 1):
            groups = range(GROUPS * (step - 1), GROUPS * step)
            named = [(group, f"task-{group}") for group in groups]
            timed("issue", partial(prompts.issue, "prompts", named))
            for state in ("generating", "generated", "scored"):
                for first in range(0, GROUPS, MARKED):
                    timed(
                        "mark",
                        partial(
                            generator.advance, "prompts", groups[first : first + MARKED], state
                        ),
                    )
            commit = partial(
                trainer.commit_step,
                "trainer",
                step,
                version=step,
                source="prompts",
                trained=groups,
                metrics=METRICS,
            )
            timed("step", commit)
            if step % 50 == 0:
                timed("flush", trainer.flush)
        seconds = time.perf_counter() - began
    medians = {f"{kind} ms": statistics.median(times) for kind, times in waited.items()}
    return medians | {
        "step p99 ms": sorted(waited["step"])[int(0.99 * steps)],
        "groups/s": GROUPS * steps / seconds,
    }


def main() -> None:
    """Print a row per way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report = Report("ledger_service", options.json)
    for name, listens, keys in (
        ("file", "", None),
        ("service, ipc", "ipc://{}/service", None),
        ("service, tcp with CURVE", "tcp://127.0.0.1:*", RunKeys.make()),
    ):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "ledger.db"
            Ledger.create(path, {"trainer": ["prompts"]}).close()
            way = by_service(path, listens.format(folder), keys) if listens else as_file(path)
            with way as opened:
                report.add(
                    case=f"{options.steps} steps of {GROUPS} groups",
                    system=name,
                    **measure(opened, options.steps),
                )
    report.show()


if __name__ == "__main__":
    main()
