"""How long completions are: a sample of them, given or drawn from a mean and a tail."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from dataflow.errors import GraphError

_SAMPLES = 2048


@dataclass(frozen=True, eq=False)
class Lengths:
    """Tokens of completions, float64[n], ascending."""

    tokens: NDArray[np.float64]

    @classmethod
    def of(cls, tokens: Iterable[float]) -> Lengths:
        """Those that were seen. GraphError where there are none."""
        lengths = np.sort(np.asarray([*tokens], np.float64))
        if not len(lengths) or lengths[0] < 1:
            least = f"{lengths[0]:g}" if len(lengths) else "none"
            raise GraphError(
                f"lengths of completions are one token or more; found {least}; give the lengths of"
                " a run, or a mean and a tail"
            )
        return cls(lengths)

    @classmethod
    def drawn(
        cls, mean: float, most: float, sigma: float = 0.8, samples: int = _SAMPLES
    ) -> Lengths:
        """Log-normal, cut at `most` tokens, with this mean after the cut. sigma: of the logarithm,
        before the cut. samples: as many as are generated together, where the longest of them
        matters.

        GraphError where no such mean can be had.
        """
        if not 1 <= mean < most or sigma < 0:
            raise GraphError(
                f"a mean of {mean:g} tokens of at most {most:g} cannot be had; give 1 <= mean <"
                " most"
            )
        return _log_normal(mean, most, sigma, samples)

    @property
    def mean(self) -> float:
        """Tokens."""
        return float(self.tokens.mean())

    @property
    def spread(self) -> float:
        """Standard deviation over the mean."""
        return float(self.tokens.std()) / self.mean

    @property
    def looks_back(self) -> float:
        """Tokens before one in its completion, in the mean over all tokens."""
        return float((self.tokens**2).mean()) / (2 * self.mean)

    @property
    def most(self) -> float:
        """Tokens of the longest."""
        return float(self.tokens[-1])

    def longest_of(self, group: int, share: float) -> float:
        """Tokens that the longest of a group does not exceed, in such a share of groups."""
        return float(np.quantile(self.tokens, share ** (1 / group), method="inverted_cdf"))

    def longer_than(self, tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        """Share of completions that are longer, for each."""
        return 1 - np.searchsorted(self.tokens, tokens, side="right") / len(self.tokens)

    def tail(self, group: int) -> float:
        """The longest of so many, in the mean, over the mean."""
        ends = (self.tokens.searchsorted(self.tokens, side="right") / len(self.tokens)) ** group
        weights = ends.copy()
        weights[1:] -= ends[:-1]
        return float((self.tokens * weights).sum() / weights.sum() / self.mean)


@functools.lru_cache(maxsize=64)
def _log_normal(mean: float, most: float, sigma: float, samples: int) -> Lengths:
    """The same for every placement that is looked at."""
    normal = NormalDist()
    scores = np.array([normal.inv_cdf((i + 0.5) / samples) for i in range(samples)])
    low, high = -10 * sigma - 1, math.log(most) + 10 * sigma + 1
    for _ in range(60):
        middle = (low + high) / 2
        lengths = np.clip(np.exp(middle + sigma * scores), 1, most)
        low, high = (middle, high) if lengths.mean() < mean else (low, middle)
    lengths.flags.writeable = False
    return Lengths(lengths)


def mean_staleness(
    *, in_flight: float, batch: float, ratio: float, tail: float, queue: float = 2.0
) -> float:
    """Versions between the start of a rollout and its training.

    While a rollout is generated, `in_flight / batch` steps' worth of others are, times `tail`, as
    the longest of a group counts; where generation is the faster side, rollouts wait in the queue
    besides. Applied Compute's form (2026-07), within 0.27 of six runs that it published.

    in_flight, batch: rollouts that are generated at once, and in a step. ratio: rollouts generated
    per second over those trained, were both alone. tail: the longest of a group over the mean.
    queue: batches that may wait.
    """
    if ratio <= 1:
        return in_flight * tail / batch + ratio
    return in_flight * tail / (ratio * batch) + (2 * queue + ratio - 1) / (2 * ratio)
