"""When a worker that died is started again, and when the run gives up: a state machine without sockets or clocks."""

import collections
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from dataflow.limits import Patience


@dataclass(frozen=True)
class Failure:
    """One attempt of one worker that came to its end."""

    worker: str
    attempt: int
    cause: str
    at: float


@dataclass(frozen=True)
class Restart:
    """Start this attempt of a worker now."""

    worker: str
    attempt: int


@dataclass
class _Worker:
    """One worker that has failed before."""

    attempt: int = 0
    """The one that is under way, or that failed last."""
    due: float | None = None
    """When the next attempt starts; None: it is under way."""
    recovered: float | None = None
    """Since when this attempt has been at work."""
    delay_s: float = 0.0
    """Before the last restart."""


@dataclass
class Recovery:
    """What to do about failures.

    consumes: ends of workers (`died`), their return (`recovered`), progress of the run (`progressed`), the run's `end`
    produces: restarts, each once, when they are `due`; the reason to give up (`hopeless`)
    waits for: a delay that doubles with each failure of the same worker
    unblocked by: the time that its owner hands in, in seconds of any clock that never goes back
    """

    patience: Patience = field(default_factory=Patience)
    hopeless: str | None = None
    """Why the run must end; None while there is hope."""
    _workers: dict[str, _Worker] = field(default_factory=dict)
    _failures: list[Failure] = field(default_factory=list)
    """Those that may count, oldest first."""
    _made: int = 0
    _progressed: float = float("-inf")
    """When the run last made progress."""
    _over: bool = False

    def take_up(self, attempts: Mapping[str, int]) -> None:
        """By worker the attempt that is under way, in a run that another scheduler has begun."""
        self._workers = {name: _Worker(attempt=attempt) for name, attempt in attempts.items()}

    def attempt(self, worker: str) -> int:
        """How often a worker has been started again."""
        known = self._workers.get(worker)
        return known.attempt if known else 0

    def down(self, worker: str) -> bool:
        """Whether a worker waits for its restart."""
        known = self._workers.get(worker)
        return known is not None and known.due is not None

    def died(self, worker: str, cause: str, now: float, *, lasting: bool = False) -> None:
        """The attempt under way has ended, or was ended; a worker that waits for its restart cannot die again.

        lasting: the cause would be there again after a restart (`DataflowError.is_lasting`): there is no hope.
        """
        known = self._workers.setdefault(worker, _Worker(recovered=now))
        if known.due is not None:
            return
        since = known.recovered
        quiet = since is not None and (now - since >= self.patience.quiet_s or self._progressed > since)
        self._failures.append(Failure(worker, known.attempt, cause, now))
        longest_s = max(self.patience.of_one_s, self.patience.of_all_s)
        self._failures = [failure for failure in self._failures if now - failure.at <= longest_s]
        known.delay_s = self.patience.first_s if quiet or not known.delay_s else 2 * known.delay_s
        known.delay_s = min(known.delay_s, self.patience.most_s)
        known.due, known.recovered = now + known.delay_s, None
        self.hopeless = self.hopeless or (_for_good(worker, cause) if lasting else self._judge(worker, now))

    def recovered(self, worker: str, now: float) -> None:
        """A worker that was started again is at work."""
        known = self._workers.get(worker)
        if known is not None and known.due is None and known.recovered is None:
            known.recovered = now

    def progressed(self, made: int, now: float) -> None:
        """The run has made so much, in steps; what is made again is no progress."""
        if made > self._made:
            self._made, self._progressed = made, now

    def due(self, now: float) -> list[Restart]:
        """Restarts to do now; none of them is given twice, and none while the run ends."""
        if self._over or self.hopeless is not None:
            return []
        found = []
        for name, known in self._workers.items():
            if known.due is not None and known.due <= now:
                known.due, known.attempt = None, known.attempt + 1
                found.append(Restart(name, known.attempt))
        return found

    def end(self) -> None:
        """The run ends: nothing is started again."""
        self._over = True

    def _judge(self, worker: str, now: float) -> str | None:
        """Why there is no hope, after a failure of `worker`."""
        patience = self.patience
        since = max(self._progressed, now - patience.of_one_s)
        own = [each for each in self._failures if each.worker == worker and each.at >= since]
        if len(own) >= patience.of_one:
            return (
                f"worker '{worker}' failed {len(own)} times in {now - own[0].at:.0f} s, and the run made no progress "
                f"in between: {_causes(own)}; see logs/{worker}.log, mend the cause, and resume the run"
            )
        recent = [each for each in self._failures if now - each.at <= patience.of_all_s]
        if len(recent) >= patience.of_all:
            return (
                f"workers failed {len(recent)} times in {now - recent[0].at:.0f} s: {_causes(recent)}; see their "
                f"logs, mend the cause, and resume the run"
            )
        return None


def _for_good(worker: str, cause: str) -> str:
    return f"worker '{worker}' {cause}; a restart would not mend that; see logs/{worker}.log"


def _causes(failures: Iterable[Failure]) -> str:
    """Every cause with how often it was, by worker."""
    counts = collections.Counter((failure.worker, failure.cause) for failure in failures)
    return "; ".join(f"'{worker}' {cause}{f' ({n} times)' if n > 1 else ''}" for (worker, cause), n in counts.items())
