"""An engine on several ranks: what every rank builds alike, rank 0's side, which keeps them in
step, and the life of a rank behind it.

An engine's state is a function of what it was told and of the tokens that were drawn, and the
gathered logits are the same bytes on every rank, so all ranks draw the same tokens without sending
them. Each message that begins a step carries a checksum of rank 0's rows, and of their tokens as
far as these have come from the device by themselves: a rank with other rows ends with an error at
once, one with other tokens within `decode.CHECK_STEPS` steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import shutil
import sys
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dataflow.errors import RunError
from dataflow.folder.partial_rollouts import PartialRollout
from dataflow.limits import Limits
from dataflow.records import AnyArray
from dataflow.runtime import Context, DeviceShare, GraphFacts
from dataflow.system.forking import has_used_cuda
from dataflow.system.messages import Channel, Message, Secret
from dataflow.tokens.rollout_tokens import RolloutTokens
from dataflow.weight_ends import WeightsBeside, WeightSite
from operators.engine.build import BuiltEngine, build_native
from operators.engine.decode import Engine, put_aside
from operators.engine.interface import EndedRollout, PromptStart
from operators.engine.parallel.shards import (
    AXES,
    Shard,
    connect,
    cut_rows,
    distribute,
    plain_pieces,
    sliced,
    taken,
)
from operators.engine.precision import Sliced
from operators.engine.sampler import Sampling
from operators.engine.stop_strings import StopStrings
from operators.generator import GeneratorKnobs
from operators.models.read_weights import RankMemory
from operators.ranks import group
from operators.ranks.group import ExchangeWatch, leave, watched
from operators.ranks.team import (
    Close,
    Exchange,
    Loading,
    Start,
    Team,
    codec_of,
    expected,
    following,
    forked,
    in_words,
    leading,
    named,
    next_message,
    program,
    run_rank,
)
from operators.ranks.weights import KINDS, Leader, beside, followed, met, opens_for_ranks

__all__ = ["digests", "join", "largest", "least", "leave", "watched"]


def join(folder: Path, rank: int, size: int, device: torch.device, timeout_s: float) -> DeviceMesh:
    """As `ranks.group.join`; the mesh of all ranks, as transformers expects it."""
    group.join(folder, rank, size, device, timeout_s)
    return init_device_mesh(device.type, (1, 1, 1, size), mesh_dim_names=AXES)


def least(value: int) -> int:
    """The smallest value that any rank gives; every rank calls this."""
    agreed = torch.tensor([value])
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
    return int(agreed)


def largest(numbers: torch.Tensor) -> None:
    """Replace each number by the largest that any rank has in its place; every rank calls this."""
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX)


def digests(shards: Mapping[str, Shard]) -> dict[str, int]:
    """A checksum (xxh3, 64 bits) of the bytes of each parameter of this rank, by name."""
    return {
        name: xxhash.xxh3_64_intdigest(
            shard.local.data.cpu().view(-1).view(torch.uint8).numpy().data
        )
        for name, shard in shards.items()
    }


@dataclass(frozen=True)
class RankEngine:
    """One rank's engine, and by name what it takes of each version."""

    built: BuiltEngine
    shards: dict[str, Shard]
    aside: Path | None
    """As of `Context`."""

    @property
    def engine(self) -> Engine:
        """The native engine that was built."""
        assert self.built.native is not None
        return self.built.native


