"""Rank 0's forward pass: whatever it computes, the other ranks compute with it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor

from dataflow.tokens.sampling_mask import SamplingMask
from operators.forward_pass.parallel.messages import Compute
from operators.ranks import group
from operators.ranks.exchange import Exchange
from operators.training.learner.learner import Forward
from operators.training.learner.packing import TokenTree


class LedForward:
    """A `Forward` of several ranks, for the runtime on rank 0.

    consumes: the calls of the runtime
    produces: messages to the other ranks; what rank 0 computes, which is what all of them do
    waits for: the other ranks, in each exchange, up to the group's time-out
    unblocked by: their part of the exchange, their end, or the time-out; after an error every call
    raises"""

    def __init__(self, own: Forward, exchange: Exchange) -> None:
        """own: rank 0's, of a model that is cut."""
        self.module: Any = own.module
        self._own, self.ranks = own, exchange
        self._passes = 0
        self._temperature = 0.0

    def at(self, temperature: float) -> None:
        """As the forward's, on all ranks."""
        self._temperature = temperature
        self._own.at(temperature)

    def computed(
        self, packed: TokenTree, left_T: SamplingMask | None, wanted: Collection[str]
    ) -> dict[str, Tensor]:
        """As the forward's, on all ranks. Raises WorkerDied or DeadlineError when a rank does not
        take part."""
        self._passes += 1
        with self.ranks.together(f"pass {self._passes}"):
            self.ranks.tell(Compute.of(packed, left_T, wanted, self._temperature))
            return self._own.computed(packed, left_T, wanted)

    def close(self) -> None:
        """End the other ranks; may be called again."""
        self.ranks.close()
        group.leave()
