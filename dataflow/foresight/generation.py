"""Seconds in which a generator's replica makes rollouts: decode steps of a batch that fills, waits
and empties.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dataflow.errors import GraphError
from dataflow.foresight.catalogue import DeviceKind
from dataflow.foresight.counts import Counts
from dataflow.foresight.lengths import Lengths
from dataflow.foresight.links import PER_LAYER, all_reduces
from dataflow.foresight.rates import Parts, Rates
from dataflow.foresight.steps import ReplicaTimes

_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8": 1}
_CACHE_BYTES = 2
_POINTS = 256
"""Points at which an emptying batch is evaluated."""


@dataclass(frozen=True, kw_only=True)
class GeneratorReplica:
    """One copy of a model that generates."""

    model: Counts
    kind: DeviceKind
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    interleaves: bool = True
    """Whether a batch is cut into as many parts as there are stages, which then all work at once;
    else it passes through the stages whole."""
    dtype: str = "bfloat16"
    """Of weights and products."""
    steps: ReplicaTimes | None = None
    """Seconds of all stages of the pipeline together; None: by rates of data sheets."""
    reserved_bytes: float = 0.0
    """Bytes on all its devices that others hold: a trainer keeps its optimizer state there while it
    generates."""

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
        """Of one token, on all its ranks: where ranks are more than key/value heads, several hold
        the same.
        """
        copies = max(1.0, self.tensor_parallel / self.model.cache_cuts)
        return self.model.cache * _CACHE_BYTES * copies

    def at_once(self, tokens: float, rates: Rates) -> float:
        """Rollouts of so many tokens that the cache holds. GraphError where it holds none."""
        room = rates.cache_share * self.kind.memory_bytes * self.ranks
        rollouts = (room - self.weight_bytes - self.reserved_bytes) / (self.cache_bytes * tokens)
        if rollouts < 1:
            weights_gb, reserved_gb = self.weight_bytes / 1e9, self.reserved_bytes / 1e9
            beside = f" and {reserved_gb:.0f} GB of a trainer" if reserved_gb else ""
            raise GraphError(
                f"a model of {weights_gb:.0f} GB{beside} leaves no room for a rollout of"
                f" {tokens:.0f}"
                f" tokens on {self.ranks} x {self.kind.name} of {self.kind.memory_bytes / 1e9:.0f}"
                " GB; give it more ranks"
            )
        return min(rollouts, rates.most_rollouts)

    def step(self, rollouts: float, context: float, rates: Rates) -> Parts:
        """One token for each of so many rollouts, which have `context` tokens in the mean.

        Weights are read once, which is what takes the time of small batches, and the cache once
        (Pope et al., arXiv 2211.05102, section 3); two all-reduces a layer. While one part of a
        batch goes through all stages of a pipeline, so does each other part.
        """
        model, kind = self.model, self.kind
        if self.steps is not None:
            return Parts(fixed=self.steps.decode(rollouts / self.pipeline_parallel, context))
        per_pass = rollouts / max(
            1.0, min(self.pipeline_parallel if self.interleaves else 1, rollouts)
        )
        nbytes = (
            model.touched(per_pass) * _BYTES[self.dtype] + per_pass * context * self.cache_bytes
        )
        return Parts(
            memory=nbytes / (self.tensor_parallel * kind.memory_bytes_per_s),
            compute=model.forward(per_pass, context)
            / (self.tensor_parallel * kind.rate(self.dtype)),
            links=all_reduces(model, kind, self.tensor_parallel, per_pass),
            fixed=rates.step_s
            + (rates.wait_s if rollouts > 1 else 0.0)
            + rollouts * rates.row_s
            + self.looks(per_pass, context) * rates.look_s
            + self._latency(rates),
        )

    def looks(self, rollouts: float, context: float) -> float:
        """Numbers that a rank's attention looks at in a step of so many rollouts of `context`
        tokens.
        """
        return rollouts * context * self.model.mixing / self.tensor_parallel

    @property
    def exchanges(self) -> int:
        """All-reduces of a decode step."""
        return PER_LAYER * self.model.layers if self.tensor_parallel > 1 else 0

    def _latency(self, rates: Rates) -> float:
        """Seconds of a step's all-reduces, however few bytes they carry."""
        nodes = max(1.0, self.tensor_parallel / self.kind.per_node)
        # by trees (Sanders et al., 2009)
        exchange_s = rates.exchange_s + rates.far_exchange_s * math.log2(nodes)
        return self.exchanges * exchange_s


def generate(
    replica: GeneratorReplica,
    lengths: Lengths,
    prompt_tokens: float,
    rollouts: float,
    rates: Rates,
    of: float = 0.0,
) -> Parts:
    """Until so many rollouts, all of which are there at the start, are whole.

    While some wait, as many are decoded as the cache holds; then nobody follows those who have
    ended, and the batch empties as lengths say. A prompt is prefilled once for each rollout. of:
    rollouts of all replicas, which wait for each other: the longest of them decides.
    """
    # those that are alive are in their midst, the longer ones longer
    typical = prompt_tokens + 0.6 * lengths.mean
    batch = min(rollouts, replica.at_once(typical, rates))
    parts = replica.step(batch, typical, rates) * ((rollouts - batch) / batch * lengths.mean)
    points = np.linspace(0, lengths.most, _POINTS + 1)
    longer = lengths.longer_than(points[:-1])
    for index in np.flatnonzero(max(batch, of) * longer >= 0.5).tolist():
        width = float(points[index + 1] - points[index])
        alive = max(1.0, batch * float(longer[index]))
        parts += replica.step(alive, prompt_tokens + float(points[index]), rates) * width
    return parts + prefill(replica, prompt_tokens, rollouts)


def sustain(
    replica: GeneratorReplica,
    lengths: Lengths,
    prompt_tokens: float,
    rollouts: float,
    rates: Rates,
    at_once: float,
) -> Parts:
    """While so many rollouts end, of which others take the places: a batch of `at_once`, or what
    the cache holds.
    """
    typical = prompt_tokens + 0.6 * lengths.mean
    batch = min(at_once, replica.at_once(typical, rates))
    return replica.step(batch, typical, rates) * (rollouts * lengths.mean / batch) + prefill(
        replica, prompt_tokens, rollouts
    )


def prefill(replica: GeneratorReplica, prompt_tokens: float, rollouts: float) -> Parts:
    """Of the prompt of each rollout."""
    if replica.steps is not None:
        return Parts(
            fixed=rollouts * replica.steps.prompt(prompt_tokens) / replica.pipeline_parallel
        )
    operations = replica.model.forward(rollouts * prompt_tokens, prompt_tokens / 2)
    return Parts(compute=operations / (replica.ranks * replica.kind.rate(replica.dtype)))
