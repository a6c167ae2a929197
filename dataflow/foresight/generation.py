"""Seconds in which a generator's replica makes rollouts: decode steps of a batch that fills, waits and empties."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dataflow.errors import GraphError
from dataflow.foresight.catalogue import DeviceKind
from dataflow.foresight.counts import Counts
from dataflow.foresight.lengths import Lengths
from dataflow.foresight.links import PER_LAYER, all_reduces
from dataflow.foresight.parts import Parts
from dataflow.foresight.rates import Rates
from dataflow.foresight.steps import Steps

_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8": 1}
_CACHE_BYTES = 2
_POINTS = 256
"""Lengths at which a batch that empties is looked at."""


@dataclass(frozen=True, kw_only=True)
class Replica:
    """One copy of a model that generates."""

    model: Counts
    kind: DeviceKind
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    dtype: str = "bfloat16"
    """Of weights and products."""
    steps: Steps | None = None
    """Seconds of all stages of the pipeline together; None: by rates of data sheets."""

    @property
    def ranks(self) -> int:
        """Devices that it takes."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def weight_bytes(self) -> float:
        """Of all its ranks."""
        return self.model.parameters * _BYTES[self.dtype]

    @property
    def cache_bytes(self) -> float:
        """Of one token, on all its ranks: where ranks are more than key/value heads, several hold the same."""
        copies = max(1.0, self.tensor_parallel / self.model.cache_cuts)
        return self.model.cache * _CACHE_BYTES * copies

    def at_once(self, tokens: float, rates: Rates) -> float:
        """Rollouts of so many tokens that its cache holds. GraphError where it holds none."""
        free = rates.cache_share * self.kind.memory_bytes * self.ranks - self.weight_bytes
        found = free / (self.cache_bytes * tokens)
        if found < 1:
            raise GraphError(
                f"a model of {self.weight_bytes / 1e9:.0f} GB leaves no room for a rollout of {tokens:.0f} tokens on "
                f"{self.ranks} x {self.kind.name} of {self.kind.memory_bytes / 1e9:.0f} GB; give it more ranks"
            )
        return min(found, rates.most_rollouts)

    def step(self, rollouts: float, context: float, rates: Rates) -> Parts:
        """One token for each of so many rollouts, which have `context` tokens in the mean.

        Weights are read once by each stage of the pipeline for its share of the batch, which is what takes the time of
        small batches, and the cache once (Pope et al., arXiv 2211.05102, section 3); two all-reduces a layer."""
        stages, model, kind = self.pipeline_parallel, self.model, self.kind
        each = rollouts / stages
        if self.steps is not None:
            return Parts(fixed=self.steps.decode(each, context))
        nbytes = model.touched(each) * _BYTES[self.dtype] + rollouts * context * self.cache_bytes
        return Parts(
            memory=nbytes / (self.tensor_parallel * kind.memory_bytes_per_s),
            compute=model.forward(rollouts, context) / (self.tensor_parallel * kind.rate(self.dtype)),
            links=stages * all_reduces(model, kind, self.tensor_parallel, each),
            fixed=rates.step_s + rollouts * rates.row_s + stages * self._latency(rates),
        )

    @property
    def exchanges(self) -> int:
        """All-reduces of a decode step."""
        return PER_LAYER * self.model.layers if self.tensor_parallel > 1 else 0

    def _latency(self, rates: Rates) -> float:
        """Of the all-reduces of one stage, however few bytes they carry."""
        once = rates.far_exchange_s if self.tensor_parallel > self.kind.per_node else rates.exchange_s
        return self.exchanges * once


def generate(replica: Replica, lengths: Lengths, prompt_tokens: float, rollouts: float, rates: Rates) -> Parts:
    """Until so many rollouts, all of which are there at the start, are whole.

    While some wait, as many are decoded as the cache holds; then nobody follows those who have ended, and the batch
    empties as lengths say. A prompt is prefilled once for each rollout."""
    typical = prompt_tokens + 0.6 * lengths.mean  # those that are alive are in their midst, the longer ones longer
    batch = min(rollouts, replica.at_once(typical, rates))
    parts = replica.step(batch, typical, rates) * ((rollouts - batch) / batch * lengths.mean)
    points = np.linspace(0, lengths.most, _POINTS + 1)
    alive = batch * lengths.longer_than(points[:-1])
    for index in np.flatnonzero(alive >= 0.5).tolist():
        width = float(points[index + 1] - points[index])
        parts += replica.step(max(1.0, float(alive[index])), prompt_tokens + float(points[index]), rates) * width
    return parts + prefill(replica, prompt_tokens, rollouts)


def sustain(
    replica: Replica, lengths: Lengths, prompt_tokens: float, rollouts: float, rates: Rates, at_once: float
) -> Parts:
    """While so many rollouts end, of which others take the places: a batch of `at_once`, or what the cache holds."""
    typical = prompt_tokens + 0.6 * lengths.mean
    batch = min(at_once, replica.at_once(typical, rates))
    return replica.step(batch, typical, rates) * (rollouts * lengths.mean / batch) + prefill(
        replica, prompt_tokens, rollouts
    )


def prefill(replica: Replica, prompt_tokens: float, rollouts: float) -> Parts:
    """Of the prompt of each rollout."""
    if replica.steps is not None:
        return Parts(fixed=rollouts * replica.steps.prompt(prompt_tokens) / replica.pipeline_parallel)
    operations = replica.model.forward(rollouts * prompt_tokens, prompt_tokens / 2)
    return Parts(compute=operations / (replica.ranks * replica.kind.rate(replica.dtype)))
