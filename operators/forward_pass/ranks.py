"""Makes a forward operator that runs on several ranks, from the side of rank 0, which starts the
others.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import Shard as ShardPlacement

from dataflow.errors import RunError
from dataflow.runtime import Context, WeightEnds
from dataflow.system.messages import Channel, Message
from dataflow.tokens.rollout_tokens import SamplingMask
from dataflow.weight_ends import OpensWeights, WeightsBeside
from operators.engine.parallel.shards import Shard, SlicedModel, localized, plain_pieces, sliced
from operators.forward import ForwardOperator
from operators.forward_pass.reading import Reading, reading_of
from operators.models.heads import key_value_heads
from operators.models.loading import load_configs
from operators.models.read_weights import RankMemory
from operators.ranks import group
from operators.ranks.team import (
    Close,
    Exchange,
    Loading,
    Team,
    codec_of,
    expected,
    following,
    forked,
    in_words,
    leading,
    named,
    next_message,
    on_their_hosts,
    run_rank,
)
from operators.ranks.weights import KINDS, Leader, Take, beside, followed, met, opens_for_ranks
from operators.training.learner.learner import Forward
from operators.training.learner.rows import TokenTree
from operators.training.parallel.launch import device_of, joined
from operators.training.parallel.mesh import TrainerMesh
from operators.training.parallel.shard import LayerBuffer, cut, swap

if TYPE_CHECKING:
    from operators.models.adapters import Merged


# What the ranks of a forward operator say to each other.

# From rank 0


class Join(Message):
    """Meet the other ranks in this folder."""

    folder: str


class Compute(Message):
    """Pass a micro-batch through the model."""

    packed: TokenTree
    left_T: SamplingMask | None
    wanted: tuple[str, ...]
    temperature: float
    """As `Forward.at` takes it."""


CODEC = codec_of("forward-ranks", *KINDS, Join, Compute)


# A forward operator's rank behind rank 0, in a process that rank 0 forked: it computes what it is
# told, in step.


def follow(
    channel: Channel[Any],
    rank: int,
    wait_s: float,
    join: Callable[[Path], Any],
    load: Callable[[Any, Loading], tuple[SlicedModel, Reading]],
    opens: Callable[[SlicedModel], AbstractContextManager[WeightsBeside | None]],
    aside: Path | None,
) -> None:
    """Join, load, and follow rank 0 to the end.

    wait_s: for an exchange. join: meets the other ranks in a folder; their mesh. load: reads this
    rank's slices, given the mesh, and makes what computes with them, in step with the other ranks.
    opens: its end of the weight plane, where versions of the weights come. aside: as of `Context`.

    consumes: messages of rank 0; its own part of each version
    produces: this rank's part of each exchange
    waits for: the next message, as long as rank 0 lives; in an exchange, the group's time-out
    unblocked by: a message; the end of rank 0, which closes the channel
    """
    parent = os.getppid()
    mesh = join(Path(expected(Join, channel, rank, parent, wait_s).folder))
    watch = group.watched(wait_s)
    with named(channel, rank, parent, "loading", watch):
        own, reading = load(mesh, following(channel, rank, wait_s, watch))
    attached = (shard.local for shard in own.shards.values())
    with opens(own) as end:
        memory = RankMemory(
            attached, aside, end, lambda: [*own.module.parameters(), *own.module.buffers()]
        )
        while not isinstance(message := next_message(channel, rank, parent, wait_s), Close):
            with (
                named(channel, rank, parent, in_words(type(message)), watch),
                torch.no_grad(),
            ):
                if isinstance(message, Compute):
                    reading.forward.at(message.temperature)
                    reading.forward.computed(message.packed, message.left_T, message.wanted)
                elif not (
                    followed(message, channel, end) or memory.followed(message, channel, watch)
                ):
                    raise RunError(f"rank {rank} was told {message!r:.200}, which it does not know")
                elif isinstance(message, Take) and own.merged is not None:
                    own.merged.adopted()


# Rank 0's forward pass: whatever it computes, the other ranks compute with it.


class LedForward:
    """A `Forward` of several ranks, for the runtime on rank 0.

    consumes: the calls of the runtime
    produces: messages to the other ranks; what rank 0 computes, which is what all of them do
    waits for: the other ranks, in each exchange, up to the group's time-out
    unblocked by: their part of the exchange, their end, or the time-out; after an error every call
        raises
    """

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
        take part.
        """
        self._passes += 1
        with self.ranks.together(f"pass {self._passes}"):
            self.ranks.tell(Compute(packed, left_T, tuple(wanted), self._temperature))
            return self._own.computed(packed, left_T, wanted)

    def close(self) -> None:
        """End the other ranks; may be called again."""
        self.ranks.close()
        group.leave()


