"""What is simulated: bounds of the graph, sizes of the plan, seconds of each operator."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from dataflow.foresight.lengths import Lengths
from dataflow.foresight.simulation.clock import Processors


@dataclass(frozen=True, kw_only=True, eq=False)
class GeneratorCosts:
    """Seconds of one replica."""

    step_s: NDArray[np.float64]
    """Of a decode step of 0, 1, .. slots rollouts, besides what they look back at, float64[slots +
    1]."""
    context_s: float = 0.0
    """Of each token that a decode step looks back at."""
    prompt_s: float = 0.0
    """Until the prompt of a group can be gone on with."""
    rollout_s: float = 0.0
    """Of each rollout that ends, besides its decode steps."""
    adopt_s: float = 0.0
    """Of taking a version of the weights in."""
    shared: int = 0
    """Processes of one replica on shared processors; 0: it has its own devices."""

    @property
    def slots(self) -> int:
        """Rollouts that are decoded at once."""
        return len(self.step_s) - 1


@dataclass(frozen=True, kw_only=True)
class TrainerCosts:
    """Seconds of all its ranks, which work together."""

    step_s: float
    """Of a step, besides its rows."""
    token_s: float = 0.0
    """Of each token of completions but their last, and of one prompt for each group."""
    weights_s: float = 0.0
    """From there until generators can take it in."""
    shared: int = 0
    """Ranks on shared processors; 0: they have their own devices."""
    part_tokens: float = math.inf
    """See `dataflow.rules.ends_part`."""


@dataclass(frozen=True, kw_only=True)
class ScorerCosts:
    """Seconds of one operator between generator and trainer."""

    row_s: float
    at_once: int = 1
    """Rows that are scored at the same time."""
    waits: bool = False
    """Whether it waits for something elsewhere, and uses no processor meanwhile."""
    drops: float = 0.0
    """Share of groups that it drops."""


@dataclass(frozen=True, kw_only=True)
class Failures:
    """How often what dies; 0: never."""

    generator_per_hour: float = 0.0
    """Of one replica: it loses the rollouts that it has not finished."""
    trainer_per_hour: float = 0.0
    restart_s: float = 60.0
    """Until it is there again."""
    lost_s: float = 300.0
    """Of a trainer's work since its last checkpoint, in the mean."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Scenario:
    """A generator, scorers behind it, and a trainer whose weights go back."""

    steps: int
    prompts_per_step: int
    group_size: int
    max_staleness: int
    lengths: Lengths
    prompt_tokens: float
    generator: GeneratorCosts
    trainer: TrainerCosts
    turns: int = 1
    """Of the policy in each rollout; it has no slot between two of them."""
    world_s: float = 0.0
    """Between two turns."""
    scorers: Mapping[str, ScorerCosts] = field(default_factory=dict)
    replicas: int = 1
    unlike: tuple[GeneratorCosts, ...] = ()
    """Costs by replica, where their devices differ; else they are all as `generator` says."""
    in_flight: int | None = None
    """Most groups between admission and training; None: as many as max_staleness allows."""
    prompts_at_once: int = 1
    """Prompts that travel together."""
    prompts_slack: int = 0
    """Replicas may differ by so many prompts and are still sent prompts in turn."""
    prompts_without_outcome: int | None = None
    """Most that the source has sent; None: those of a step more than may be ahead."""
    queue_prompts: int | None = None
    stride: int = 1
    """Decode steps that are looked at together: lengths are rounded to multiples of it."""
    hop_s: float = 0.0
    """From one operator to the next."""
    moves_s: Mapping[str, float] = field(default_factory=dict)
    """Of nodes that take turns on shared devices ("generator", "trainer", a scorer's name): seconds
    in which memory comes and goes, once for each turn."""
    processors: Processors = field(default_factory=Processors)
    failures: Failures = field(default_factory=Failures)
    seed: int = 0

    def costs_of(self, replica: int) -> GeneratorCosts:
        """Seconds of one of the generator's replicas."""
        return self.unlike[replica] if self.unlike else self.generator

    @property
    def decode_steps(self) -> float:
        """That all replicas make, if their slots are full."""
        rollouts = self.steps * self.prompts_per_step * self.group_size
        return rollouts * self.lengths.mean / self.generator.slots


def coarse(scenario: Scenario, most: float = 200_000.0) -> Scenario:
    """With strides, where so many decode steps would be looked at; up to a 32nd of the mean
    length.
    """
    stride = min(scenario.decode_steps / most, scenario.lengths.mean / scenario.turns / 32)
    return replace(scenario, stride=max(1, int(stride)))
