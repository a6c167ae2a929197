"""Synchronous and asynchronous placements of a trainer and a generator under memory bounds, each
the best there is.

The setting of LlamaRL's theorem (arXiv 2505.24034): a step is B samples; on n devices, m of which
hold the model together, training takes B * train_s(b) * m / n seconds at a micro-batch of b
samples, and generation B * generate_s(b) * m / n, neither slower for a larger b. Synchronous: both
have all devices in turn, the same m, and one memory bound. Asynchronous: each has devices and a
bound of its own.

An asynchronous step is never longer: give both sides m, b and c of the best synchronous placement.
They fit, as each bound has lost terms and gained none. With the share t / (t + g) of the devices
for training (t, g: seconds of a device for a sample) both sides take the synchronous time. Where
the shared bound kept b or c small, one may now grow. The share has to be any number: with whole
copies of the model, two devices whose trainer takes 95% of the time are better used in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is to be placed."""

    devices: int
    memory_bytes: float
    """Of a device."""
    samples: int
    """Of a step."""
    train_s: Callable[[int], float]
    """Seconds of a device for a sample, at a micro-batch of so many samples."""
    generate_s: Callable[[int], float]
    trained_bytes: float
    """Weights, gradients and optimiser state."""
    generating_bytes: float
    """Weights that generate."""
    activation_bytes: float
    """Of a sample in the micro-batch."""
    cache_bytes: float
    """Of a sample that is generated."""
    batches: tuple[int, ...] = tuple(2**power for power in range(13))
    """Micro-batches that are tried."""
    splits: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    """Devices over which the model is tried to be cut."""


@dataclass(frozen=True, kw_only=True)
class Best:
    """A placement."""

    seconds: float
    """Of a step."""
    train_batch: int
    generate_batch: int
    train_split: int
    generate_split: int
    train_devices: float
    generate_devices: float
    binds: bool = False
    """Whether without the bound that both share a step would be shorter."""


def best_synchronous(problem: Problem) -> Best | None:
    """Over both micro-batches and one split, under the bound that both share; None where nothing
    fits.
    """
    fits = [
        schedule
        for schedule in _in_turns(problem)
        if problem.trained_bytes
        + problem.activation_bytes * schedule.train_batch
        + problem.cache_bytes * schedule.generate_batch
        <= problem.memory_bytes * schedule.train_split
    ]
    best = min(fits, key=_seconds, default=None)
    if best is None:
        return None
    free = min(
        schedule.seconds
        for schedule in _in_turns(problem)
        if schedule.train_batch in _train_batches(problem, schedule.train_split)
        and schedule.generate_batch in _generate_batches(problem, schedule.generate_split)
    )
    return Best(**{**best.__dict__, "binds": free < best.seconds * (1 - 1e-9)})


def best_asynchronous(problem: Problem, *, whole: bool = False, least: float = 1e-6) -> Best | None:
    """Over micro-batches, splits and the share of devices that trains; None where nothing fits.

    whole: each side has whole copies of its model, and no device is split. Else the share is any
    number; it is sought, by thirds, for each pair of the others, to `least`.
    """
    train = min(
        _alone(problem.train_s, problem.splits, lambda m: _train_batches(problem, m)), default=None
    )
    make = min(
        _alone(problem.generate_s, problem.splits, lambda m: _generate_batches(problem, m)),
        default=None,
    )
    if train is None or make is None:
        return None
    if whole:
        return _whole(problem)
    arms = problem.samples * train[0], problem.samples * make[0]

    def seconds(share: float) -> float:
        return max(arms[0] / (share * problem.devices), arms[1] / ((1 - share) * problem.devices))

    low, high = least, 1 - least
    while high - low > least:
        lower, upper = low + (high - low) / 3, high - (high - low) / 3
        low, high = (low, upper) if seconds(lower) <= seconds(upper) else (lower, high)
    share = (low + high) / 2
    return Best(
        seconds=seconds(share),
        train_batch=train[2],
        generate_batch=make[2],
        train_split=train[1],
        generate_split=make[1],
        train_devices=share * problem.devices,
        generate_devices=(1 - share) * problem.devices,
    )


def _whole(problem: Problem) -> Best | None:
    schedules = [
        Best(
            seconds=problem.samples * max(cost / trains, generating / makes),
            train_batch=b,
            generate_batch=c,
            train_split=m,
            generate_split=n,
            train_devices=trains,
            generate_devices=makes,
        )
        for cost, m, b in _alone(
            problem.train_s, problem.splits, lambda m: _train_batches(problem, m)
        )
        for generating, n, c in _alone(
            problem.generate_s, problem.splits, lambda n: _generate_batches(problem, n)
        )
        for trains in range(m, problem.devices - n + 1, m)
        if (makes := (problem.devices - trains) // n * n)
    ]
    return min(schedules, key=_seconds, default=None)


def _in_turns(problem: Problem) -> Iterator[Best]:
    """Every choice of a synchronous placement, whether it fits or not."""
    for m in problem.splits:
        for b in problem.batches:
            for c in problem.batches:
                round_s = problem.train_s(b) + problem.generate_s(c)
                yield Best(
                    seconds=problem.samples * m * round_s / problem.devices,
                    train_batch=b,
                    generate_batch=c,
                    train_split=m,
                    generate_split=m,
                    train_devices=problem.devices,
                    generate_devices=problem.devices,
                )


def _alone(
    seconds: Callable[[int], float], splits: Iterable[int], batches: Callable[[int], Iterable[int]]
) -> list[tuple[float, int, int]]:
    """(seconds of one device for a sample, split, micro-batch) of the best micro-batch of each
    split.
    """
    options = [[(split * seconds(b), split, b) for b in batches(split)] for split in splits]
    return [min(ways) for ways in options if ways]


def _train_batches(problem: Problem, split: int) -> list[int]:
    free = problem.memory_bytes * split - problem.trained_bytes
    return [b for b in problem.batches if problem.activation_bytes * b <= free]


def _generate_batches(problem: Problem, split: int) -> list[int]:
    free = problem.memory_bytes * split - problem.generating_bytes
    return [b for b in problem.batches if problem.cache_bytes * b <= free]


def _seconds(best: Best) -> float:
    return best.seconds
