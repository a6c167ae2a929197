"""What the ranks of an engine say to each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from dataflow.folder.partial_rollouts import PartialRollout
from dataflow.limits import Limits
from dataflow.records import AnyArray
from dataflow.system.messages import Message, Plain, Secret
from dataflow.tokens.rollout_tokens import RolloutTokens
from operators.engine.knobs import GeneratorKnobs
from operators.engine.results import PromptStart
from operators.engine.sampling_params import Sampling
from operators.engine.stop_strings import StopStrings
from operators.ranks.messages import codec_of
from operators.ranks.weights import KINDS

# From rank 0


class EngineSettings(Secret, kw_only=True):
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
    site: Mapping[str, Plain] | None
    """As `OpensWeights.site`."""
    attempt: int
    """The scheduler's, at rank 0."""
    quantized: str | None
    """As `Context.quantized`."""
    aside: str | None
    """As `Context.aside`."""
    limits: Limits


class StartMessage(Message, kw_only=True):
    """A prompt whose rollouts start, as `PromptStart`."""

    tokens: AnyArray
    limit: int
    tickets: tuple[int, ...]
    seeds: tuple[int, ...]
    sampling: Sampling | None
    stop: tuple[str | int, ...] | None
    partial: tuple[RolloutTokens | None, ...]
    """Of each rollout, what it had drawn before it starts again."""

    @classmethod
    def of(cls, start: PromptStart) -> StartMessage:
        """The message of a start."""
        return cls(
            tokens=np.asarray(start.prompt, np.int64),
            limit=int(start.limit),
            tickets=tuple(map(int, start.tickets)),
            seeds=tuple(map(int, start.seeds)),
            sampling=start.sampling,
            stop=None if start.stop is None else tuple(start.stop.strings),
            partial=tuple(None if rollout is None else rollout.tokens for rollout in start.partial),
        )

    def start(self, stops: Callable[[Sequence[str | int]], StopStrings]) -> PromptStart:
        """The start again; `stops` gives the same object for the same strings."""
        return PromptStart(
            prompt=self.tokens,
            limit=self.limit,
            tickets=self.tickets,
            seeds=self.seeds,
            sampling=self.sampling,
            stop=None if self.stop is None else stops(self.stop),
            partial=[
                None if tokens is None else PartialRollout(begin=0, tokens=tokens)
                for tokens in self.partial
            ],
        )


class Step(Message):
    """Make a step."""

    state: int
    """Rank 0's, by `member.state_of`."""
    prompts: tuple[StartMessage, ...]


class Abort(Message):
    """Give rollouts up."""

    tickets: tuple[int, ...]


class Adopted(Message):
    """This version of the weights is in use."""

    version: int


class Digest(Message):
    """Say what you hold."""


# From the others


class Started(Message):
    """I run."""

    pid: int


class Digests(Message):
    """Checksums of the parameters that I hold."""

    digests: Mapping[str, int]


CODEC = codec_of(
    "engine-ranks", *KINDS, EngineSettings, Step, Abort, Adopted, Digest, Started, Digests
)
