"""The share of its data sheet that a system reaches, and what no data sheet says: the constants of
every cost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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
    """Further seconds, each time the number of nodes doubles."""
    step_s: float = 3e-3
    """Of a decode step besides the model: scheduling and drawing; of a training step: what it does
    once."""
    layer_s: float = 0.0
    """Of each layer in a training step, whatever it computes: its kernels are started, and threads
    wait for each other."""
    row_s: float = 0.0
    """Of each rollout in a decode step, besides the model."""
    channel_s: float = 0.0
    """Of each number in the hidden states of a token that a trainer passes over, besides
    products."""
    end_s: float = 0.0
    """Of each rollout that a generator begins and ends, besides its decode steps."""
    end_token_s: float = 0.0
    """And more of each of its tokens: they are put together and passed on."""
    look_s: float = 0.0
    """Of each number that attention has of a token and looks back at, besides products and
    memory."""
    wait_s: float = 0.0
    """Seconds that a process's threads wait for each other: in a decode step of several rollouts,
    and in each layer of a training step."""
    cache_share: float = 0.85
    """Of a device's memory that weights and cache may take."""
    most_rollouts: int = 1024
    """The most rollouts that a replica decodes at once."""
    source: str = "assumed; not fitted to any run"


ASSUMED = Rates()
PARALLEL = {"generator": 0.8, "learner": 0.55}
"""Of so many times the speed, what several threads are assumed to reach in what they share out: two
gain little on models of a few million parameters. Between what two machines told: 0.75 and 0.65,
0.9 and 0.5."""


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Rates of each kind of operator, and what lies between them."""

    generator: Rates = ASSUMED
    learner: Rates = ASSUMED
    """Of trainers, and of operators that compute log-probabilities."""
    parallel: Mapping[str, float] = field(default_factory=dict)
    """On cores, by role (generator, learner): of t times the speed, what t threads reach in what
    they share out."""
    row_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds of a row, by operator that needs no model."""
    row_token_s: Mapping[str, float] = field(default_factory=dict)
    """And more for each token of its completion: it is passed on and read."""
    computed: float = 1.0
    """Tokens that a trainer passes over, of all tokens: prompts that a group shares are one, and a
    rollout without advantage may be left out."""
    hop_s: float = 1e-3
    """From one operator to the next."""
    alone: float = 1.0
    """On cores: how many times as fast a process computes while all other cores are idle."""
    adopt_s: float = 0.0
    """Seconds in which a generator's replica takes a version in."""
    decode: str = "data-sheets"
    """Where a generator's seconds come from: one of dataflow.foresight.steps.CONSTANTS; by the
    rates above, or by what was measured."""
    source: str = ASSUMED.source

    def of(self, role: Literal["generator", "learner"], threads: int) -> Rates:
        """Of processes on cores with so many threads: what these share out is faster, and what one
        of them does alone is as fast as where the others' cores are idle; in between they wait for
        each other.

        >>> learner = Rates(step_s=1.5, layer_s=3.0, wait_s=0.5)
        >>> rates = Constants(learner=learner, alone=1.5, parallel={"learner": 0.5})
        >>> two = rates.of("learner", 2)
        >>> two.step_s, two.layer_s, two.wait_s, two.compute == rates.learner.compute
        (1.0, 2.0, 0.5, True)
        """
        rates = self.generator if role == "generator" else self.learner
        if threads <= 1:
            return replace(rates, wait_s=0.0)
        faster, alone = threads * self.parallel.get(role, PARALLEL[role]), self.alone
        return replace(
            rates,
            step_s=rates.step_s / alone,
            layer_s=rates.layer_s / alone,
            row_s=rates.row_s / alone,
            end_s=rates.end_s / alone,
            end_token_s=rates.end_token_s / alone,
            compute=rates.compute * faster,
            channel_s=rates.channel_s / faster,
            look_s=rates.look_s / faster,
        )


ASSUMED_CONSTANTS = Constants()


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Seconds at the full rates of data sheets; they add up, and are multiplied by numbers."""

    memory: float = 0.0
    """Reading weights and cache."""
    compute: float = 0.0
    links: float = 0.0
    """Bytes between devices."""
    fixed: float = 0.0
    """What no rate scales."""

    def __add__(self, other: Parts) -> Parts:
        return Parts(
            memory=self.memory + other.memory,
            compute=self.compute + other.compute,
            links=self.links + other.links,
            fixed=self.fixed + other.fixed,
        )

    def __mul__(self, times: float) -> Parts:
        return Parts(
            memory=self.memory * times,
            compute=self.compute * times,
            links=self.links * times,
            fixed=self.fixed * times,
        )

    def seconds(self, rates: Rates) -> float:
        """At the rates that are reached, of links at most all; one after the other."""
        return (
            self.memory / rates.memory
            + self.links / min(1.0, rates.memory)
            + self.compute / rates.compute
            + self.fixed
        )
