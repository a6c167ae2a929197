"""Keeps the engines of all ranks in step: rank 0 says what it is about to do, and the others do the
same.

An engine's state is a function of what it was told and of the tokens that were drawn, and the
gathered logits are the same bytes on every rank, so all ranks draw the same tokens without sending
them. Each message that begins a step carries a checksum of rank 0's rows, so a rank that drew
otherwise ends with an error before it can answer wrongly.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from dataflow.errors import RunError
from dataflow.folder.partial_rollouts import PartialRollout
from dataflow.limits import Limits
from dataflow.records import AnyArray
from dataflow.system.channel import Channel
from dataflow.system.messages import Message, Plain, Secret
from dataflow.tokens.rollout_tokens import RolloutTokens
from dataflow.weight_ends import WeightsBeside
from operators.engine.decode import put_aside
from operators.engine.interface import EndedRollout, PromptStart
from operators.engine.parallel.member import RankEngine, digests, leave, state_of
from operators.engine.sampling_params import Sampling
from operators.engine.stop_strings import StopStrings
from operators.generator import GeneratorKnobs
from operators.models.read_weights import RankMemory
from operators.ranks.group import ExchangeWatch
from operators.ranks.messages import Close, codec_of
from operators.ranks.team import Exchange, named, next_message
from operators.ranks.weights import KINDS, followed

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


class Lockstep:
    """Rank 0's engine, with those of the other ranks behind it; what it does not define is the
    engine's own.

    consumes: the calls of the generator's runtime
    produces: messages to the other ranks; what rank 0's engine returns
    waits for: the other ranks, in each exchange, up to the group's time-out
    unblocked by: their part of the exchange, their end, or the time-out; after an error every call
        raises
    """

    def __init__(self, member: RankEngine, exchange: Exchange) -> None:
        """member: rank 0's."""
        self._engine = member.engine
        self.shards = member.shards
        """Rank 0's, by name."""
        self._exchange = exchange
        self._tell, self._together, self._answers = (
            exchange.tell,
            exchange.together,
            exchange.answers,
        )

    @property
    def tensors(self) -> dict[str, Any]:
        """None that can be written alone. Raises RunError."""
        team = self._exchange.team
        raise RunError(
            f"the weights of '{team.node}' lie on {team.size} ranks; found a call for whole"
            " tensors; let each rank take its part of a version from the weight plane, or use"
            " tensor_parallel=1"
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self, starts: Sequence[PromptStart] = ()) -> list[EndedRollout]:
        """As `Engine.step`, on all ranks. Raises WorkerDied or DeadlineError when a rank does not
        take part.
        """
        with self._together(f"step {self._engine.steps + 1}"):
            self._tell(Step(state_of(self._engine), tuple(map(StartMessage.of, starts))))
            return self._engine.step(starts)

    def abort(self, tickets: Collection[int]) -> list[EndedRollout]:
        """As `Engine.abort`, on all ranks."""
        with self._together("an abort"):
            self._tell(Abort(tuple(map(int, tickets))))
            return self._engine.abort(tickets)

    def adopted(self, version: int) -> None:
        """As `Engine.adopted`, on all ranks."""
        with self._together(f"taking version {version}"):
            self._tell(Adopted(version))
            self._engine.adopted(version)

    def digests(self) -> list[dict[str, int]]:
        """Checksums of the parameters that each rank holds, rank by rank, by name."""
        with self._together("comparing weights"):
            self._tell(Digest())
            answers = self._answers(Digests)
            return [digests(self.shards), *(dict(answer.digests) for answer in answers)]

    def close(self) -> None:
        """Give up all rows and end the other ranks; may be called again."""
        self._engine.close()
        self._exchange.close()
        leave()


def follow(
    member: RankEngine,
    channel: Channel[Any],
    rank: int,
    wait_s: float,
    watch: ExchangeWatch,
    beside: WeightsBeside | None = None,
) -> None:
    """Follow rank 0's messages until it ends the run.

    wait_s: for a message that has begun. watch: bounds exchanges. beside: this rank's end of the
    weight plane, where there is one.

    consumes: messages of rank 0
    produces: this rank's part of each exchange
    waits for: the next message, as long as rank 0 lives; in an exchange, the group's time-out
    unblocked by: a message; the end of rank 0, which closes the channel

    Raises:
        WorkerDied: rank 0 ended without saying so.
        RunError: this rank has drawn other tokens than rank 0.
    """
    engine, tokenizer = member.engine, member.built.tokenizer
    attached = (shard.local for shard in member.shards.values())
    memory = RankMemory(attached, member.aside, beside, functools.partial(put_aside, engine))
    cache: dict[tuple[str | int, ...], StopStrings] = {}
    parent = os.getppid()

    def stops(strings: Sequence[str | int]) -> StopStrings:
        key = tuple(strings)
        return cache.get(key) or cache.setdefault(key, StopStrings(tokenizer, key))

    def apply(message: Any) -> None:
        match message:
            case Step():
                if state_of(engine) != message.state:
                    raise RunError(
                        f"rank {rank} is not in step with rank 0: before step {engine.steps + 1}"
                        " its rows or their tokens differ; use the same kind of device and the"
                        " same libraries for all ranks"
                    )
                engine.step([prompt.start(stops) for prompt in message.prompts])
            case Abort():
                engine.abort(message.tickets)
            case Adopted():
                engine.adopted(message.version)
            case Digest():
                channel.send(Digests(digests(member.shards)))
            case _ if not (
                followed(message, channel, beside) or memory.followed(message, channel, watch)
            ):
                raise RunError(
                    f"rank {rank} was told {message!r}, which it does not know; start it with"
                    " rank 0"
                )

    while True:
        message = next_message(channel, rank, parent, wait_s)
        if isinstance(message, Close):
            return
        with named(
            channel, rank, parent, f"{type(message).__name__.lower()} {engine.steps + 1}", watch
        ):
            apply(message)
