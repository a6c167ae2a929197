"""Makes a forward operator that runs on several ranks, from the side of rank 0, which starts the
others."""

from __future__ import annotations

import dataclasses
import functools
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dataflow.runtime import Context
from dataflow.system.channel import Channel
from dataflow.weight_ends import WeightsBeside
from operators.engine.parallel.shards import Shard, localized, plain_pieces
from operators.engine.parallel.sliced_model import SlicedModel, sliced
from operators.forward_pass.knobs import ForwardKnobs
from operators.forward_pass.parallel.ends import cut_ends, gather_ends
from operators.forward_pass.parallel.follow import follow
from operators.forward_pass.parallel.lead import LedForward
from operators.forward_pass.parallel.messages import CODEC, Join
from operators.forward_pass.query import Reading
from operators.forward_pass.reading import reading_of
from operators.models.heads import key_value_heads
from operators.models.loading import load_configs
from operators.ranks import group
from operators.ranks.exchange import Exchange
from operators.ranks.loading import Loading, leading
from operators.ranks.process import run_rank
from operators.ranks.team import Team, forked
from operators.ranks.weights import Leader, beside, met, opens_for_ranks
from operators.training.parallel.launch import device_of
from operators.training.parallel.mesh import TrainerMesh, make_mesh
from operators.training.parallel.shard import cut

if TYPE_CHECKING:
    from operators.models.merged_adapters import Merged


def led(declaration: ForwardKnobs, context: Context) -> tuple[Reading, Merged | None, Context]:
    """How an operator of `context.ranks` ranks asks its model, rank 0's adapters where it has some,
    and the context with a weight plane that all ranks read.

    This process is rank 0; on GPUs, rank r takes the r-th after this one's. The other ranks are
    forks of it, as it is now: call this before it has used a GPU.

    Raises:
        ModelError: the model cannot be loaded or shared out.
        WorkerDied, DeadlineError: a rank did not start.
    """
    ranks, limits, model = context.ranks, context.limits, declaration.model
    heads, opens = key_value_heads(load_configs(model)[0]), opens_for_ranks(context.reader)

    def joined(rank: int, folder: Path) -> TrainerMesh:
        device = device_of(context.device, rank)
        torch.set_num_threads(context.threads)
        group.join(folder, rank, ranks, device, limits.exchange_s)
        return make_mesh(device, ranks, tensor_parallel=ranks, key_value_heads=heads)

    def loaded(rank: int, mesh: TrainerMesh, loading: Loading) -> tuple[SlicedModel, Reading]:
        def cut_up(module: torch.nn.Module) -> dict[str, Shard]:
            cut(module, mesh, model.name)
            ends = cut_ends(module, mesh["tp"])
            shards = localized(module, device_of(context.device, rank))
            gather_ends(ends, mesh["tp"])
            return shards

        own = sliced(model, cut_up, loading)
        with torch.no_grad():
            return own, reading_of(declaration, context.node, own.module)

    def main(end: int, rank: int) -> int:
        def work(channel: Channel[Any]) -> None:
            def opened(own: SlicedModel) -> AbstractContextManager[WeightsBeside | None]:
                tensors = {name: shard.local for name, shard in own.shards.items()}
                device, site = (
                    str(device_of(context.device, rank)),
                    None if opens is None else opens.site,
                )
                slices = plain_pieces(own.shards)
                return beside(
                    channel,
                    rank,
                    site,
                    device,
                    tensors,
                    slices,
                    limits=limits,
                    attempt=context.attempt,
                )

            meet, load = functools.partial(joined, rank), functools.partial(loaded, rank)
            follow(channel, rank, limits.exchange_s, meet, load, opened, context.aside)

        return run_rank(end, CODEC, limits.exchange_s, work)

    team = Team(context.node, ranks, forked(main, context.turn_files), limits, CODEC)
    with team.starting():
        team.tell(Join(str(team.folder)))
        mesh = joined(0, team.folder)
        watch = group.watched(limits.exchange_s)
        with watch.within():
            own, reading = loaded(0, mesh, leading(team, watch))
        slices = () if opens is None else met(team, plain_pieces(own.shards))
    exchange = Exchange(team, watch)
    reading.forward = LedForward(reading.forward, exchange)
    if opens is not None:
        reader = functools.partial(Leader, exchange, context.clock, opens, slices)
        context = dataclasses.replace(context, reader=reader)
    return reading, own.merged, context
