"""Makes the learner of a trainer that runs on several ranks, from the side of rank 0, which starts
the others.
"""

from __future__ import annotations

import dataclasses
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dataflow.errors import RunError
from dataflow.model import Model
from dataflow.runtime import Context, DeviceShare
from dataflow.system.messages import Channel
from dataflow.weight_ends import WeightSite, WeightsOut
from dataflow.worker.weight_ports import open_writer
from operators.models.heads import key_value_heads
from operators.models.loading import load_configs, outlined_to_train
from operators.ranks import group
from operators.ranks.team import (
    Close,
    Exchange,
    Loading,
    Team,
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
from operators.trainer import TrainerKnobs
from operators.training.learner.build import make_learner
from operators.training.learner.learner import Learner, MicroBatch
from operators.training.parallel.lead import (
    CODEC,
    BeginStep,
    CallFunction,
    CallResult,
    EndStep,
    Join,
    LedLearner,
    Micro,
    Open,
    Publish,
    Share,
    ShareAlike,
    function_of,
    handed_on,
)
from operators.training.parallel.mesh import MeshTogether, TrainerMesh, make_mesh, placed
from operators.training.parallel.shard import learner_of_slices, read_slices, shard

if TYPE_CHECKING:
    from operators.models.slices import Outline


# A trainer's rank behind rank 0, in a process that rank 0 forked: it does what it is told, in
# step with the others.

POLL_S = 0.02
"""How often a rank that waits for a message looks after its end of the weight plane."""


class RankFollower:
    """The loop of one rank.

    consumes: messages of rank 0
    produces: this rank's part of each exchange, and of each version on the weight plane
    waits for: the next message, as long as rank 0 lives; in an exchange, the group's time-out
    unblocked by: a message; the end of rank 0, which closes the channel
    """

    def __init__(
        self,
        learner: Learner,
        channel: Channel[Any],
        rank: int,
        ranks: int,
        wait_s: float,
        opens: Callable[[Sequence[WeightSite], int, Learner], WeightsOut],
    ) -> None:
        """wait_s: for an exchange. opens: this rank's end of a weight plane at these sites, for
        what is offered there on that line.
        """
        self._learner, self._channel, self._rank, self._ranks = learner, channel, rank, ranks
        self._wait_s, self._opens = wait_s, opens
        self._micro_batches: deque[MicroBatch] = deque()

    def run(self) -> None:
        """Follow rank 0's messages until it ends the run.

        Raises:
            WorkerDied: rank 0 ended without saying so.
            DeadlineError: an exchange was not over in time.
        """
        parent, wait_s = os.getppid(), self._wait_s
        watch = group.watched(wait_s)
        while True:
            message = next_message(
                self._channel, self._rank, parent, wait_s, look_s=POLL_S, meanwhile=self._poll
            )
            if isinstance(message, Close):
                self._close()
                return
            with named(self._channel, self._rank, parent, in_words(type(message)), watch):
                self._apply(message)
            self._poll()

    def _apply(self, message: Any) -> None:
        learner = self._learner
        match message:
            case BeginStep():
                learner.open(message.version)
                self._micro_batches.clear()
            case Share() | ShareAlike():
                assert isinstance(learner.together, MeshTogether), "its model is shared out"
                own = message if isinstance(message, Share) else None
                share = handed_on(own, learner.together.mesh)
                self._micro_batches.extend(share.kept(learner))
            case Micro():
                learner.micro(self._micro_batches.popleft())
            case EndStep():
                learner.divisor = message.divisor
                if learner.end(message.learning_rate).culprit is not None:
                    self._channel.send(learner.findings())
            case Open():
                learner.writers[message.line] = self._opens(message.sites, message.line, learner)
            case Publish():
                learner.writers[message.line].publish(
                    message.version, learner.offered(message.line)
                )
            case CallFunction():
                call = function_of(message.function)
                result = call(
                    learner=learner, rank=self._rank, ranks=self._ranks, **message.arguments
                )
                self._channel.send(CallResult(result))
            case other:
                raise RunError(f"rank {self._rank} was told {other!r}, which it does not know")

    def _poll(self) -> None:
        for writer in self._learner.writers.values():
            writer.poll()

    def _close(self) -> None:
        for writer in self._learner.writers.values():
            close = getattr(writer, "close", None)
            if close is not None:
                close()


def led(trainer: TrainerKnobs, model: Model, context: Context) -> tuple[LedLearner, Context]:
    """The learner of several ranks that load `model`, and the context with a weight plane that all
    of them feed.
    """
    if context.devices.places is not None and context.devices.places.starts is not None:
        context.devices.places.starts.prepare({"source": model.source, "revision": model.revision})
    learner = lead(_making(trainer, model, context))
    writer = None if context.weights.writer is None else learner.opener(context.weights.writer)
    lines = enumerate(context.weights.refreshers.items(), 1)
    refreshers = {refresh: learner.opener(opens, line) for line, (refresh, opens) in lines}
    ends = dataclasses.replace(context.weights, writer=writer, refreshers=refreshers)
    return learner, dataclasses.replace(context, weights=ends)


def follower(
    trainer: TrainerKnobs, context: Context, settings: Mapping[str, Any]
) -> Callable[[int, int], int]:
    """As `Spreads.follower`, for what `led` sends."""
    return rank_main(_making(trainer, dataclasses.replace(trainer.model, **settings), context))


def _making(trainer: TrainerKnobs, model: Model, context: Context) -> Making:
    def make() -> Learner:
        return make_learner(
            trainer,
            model,
            node=context.node,
            device="cpu",
            seed=context.run.seed,
            aside=context.devices.aside,
            is_alone=False,
        )

    heads = key_value_heads(load_configs(model)[0]) if trainer.tensor_parallel > 1 else 0
    return Making(
        trainer=trainer,
        context=context,
        make=make,
        outline=outlined_to_train(model),
        key_value_heads=heads,
    )


@dataclass(frozen=True, kw_only=True)
class Making:
    """How each rank builds its learner. On GPUs, rank r takes the r-th after
    rank 0's, where the context gives no places.
    """

    trainer: TrainerKnobs
    context: Context
    make: Callable[[], Learner]
    """Without an `outline`: the learner of the whole model, in main memory; one rank at a time
    holds that, until it has kept its own slices."""
    outline: Outline | None = None
    """Of the model, of which then each rank reads its own slices, all at once."""
    key_value_heads: int = 0
    """Of the model, where its layers are shared out."""

    def joined(self, rank: int, folder: Path) -> TrainerMesh:
        """Meet the others."""
        return joined(
            self.context,
            rank,
            folder,
            tensor_parallel=self.trainer.tensor_parallel,
            dp_replicate=self.trainer.dp_replicate,
            key_value_heads=self.key_value_heads,
        )

    def loaded(self, rank: int, mesh: TrainerMesh, loading: Loading) -> Learner:
        """The learner, made in step with the other ranks once all have read the model."""
        trainer, context, device = self.trainer, self.context, device_of(self.context.devices, rank)
        compute = None if trainer.model.dtype == "float32" else getattr(torch, trainer.model.dtype)
        if self.outline is None:
            with loading(True):
                learner = self.make()
                shard(learner, mesh, compute, device, trainer.model.name)
        else:
            with loading(False):
                sharded = read_slices(trainer.model, self.outline, mesh, compute, device)
            learner = learner_of_slices(
                trainer, sharded, mesh, device, node=context.node, seed=context.run.seed
            )
        learner.settle_s = context.run.limits.settle_s
        return learner


def rank_main(making: Making) -> Callable[[int, int], int]:
    """What a fork runs that is a rank behind rank 0, given the number of its socket and its rank;
    its exit status.
    """
    context, limits, ranks = making.context, making.context.run.limits, making.context.devices.ranks

    def follow(end: int, rank: int) -> int:
        def built(channel: Channel[Any]) -> Learner:
            mesh = making.joined(
                rank, Path(expected(Join, channel, rank, os.getppid(), limits.exchange_s).folder)
            )
            watch = group.watched(limits.exchange_s)
            with named(channel, rank, os.getppid(), "making the learner", watch):
                loading = following(channel, rank, limits.exchange_s, watch)
                learner = making.loaded(rank, mesh, loading)
            watch.close()
            return learner

        def opened(sites: Sequence[WeightSite], line: int, learner: Learner) -> WeightsOut:
            assert isinstance(learner.together, MeshTogether), "its model is shared out"
            tensors = placed(learner.offered(line), learner.together.mesh)
            largest = learner.together.largest
            return open_writer(
                [_here(site, context) for site in sites],
                rank,
                ranks,
                str(device_of(context.devices, rank)),
                tensors,
                largest=largest,
                limits=limits,
                attempt=context.life.attempt,
            )

        def work(channel: Channel[Any]) -> None:
            RankFollower(built(channel), channel, rank, ranks, limits.exchange_s, opened).run()

        return run_rank(end, CODEC, limits.exchange_s, work)

    return follow


def lead(making: Making) -> LedLearner:
    """The learner of all ranks: this process is rank 0. The others on its host are forks of it, as
    it is now: call this before it has used a GPU.

    Raises:
        ModelError: the model cannot be loaded or shared out.
        WorkerDied, DeadlineError: a rank did not start.
    """
    context, limits, ranks = making.context, making.context.run.limits, making.context.devices.ranks
    start = on_their_hosts(
        forked(rank_main(making), context.devices.turn_files), context.devices.places
    )
    team = Team(context.node, ranks, start, limits, CODEC)
    with team.starting():
        team.tell(Join(str(team.folder)))
        mesh = making.joined(0, team.folder)
        watch = group.watched(limits.exchange_s)
        with watch.within():
            own = making.loaded(0, mesh, leading(team, watch))
    own.together = MeshTogether(mesh, team.fallen, limits.exchange_s)
    return LedLearner(own, Exchange(team, watch), mesh)


def _here(site: WeightSite, context: Context) -> WeightSite:
    """A site of rank 0's, as this rank has it: others find it at the address of its own host."""
    if context.devices.places is None or not site.host:
        return site
    return dataclasses.replace(site, host=context.devices.places.address)


def joined(
    context: Context,
    rank: int,
    folder: Path,
    *,
    tensor_parallel: int,
    dp_replicate: int = 1,
    key_value_heads: int = 0,
) -> TrainerMesh:
    """Meet the other ranks of the worker in a folder; those on other hosts are being started
    meanwhile. The rest as for `make_mesh`.
    """
    share, limits = context.devices, context.run.limits
    device = device_of(share, rank)
    torch.set_num_threads(share.threads)
    wait_s = limits.exchange_s if share.places is None else limits.start_s
    group.join(folder, rank, share.ranks, device, wait_s, share.places)
    return make_mesh(
        device,
        share.ranks,
        tensor_parallel=tensor_parallel,
        dp_replicate=dp_replicate,
        key_value_heads=key_value_heads,
    )


def device_of(share: DeviceShare, rank: int) -> torch.device:
    """The device of a rank, on its host; of one on rank 0's, where nobody says, so many after rank
    0's.
    """
    if share.places is not None:
        return torch.device(share.places.devices[rank])
    device = torch.device(share.device)
    return torch.device("cuda", (device.index or 0) + rank) if device.type == "cuda" else device