def make_member(
    declaration: GeneratorKnobs, context: Context, mesh: DeviceMesh, loading: Loading
) -> RankEngine:
    """Load this rank's slices and build its engine; all ranks together, since the engine's
    self-test is a forward pass.

    Raises:
        ModelError: no plan for this family, heads that cannot be dealt out, or as `build_native`.
    """
    size = mesh.size()
    device = torch.device(context.devices.device)
    if device.type == "cpu":
        torch.set_num_threads(context.devices.threads)
    model = declaration.model
    own = sliced(
        model, functools.partial(distribute, mesh=mesh, device=device, name=model.name), loading
    )
    shares = Sliced(cut_rows(own.shards), largest, functools.partial(connect, own.module, mesh))

    def agreed(nbytes: int) -> int:
        return least(nbytes // size if device.type == "cpu" else nbytes)

    built = build_native(declaration, context, own.module, shares, own.merged, agreed)
    return RankEngine(built, taken(own.shards, built.engine.tensors), context.devices.aside)


def state_of(engine: Engine) -> int:
    """A checksum of the weights' version and of the live rows: whose they are, how long, and what
    has come of their tokens' checksums; equal on all ranks, and known without asking a device.
    """
    rows = engine.rows
    state = [np.array([engine.version, engine.checksum]), rows.ticket[: rows.n], rows.lengths]
    return zlib.crc32(np.concatenate(state).astype(np.int64).tobytes())


# From rank 0


class EngineSettings(Secret, kw_only=True):
    """What a rank builds its engine from."""

    declaration: GeneratorKnobs
    node: str
    rank: int
    size: int
    device: str
    threads: int
    folder: str
    """Where the ranks meet."""
    site: WeightSite | None
    """As `OpensWeights.site`."""
    attempt: int
    """The scheduler's, at rank 0."""
    quantized: str | None
    """As `Context.graph.quantized`."""
    aside: str | None
    """As `Context.devices.aside`."""
    limits: Limits


class StartMessage(Message, kw_only=True):
    """A prompt whose rollouts start, as `PromptStart`."""

    tokens: AnyArray
    limit: int
    tickets: tuple[int, ...]
    seeds: tuple[int, ...]
    sampling: Sampling | None
    stop: tuple[str | int, ...] | None
    goes_on: bool
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
            goes_on=start.goes_on,
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
            goes_on=self.goes_on,
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
        with named(channel, rank, parent, f"{in_words(type(message))} {engine.steps + 1}", watch):
            apply(message)


FIRST_S = Limits().exchange_s
"""For messages before the settings have come."""


def main(end: int) -> int:
    """Run one rank over the socket of this number; the exit status."""
    with contextlib.ExitStack() as ends:
        return run_rank(end, CODEC, FIRST_S, functools.partial(_work, ends=ends))


def _work(channel: Channel[Any], ends: contextlib.ExitStack) -> None:
    channel.send(Started(os.getpid()))
    settings = expected(EngineSettings, channel, 0, os.getppid(), FIRST_S)
    ends.callback(shutil.rmtree, settings.folder, ignore_errors=True)
    _serve(channel, settings)


def _serve(channel: Channel[Any], settings: EngineSettings) -> None:
    """Join, load, build, and follow rank 0 to the end."""
    node, rank, device, wait_s = (
        settings.node,
        settings.rank,
        settings.device,
        settings.limits.exchange_s,
    )
    mesh = join(Path(settings.folder), rank, settings.size, torch.device(device), wait_s)
    watch = watched(wait_s)
    aside = None if settings.aside is None else Path(settings.aside)
    context = Context(
        node=node,
        graph=GraphFacts(quantized=settings.quantized),
        devices=DeviceShare(device=device, threads=settings.threads, aside=aside),
    )
    with watch.within():
        member = make_member(
            settings.declaration, context, mesh, following(channel, rank, wait_s, watch)
        )
    own = {name: shard.local for name, shard in member.shards.items()}
    with beside(
        channel,
        rank,
        settings.site,
        device,
        own,
        plain_pieces(member.shards),
        limits=settings.limits,
        attempt=settings.attempt,
    ) as end:
        follow(member, channel, rank, wait_s, watch, end)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))


def make_parallel(declaration: GeneratorKnobs, context: Context, size: int) -> BuiltEngine:
    """As `build_native`, on `size` ranks: this process is rank 0; on GPUs, rank r takes the r-th
    after this one's.

    Raises:
        ModelError: the model cannot be loaded or dealt out.
        WorkerDied, DeadlineError: a rank did not start.
    """
    device = torch.device(context.devices.device)
    opens = opens_for_ranks(context.weights.reader)
    team = Team(
        declaration.name,
        size,
        start_of(device, context.devices.turn_files),
        context.run.limits,
        CODEC,
    )
    with team.starting():
        for rank in range(1, size):
            team.answer(rank, Started)
        for rank in range(1, size):
            place = (
                f"cuda:{(device.index or 0) + rank}"
                if device.type == "cuda"
                else context.devices.device
            )
            settings = EngineSettings(
                declaration=declaration,
                node=context.node,
                rank=rank,
                size=size,
                device=place,
                threads=context.devices.threads,
                folder=str(team.folder),
                site=None if opens is None else opens.site,
                attempt=context.life.attempt,
                quantized=context.graph.quantized,
                limits=context.run.limits,
                aside=None if context.devices.aside is None else str(context.devices.aside),
            )
            team.tell(settings, rank)
        mesh = join(team.folder, 0, size, device, context.run.limits.exchange_s)
        watch = watched(context.run.limits.exchange_s)
        with watch.within():
            member = make_member(declaration, context, mesh, leading(team, watch))
        slices = () if opens is None else met(team, plain_pieces(member.shards))
    exchange, reader = Exchange(team, watch), None
    if opens is not None:
        own = {name: shard.local for name, shard in member.shards.items()}
        reader = functools.partial(Leader, exchange, context.clock, opens, slices, own)
    return dataclasses.replace(
        member.built, engine=Lockstep(member, exchange), reader=reader, ranks=exchange
    )


def start_of(device: torch.device, keep: Sequence[int] = ()) -> Start:
    """A fork, which has imported all that this process has; a fresh interpreter where it is to use
    a GPU, or this process has used one. keep: open files for it.
    """
    if device.type == "cuda" or has_used_cuda():
        return program(__name__, keep)
    return forked(lambda end, _rank: main(end), keep)
