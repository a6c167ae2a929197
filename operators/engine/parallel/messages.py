"""What the ranks of an engine say to each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from dataflow.folder.partial_rollouts import PartialRollout
from dataflow.limits import Limits
from dataflow.system.messages import Plain
from operators.engine.knobs import GeneratorKnobs
from operators.engine.results import PromptStart
from operators.engine.sampling_params import Sampling
from operators.engine.stop_strings import StopStrings
from operators.ranks.messages import Numbers, Tokens, codec_of
from operators.ranks.weights import KINDS

# From rank 0


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """What a rank builds its engine from."""

    declaration: GeneratorKnobs
    node: str
    replica: int
    rank: int
    size: int
    device: str
    threads: int
    folder: str
    """Where the ranks meet."""
    site: Mapping[str, Plain] | None = field(repr=False)
    """As `OpensWeights.site`."""
    attempt: int
    """The scheduler's, at rank 0."""
    quantized: str | None
    """As `Context.quantized`."""
    aside: str | None
    """As `Context.aside`."""
    limits: Limits


@dataclass(frozen=True, kw_only=True)
class StartMessage:
    """A prompt whose rollouts start, as `PromptStart`."""

    tokens: Numbers
    limit: int
    tickets: tuple[int, ...]
    seeds: tuple[int, ...]
    sampling: Sampling | None
    stop: tuple[str | int, ...] | None
    partial: tuple[Tokens | None, ...]
    """Of each rollout, what it had drawn before it starts again."""

    @classmethod
    def of(cls, start: PromptStart) -> StartMessage:
        """The message of a start."""
        return cls(
            tokens=Numbers.of(start.prompt, np.int64),
            limit=int(start.limit),
            tickets=tuple(map(int, start.tickets)),
            seeds=tuple(map(int, start.seeds)),
            sampling=start.sampling,
            stop=None if start.stop is None else tuple(start.stop.strings),
            partial=tuple(
                None if rollout is None else Tokens.of(rollout.tokens) for rollout in start.partial
            ),
        )

    def start(self, stops: Callable[[Sequence[str | int]], StopStrings]) -> PromptStart:
        """The start again; `stops` gives the same object for the same strings."""
        return PromptStart(
            prompt=self.tokens.array,
            limit=self.limit,
            tickets=self.tickets,
            seeds=self.seeds,
            sampling=self.sampling,
            stop=None if self.stop is None else stops(self.stop),
            partial=[
                None if row is None else PartialRollout(begin=0, tokens=row.tokens)
                for row in self.partial
            ],
        )


@dataclass(frozen=True)
class Step:
    """Make a step."""

    state: int
    """Rank 0's, by `member.state_of`."""
    prompts: tuple[StartMessage, ...]


@dataclass(frozen=True)
class Abort:
    """Give rollouts up."""

    tickets: tuple[int, ...]


@dataclass(frozen=True)
class Adopted:
    """This version of the weights is in use."""

    version: int


@dataclass(frozen=True)
class Digest:
    """Say what you hold."""


# From the others


@dataclass(frozen=True)
class Started:
    """I run."""

    pid: int


@dataclass(frozen=True)
class Digests:
    """Checksums of the parameters that I hold."""

    digests: Mapping[str, int]


CODEC = codec_of(
    "engine-ranks", *KINDS, EngineSettings, Step, Abort, Adopted, Digest, Started, Digests
)