@dataclass(frozen=True)
class _Making:
    """How each rank makes its part of the model."""

    declaration: ForwardOperator
    context: Context
    opens: OpensWeights | None
    """Where versions come, rank 0's; nowhere for ranks on several hosts."""

    def joined(self, rank: int, folder: Path) -> TrainerMesh:
        """Meet the others."""
        heads = key_value_heads(load_configs(self.declaration.model)[0])
        ranks = self.context.devices.ranks
        return joined(self.context, rank, folder, tensor_parallel=ranks, key_value_heads=heads)

    def loaded(self, rank: int, mesh: TrainerMesh, loading: Loading) -> tuple[SlicedModel, Reading]:
        """This rank's slices, and what asks them."""
        model = self.declaration.model

        def cut_up(module: torch.nn.Module) -> dict[str, Shard]:
            cut(module, mesh, model.name)
            ends = cut_ends(module, mesh["tp"])
            shards = localized(module, device_of(self.context.devices, rank))
            gather_ends(ends, mesh["tp"])
            return shards

        own = sliced(model, cut_up, loading)
        with torch.no_grad():
            return own, reading_of(self.declaration, self.context.node, own.module)

    def follow(self, end: int, rank: int) -> int:
        """What a fork runs that is a rank behind rank 0, given the number of its socket; its exit
        status.
        """
        context, limits = self.context, self.context.run.limits

        def work(channel: Channel[Any]) -> None:
            def opened(own: SlicedModel) -> AbstractContextManager[WeightsBeside | None]:
                return beside(
                    channel,
                    rank,
                    None if self.opens is None else self.opens.site,
                    str(device_of(self.context.devices, rank)),
                    {name: shard.local for name, shard in own.shards.items()},
                    plain_pieces(own.shards),
                    limits=limits,
                    attempt=context.life.attempt,
                )

            meet, load = functools.partial(self.joined, rank), functools.partial(self.loaded, rank)
            follow(channel, rank, limits.exchange_s, meet, load, opened, context.devices.aside)

        return run_rank(end, CODEC, limits.exchange_s, work)


def follower(
    declaration: ForwardOperator, context: Context, told: Mapping[str, Any]
) -> Callable[[int, int], int]:
    """As `Spreads.follower`, for what `led` sends."""
    model = dataclasses.replace(declaration.model, **told)
    return _Making(dataclasses.replace(declaration, model=model), context, None).follow


def led(
    declaration: ForwardOperator, context: Context
) -> tuple[Reading, Merged | None, Context, LedForward]:
    """How an operator of several ranks asks its model, rank 0's adapters where it has some,
    the context with a weight plane that all ranks read, and the forward pass of all ranks.

    This process is rank 0; on GPUs, rank r takes the r-th after this one's, where the context gives
    no places. The other ranks on its host are forks of it, as it is now: call this before it has
    used a GPU.

    Raises:
        ModelError: the model cannot be loaded or shared out.
        WorkerDied, DeadlineError: a rank did not start.
    """
    share, limits, model = context.devices, context.run.limits, declaration.model
    if share.places is not None and share.places.starts is not None:
        share.places.starts.prepare({"source": model.source, "revision": model.revision})
    opens = opens_for_ranks(context.weights.reader)
    making = _Making(declaration, context, opens)
    start = on_their_hosts(forked(making.follow, share.turn_files), share.places)
    team = Team(context.node, share.ranks, start, limits, CODEC)
    with team.starting():
        team.tell(Join(str(team.folder)))
        mesh = making.joined(0, team.folder)
        watch = group.watched(limits.exchange_s)
        with watch.within():
            own, reading = making.loaded(0, mesh, leading(team, watch))
        slices = () if opens is None else met(team, plain_pieces(own.shards))
    exchange = Exchange(team, watch)
    reading.forward = forward = LedForward(reading.forward, exchange)
    if opens is not None:
        reader = functools.partial(Leader, exchange, context.clock, opens, slices)
        context = dataclasses.replace(context, weights=WeightEnds(reader=reader))
    return reading, own.merged, context, forward


