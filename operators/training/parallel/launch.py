"""Makes the learner of a trainer that runs on several ranks, from the side of rank 0, which starts the others."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dataflow.model import Model
from dataflow.node import Context
from dataflow.system.channel import Channel
from dataflow.weight_ends import WeightsOut
from dataflow.worker.weight_ports import offer_beside
from operators.models.heads import key_value_heads
from operators.models.loading import load_configs, outlined_to_train
from operators.ranks import group
from operators.ranks.exchange import Exchange, expected, named
from operators.ranks.messages import Build, Load, Loaded
from operators.ranks.process import run_rank
from operators.ranks.team import Team, forked
from operators.training.knobs import TrainerKnobs
from operators.training.learner.build import make_learner
from operators.training.learner.learner import Learner
from operators.training.parallel.follow import RankFollower
from operators.training.parallel.lead import LedLearner
from operators.training.parallel.mesh import MeshTogether, TrainerMesh, make_mesh, placed
from operators.training.parallel.messages import CODEC, Join
from operators.training.parallel.shard import learner_of_slices, read_slices, shard

if TYPE_CHECKING:
    from operators.models.slices import Outline


def led(trainer: TrainerKnobs, model: Model, context: Context) -> tuple[LedLearner, Context]:
    """The learner of several ranks that load `model`, and the context with a weight plane that all of them feed."""
    heads = key_value_heads(load_configs(model)[0]) if trainer.tensor_parallel > 1 else 0

    def make() -> Learner:
        return make_learner(trainer, model, node=context.node, device="cpu", seed=context.seed, aside=context.aside)

    learner = lead(trainer, context, make, outlined_to_train(model), key_value_heads=heads)
    writer = None if context.writer is None else learner.opener(context.writer)
    lines = enumerate(context.refreshers.items(), 1)
    refreshers = {refresh: learner.opener(opens, line) for line, (refresh, opens) in lines}
    return learner, dataclasses.replace(context, writer=writer, refreshers=refreshers)


def lead(
    trainer: TrainerKnobs, context: Context, make: Callable[[], Learner], found: Outline | None = None, *,
    key_value_heads: int = 0,
) -> LedLearner:  # fmt: skip
    """The learner of `context.ranks` ranks: this process is rank 0; on GPUs, rank r takes the r-th after this one's.

    found: of the model, of which then each rank reads its own slices, all at once. make: where there is none, the
    learner of the whole model, in main memory; one rank at a time holds that, until it has kept its own slices. The
    other ranks are forks of this process, as it is now: call this before it has used a GPU. key_value_heads: of the
    model, where its layers are shared out.

    Raises:
        ModelError: the model cannot be loaded or shared out.
        WorkerDied, DeadlineError: a rank did not start.
    """
    ranks, limits = context.ranks, context.limits

    def joined(rank: int, folder: Path) -> TrainerMesh:
        device = device_of(context.device, rank)
        torch.set_num_threads(context.threads)
        group.join(folder, rank, ranks, device, limits.exchange_s)
        return make_mesh(
            device, ranks, tensor_parallel=trainer.tensor_parallel, dp_replicate=trainer.dp_replicate,
            key_value_heads=key_value_heads,
        )  # fmt: skip

    def loaded(rank: int, mesh: TrainerMesh) -> Callable[[], Learner]:
        """What makes the learner, in step with the other ranks, once all have read the model."""
        compute = None if trainer.model.dtype == "float32" else getattr(torch, trainer.model.dtype)
        device = device_of(context.device, rank)
        if found is None:
            learner = make()
            shard(learner, mesh, compute, device, trainer.model.name)
            return lambda: learner
        sharded = read_slices(trainer.model, found, mesh, compute, device)
        return lambda: learner_of_slices(trainer, sharded, mesh, device, node=context.node, seed=context.seed)

    def follow(end: int, rank: int) -> int:
        def built(channel: Channel[Any]) -> Learner:
            mesh = joined(rank, Path(expected(Join, channel, rank, os.getppid(), limits.exchange_s).folder))
            expected(Load, channel, rank, os.getppid(), limits.exchange_s)
            making = loaded(rank, mesh)
            channel.send(Loaded())
            expected(Build, channel, rank, os.getppid(), limits.exchange_s)
            watch = group.watched(limits.exchange_s)
            with named(channel, rank, os.getppid(), "making the learner", watch):
                learner = making()
            learner.settle_s = limits.settle_s
            watch.close()
            return learner

        def opened(sites: Sequence[Mapping[str, Any]], line: int, learner: Learner) -> WeightsOut:
            assert isinstance(learner.together, MeshTogether), "its model is shared out"
            tensors = placed(learner.offered(line), learner.together.mesh)
            device = str(device_of(context.device, rank))
            largest = learner.together.largest
            return offer_beside(
                sites, rank, ranks, device, tensors, largest=largest, limits=limits, attempt=context.attempt
            )

        def work(channel: Channel[Any]) -> None:
            RankFollower(built(channel), channel, rank, ranks, limits.exchange_s, opened).run()

        return run_rank(end, CODEC, limits.exchange_s, work)

    team = Team(context.node, ranks, forked(follow, context.turn_files), limits, CODEC)
    with team.starting():
        team.tell(Join(str(team.folder)))
        mesh = joined(0, team.folder)
        if found is not None:
            team.tell(Load())
        making = loaded(0, mesh)
        for rank in range(1, ranks):
            if found is None:
                team.tell(Load(), rank)
            team.answer(rank, Loaded)
        team.tell(Build())
        watch = group.watched(limits.exchange_s)
        with watch.within():
            own = making()
    own.settle_s = limits.settle_s
    own.together = MeshTogether(mesh, team.fallen, limits.exchange_s)
    return LedLearner(own, Exchange(team, watch), mesh)


def device_of(first: str, rank: int) -> torch.device:
    """The device of a rank, where rank 0 has this one."""
    device = torch.device(first)
    return torch.device("cuda", (device.index or 0) + rank) if device.type == "cuda" else device
