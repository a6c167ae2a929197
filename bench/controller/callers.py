"""Workers that ask the ledger's service while a scheduler is measured: the source, one generator a
replica, the trainer.

python -m bench.controller.callers, with `Calls` on its standard input, until that is closed. Each
second 64 groups are issued, go through their states at their replicas, and are trained as a step.
What each kind of call took it prints as a line of JSON at its end: a mark is not waited for, `mark`
is how long the caller is held up.
"""

import contextlib
import json
import select
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataflow.folder.ledger_service.client import LedgerClient
from dataflow.system.security import RunKeys

SOURCE, TRAINER = "prompts", "trainer"
GROUPS, STEP_S = 64, 1.0
METRICS = dict.fromkeys((f"metric-{number}" for number in range(40)), 0.123456)
"""Of a step, as many as a trainer tells."""


@dataclass(frozen=True)
class Calls:
    """Where the service is, and how many generators ask."""

    ledger: str
    address: str
    keys: str
    replicas: int

    def to_line(self) -> str:
        """One line of JSON."""
        return json.dumps(vars(self))


def call(calls: Calls, goes_on: Callable[[float], bool]) -> dict[str, list[float]]:
    """Seconds of the calls of each kind, in order of size. goes_on: waits so long, and tells."""
    keys = RunKeys.from_bytes(bytes.fromhex(calls.keys))
    seconds: dict[str, list[float]] = {"issue": [], "mark": [], "commit": []}

    def timed(kind: str, made: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        began = time.monotonic()
        made(*args, **kwargs)
        seconds[kind].append(time.monotonic() - began)

    with contextlib.ExitStack() as open_:

        def joined(worker: str) -> LedgerClient:
            path = Path(calls.ledger)
            client = LedgerClient(path, calls.address, worker=worker, keys=keys)
            return open_.enter_context(client)

        source, trainer = joined(f"{SOURCE}-0"), joined(f"{TRAINER}-0")
        generators = [joined(f"generator-{replica}") for replica in range(calls.replicas)]
        step, due = 0, time.monotonic()
        while goes_on(max(0.0, due - time.monotonic())):
            step, due = step + 1, due + STEP_S
            groups = range(GROUPS * (step - 1), GROUPS * step)
            timed("issue", source.issue, SOURCE, [(group, f"task-{group}") for group in groups])
            for state in ("generating", "generated", "scored"):
                for group in groups:
                    timed(
                        "mark", generators[group % len(generators)].advance, SOURCE, [group], state
                    )
            timed(
                "commit",
                trainer.commit_step,
                TRAINER,
                step,
                version=step,
                source=SOURCE,
                trained=groups,
                metrics=METRICS,
            )
    return {kind: sorted(times) for kind, times in seconds.items()}


def main() -> None:
    """Call until the standard input is closed."""
    calls = Calls(**json.loads(sys.stdin.readline()))
    seconds = call(calls, lambda wait_s: not select.select([sys.stdin], [], [], wait_s)[0])
    print(json.dumps(seconds), flush=True)


if __name__ == "__main__":
    main()