# The ends of a forward operator's model: each rank keeps some rows of embedding and head, and
# gathers the others while the layer computes; imports torch.


def cut_ends(module: Any, ranks: DeviceMesh) -> list[tuple[nn.Module, int]]:
    """Leave this rank its rows of the embedding and of the layer that gives logits, as DTensors;
    these layers, and how many rows each has on all ranks.

    One that has fewer rows than every rank needs for one stays whole. Weights that both share they
    still share.
    """
    cut: dict[int, nn.Parameter] = {}
    ends: list[tuple[nn.Module, int]] = []
    for layer in (module.get_input_embeddings(), module.get_output_embeddings()):
        weight = getattr(layer, "weight", None)
        if not isinstance(layer, nn.Embedding | nn.Linear) or not isinstance(weight, nn.Parameter):
            continue
        if isinstance(weight, DTensor) or len(_parts(weight, ranks.size())) < ranks.size():
            continue
        if id(weight) not in cut:
            cut[id(weight)] = nn.Parameter(_rows(weight, ranks), requires_grad=False)
        layer.weight = cut[id(weight)]
        ends.append((layer, len(weight)))
    return ends


def gather_ends(layers: Sequence[tuple[nn.Module, int]], ranks: DeviceMesh) -> None:
    """Have what `cut_ends` found, whose weights are plain local tensors by now, compute with the
    rows of all ranks, which call each layer together.
    """
    group, buffer = ranks.get_group(), LayerBuffer()
    for layer, rows in layers:
        gathering = _Gathering(rows, group, buffer)
        layer.register_forward_pre_hook(gathering.gather)
        layer.register_forward_hook(gathering.give_back, always_call=True)


class _Gathering:
    """Around each call of one layer."""

    def __init__(self, rows: int, group: dist.ProcessGroup, buffer: LayerBuffer) -> None:
        self._rows, self._group, self._buffer = rows, group, buffer
        self._own: nn.Parameter | None = None
        """This rank's rows, while it has those of all."""

    @torch.no_grad()
    def gather(self, layer: nn.Module, inputs: object) -> None:
        """Before the layer computes."""
        own = layer.get_parameter("weight")
        size = (self._rows, *own.shape[1:])
        whole = (
            self._buffer.take(size, own.dtype) if own.device.type == "cpu" else own.new_empty(size)
        )
        parts = _parts(whole, self._group.size())
        if own.device.type == "cpu":
            parts[self._group.rank()].copy_(own)
            swap(self._group, lambda far: own.data, lambda far: parts[far])
        else:
            dist.all_gather(list(parts), own.data, group=self._group)
        self._own, layer._parameters["weight"] = own, nn.Parameter(whole, requires_grad=False)

    def give_back(self, layer: nn.Module, inputs: object, output: object) -> None:
        """When it has."""
        if self._own is not None:
            layer._parameters["weight"], self._own = self._own, None


def _parts(weight: Tensor, ranks: int) -> tuple[Tensor, ...]:
    """The rows of each rank, as DTensor deals them out."""
    return torch.chunk(weight.detach(), ranks)


def _rows(weight: Tensor, ranks: DeviceMesh) -> DTensor:
    """This rank's, in memory of their own."""
    dealt = distribute_tensor(weight.detach(), ranks, [ShardPlacement(0)], src_data_rank=None)
    if weight.is_meta:
        return dealt
    return DTensor.from_local(
        dealt.to_local().clone(),
        ranks,
        [ShardPlacement(0)],
        run_check=False,
        shape=weight.shape,
        stride=weight.stride(),
    )
