"""The clock and the accounts of the end-to-end bench, the same for every system."""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.report import Figure

GROUP_SIZE = 8
PROMPTS_PER_STEP = 32
HEAVY = 10
"""A heavy tail: the 99th percentile of the lengths is at least so many times their median."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one system showed in one run of one case."""

    startup_s: float
    """From the start of its process to the end of the first optimiser step, in seconds."""
    wall_s: float
    """From the start of its process to the end of the run, in seconds."""
    ends: list[float]
    """When each step ended, evaluations not counted, in seconds from some moment."""
    lengths: list[list[int]]
    """Completion tokens of every rollout, the end token among them, by step."""
    accuracies: list[tuple[int, float]] = field(default_factory=list)
    """(steps done, held-out accuracy sampled at temperature 1), in order; the first before any
    step."""
    efficiency: float | None = None
    """Share of the time in which what bounds the run is at work; None for a system without
    stages."""

    def to_plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class Stopwatch:
    """Notes when steps end, on a clock that stands still during evaluations."""

    def __init__(self, born: float, clock: Callable[[], float] = time.time) -> None:
        """born: when the process was started, on the same clock."""
        self._born, self._clock = born, clock
        self._paused_s = 0.0
        self._startup_s = 0.0
        self._ends: list[float] = []
        self._lengths: list[list[int]] = []
        self._accuracies: list[tuple[int, float]] = []

    @property
    def steps(self) -> int:
        """Steps that have ended."""
        return len(self._ends)

    def step(self, lengths: Sequence[int]) -> None:
        """A step has ended that trained completions of so many tokens."""
        now = self._clock()
        if not self._ends:
            self._startup_s = now - self._born - self._paused_s
        self._ends.append(now - self._paused_s)
        self._lengths.append([int(length) for length in lengths])

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time that does not count."""
        began = self._clock()
        yield
        self._paused_s += self._clock() - began

    def evaluate(self, accuracy: Callable[[], float]) -> None:
        """Note the accuracy after the steps so far; what that takes does not count."""
        with self.paused():
            self._accuracies.append((self.steps, accuracy()))

    def measured(self) -> Measured:
        """What was noted."""
        return Measured(
            startup_s=self._startup_s,
            wall_s=self._clock() - self._born,
            ends=self._ends,
            lengths=self._lengths,
            accuracies=self._accuracies,
        )


def figures(
    measured: Measured, *, warmup: int, cooldown: int, level: float | None
) -> dict[str, Figure]:
    """The figures of a line of JSON.

    warmup: steps at the beginning that are not counted; the clock starts at the end of the last of
    them. cooldown: steps at the end that are not counted, because nothing is generated for later
    ones meanwhile. level: held-out accuracy to be reached; None: not asked.
    """
    counted = measured.ends[warmup - 1 : len(measured.ends) - cooldown]
    seconds, steps = counted[-1] - counted[0], len(counted) - 1
    lengths = sorted(
        length for step in measured.lengths[warmup : warmup + steps] for length in step
    )
    return {
        "rollouts_per_s": len(lengths) / seconds,
        "seconds_to_accuracy": seconds_to(measured, level, warmup),
        "efficiency": measured.efficiency,
        "tokens_per_s": sum(lengths) / seconds,
        "step_s": seconds / steps,
        "steps": steps,
        "wall_s": measured.wall_s,
        "startup_s": measured.startup_s,
        "accuracy_first": measured.accuracies[0][1] if measured.accuracies else None,
        "accuracy_last": measured.accuracies[-1][1] if measured.accuracies else None,
        "tokens_p50": lengths[len(lengths) // 2],
        "tokens_p99": lengths[len(lengths) * 99 // 100],
    }


def seconds_to(measured: Measured, level: float | None, warmup: int) -> float | None:
    """Seconds from the end of the warm-up until the accuracy was reached, None if it was not.

    Between the last evaluation below the level and the first one at it, accuracy is taken as a
    straight line.
    """
    if level is None:
        return None
    zero = measured.ends[warmup - 1]
    before, lower = 0.0, None
    for step, accuracy in measured.accuracies:
        now = max(0.0, measured.ends[step - 1] - zero) if step else 0.0
        if accuracy >= level:
            return (
                now
                if lower is None
                else before + (now - before) * (level - lower) / (accuracy - lower)
            )
        before, lower = now, accuracy
    return None


def medians(lines: Sequence[dict[str, Figure]]) -> dict[str, Figure]:
    """The median of every figure over the repeats; None where a repeat has none."""
    middle: dict[str, Figure] = {}
    for name in lines[0]:
        values = [line[name] for line in lines]
        numbers = [value for value in values if isinstance(value, int | float)]
        middle[name] = statistics.median(numbers) if len(numbers) == len(values) else None
    return middle
