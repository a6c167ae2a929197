"""What share of its data sheet a system reaches, and what nobody's data sheet says: the constants of every cost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Constants; two of them are fitted to runs, the others are stated assumptions."""

    memory: float = 0.6
    """Share of the memory's bandwidth, and of every link's, that is reached."""
    compute: float = 0.3
    """Share of the rate of matrix products."""
    exchange_s: float = 12e-6
    """Seconds of an all-reduce of few bytes within a node."""
    far_exchange_s: float = 40e-6
    """More, for every time that its nodes are twice as many."""
    step_s: float = 3e-3
    """Of a decode step besides the model: scheduling and drawing; of a training step: what it does once."""
    layer_s: float = 0.0
    """Of each layer in a training step, whatever it computes: its kernels are started, and threads wait for each
    other."""
    row_s: float = 0.0
    """Of each rollout in a decode step, besides the model."""
    channel_s: float = 0.0
    """Of each number in the hidden states of a token that a trainer passes over, besides products."""
    end_s: float = 0.0
    """Of each rollout that a generator begins and ends, besides its decode steps."""
    cache_share: float = 0.85
    """Of a device's memory that weights and cache may take."""
    most_rollouts: int = 1024
    """That a replica decodes at once."""
    source: str = "assumed; not fitted to any run"


ASSUMED = Rates()


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Rates of each kind of operator, and what lies between them."""

    generator: Rates = ASSUMED
    learner: Rates = ASSUMED
    """Of trainers, and of operators that compute log-probabilities."""
    threaded: Mapping[str, Mapping[int, Rates]] = field(default_factory=dict)
    """On cores, of processes that had so many threads each, by role (generator, learner), where runs differed in it."""
    row_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds of a row, by operator that needs no model."""
    computed: float = 1.0
    """Tokens that a trainer passes over, of all tokens: prompts that a group shares are one, and a rollout without
    advantage may be left out."""
    hop_s: float = 1e-3
    """From one operator to the next."""
    alone: float = 1.0
    """On cores: how many times as fast a process computes while all other cores are idle."""
    adopt_s: float = 0.0
    """Of a generator's replica that takes a version in."""
    decode: str = "data-sheets"
    """Where a generator's seconds come from: one of dataflow.foresight.steps.CONSTANTS; by the rates above, or by what
    was measured."""
    source: str = ASSUMED.source

    def of(self, role: Literal["generator", "learner"], threads: int) -> Rates:
        """Of processes with so many threads, or with the nearest number that was seen, the smaller of two.

        >>> few, many = Rates(step_s=1.0), Rates(step_s=2.0)
        >>> Constants(threaded={"learner": {1: few, 8: many}}).of("learner", 6).step_s
        2.0
        """
        known = self.threaded.get(role)
        if not known:
            return self.generator if role == "generator" else self.learner
        return known[min(known, key=lambda each: (abs(math.log(each / threads)), each))]


ASSUMED_CONSTANTS = Constants()
