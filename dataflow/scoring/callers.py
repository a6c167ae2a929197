"""Makes a scorer's calls: in a pool of processes, or in this process."""

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from dataflow.scoring.calls import PoolSettings
from dataflow.scoring.knobs import ScorerKnobs
from dataflow.scoring.pool import Answer, Pool
from dataflow.scoring.process import Encode
from dataflow.scoring.retrying import WORLD_ERRORS
from dataflow.scoring.return_values import describe
from dataflow.scoring.signature import code_of
from dataflow.scoring.values import pack, prepare


class Caller(Protocol):
    """Something that makes calls: `Pool`, or `InWorker`."""

    restarts: int
    """How often a process was replaced."""

    @property
    def open_calls(self) -> int:
        """Calls submitted and not yet answered."""

    @property
    def at_work(self) -> float:
        """The share of its own processes that have calls, from 0 to 1."""

    def waits(self) -> Sequence[int]:
        """A descriptor that is readable when `poll` has something to do, where it waits for
        others.
        """

    def submit(self, calls: int, encode: Encode) -> int:
        """Take a job; its number."""

    def poll(self) -> list[Answer]:
        """The answers that have come."""

    def close(self) -> None:
        """Release what it holds."""


class InWorker:
    """Makes the calls of one job at a time in this process, with no limits."""

    restarts = 0
    at_work = 0.0

    def __init__(self, settings: PoolSettings) -> None:
        self._settings = settings
        self._jobs: deque[tuple[int, int, Encode]] = deque()
        self._next_job = 0

    @property
    def open_calls(self) -> int:
        """Calls submitted and not yet answered."""
        return sum(calls for _, calls, _ in self._jobs)

    def waits(self) -> Sequence[int]:
        """None: `poll` makes the calls itself."""
        return ()

    def submit(self, calls: int, encode: Encode) -> int:
        """Take a job; its number."""
        self._jobs.append((self._next_job, calls, encode))
        self._next_job += 1
        return self._next_job - 1

    def poll(self) -> list[Answer]:
        """Make the calls of the oldest job."""
        if not self._jobs:
            return []
        job, calls, encode = self._jobs.popleft()
        call = self._settings.prepare(encode(0, calls))
        values: list[Any] = []
        failures: dict[int, str] = {}
        for index in range(calls):
            try:
                values.append(call(index))
            except (Exception, SystemExit) as error:
                failures[index] = self._settings.describe(error)
        return [Answer(job, list(range(calls)), failures, self._settings.pack(values))]

    def close(self) -> None:
        """Drop the calls that were not made."""
        self._jobs.clear()


def caller_of(scorer: ScorerKnobs[..., Any]) -> Caller:
    """The caller of a scorer: a pool, whose server is forked here, or this process.

    Both make calls by `prepare` and describe their exceptions by `describe`: in a pool's processes
    `server.make_calls` does so.
    """
    code = code_of(scorer.function) or scorer.function.__code__
    settings = PoolSettings(
        prepare=partial(prepare, scorer),
        pack=partial(pack, scorer),
        describe=partial(describe, code=code, world=(*WORLD_ERRORS, *scorer.world)),
        processes=scorer.processes,
        concurrency=scorer.concurrency,
        is_async=scorer.signature.is_async,
        timeout_s=scorer.timeout_s,
        memory_mb=scorer.memory_mb,
    )
    return Pool(settings) if scorer.isolate else InWorker(settings)
