"""A trainer of several ranks without a run: a fork of the test's process is rank 0, and forks the
others.
"""

import contextlib
import functools
import socket
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from rigs.operators import make_context
from torch.distributed.tensor import DTensor
from trainer_rig import tiny_learner, tiny_llama

from dataflow.limits import Limits
from dataflow.system.messages import Channel, Message
from operators.models.slices import Outline
from operators.ranks.team import Team, codec_of, forked
from operators.trainer import Trainer
from operators.training.learner.learner import Learner, StepOutcome
from operators.training.learner.rows import StepRows
from operators.training.learner.together import local
from operators.training.parallel.launch import Making, lead
from operators.training.parallel.lead import LedLearner
from operators.training.parallel.mesh import MeshTogether, placed
from transport.weights.layout.from_torch import layout_of
from transport.weights.layout.layout import Layout
from transport.weights.layout.reshard import reshard

TEST_S = 150.0


class Said(Message):
    """What a test's process has to say."""

    text: str


CODEC = codec_of("test", Said)


def in_a_fork(test: Callable[..., None]) -> Callable[..., None]:
    """A test whose process is a worker's: new, and in no process group before. torch keeps what it
    knows of meshes for as long as a process lives, so that a second one in it finds groups that are
    gone.
    """

    def main(end: int, rank: int, body: Callable[[], None]) -> int:
        channel = Channel(socket.socket(fileno=end), CODEC, TEST_S)
        said = ""
        try:
            body()
        except BaseException:
            said = traceback.format_exc()
        channel.send(Said(said))
        return 0

    @functools.wraps(test)
    def run(*given: Any, **named: Any) -> None:
        start = forked(functools.partial(main, body=functools.partial(test, *given, **named)))
        team = Team(test.__name__, 2, start, Limits(start_s=TEST_S, exchange_s=TEST_S), CODEC)
        try:
            said = team.answer(1, Said).text
        finally:
            team.close()
        assert not said, said

    return run


@contextlib.contextmanager
def led(
    trainer: Trainer,
    ranks: int,
    make: Callable[[], Learner] | None = None,
    *,
    found: Outline | None = None,
    timeout_s: float = 30.0,
    key_value_heads: int = 2,
    **facts: Any,
) -> Iterator[LedLearner]:
    """The learner of so many ranks; they end with the block. found: what they read slices of,
    instead of `make`.
    """
    torch.set_num_threads(1)
    limits = Limits(start_s=90.0, exchange_s=timeout_s)
    context = make_context(node="trainer", ranks=ranks, limits=limits, **facts)
    make = make or (lambda: tiny_learner(trainer, tiny_llama()))
    making = Making(
        trainer=trainer, context=context, make=make, outline=found, key_value_heads=key_value_heads
    )
    learner = lead(making)
    try:
        yield learner
    finally:
        learner.close()


def train(learner: Learner, steps: list[StepRows], lr: float = 1e-2) -> list[StepOutcome]:
    """One step after the other."""
    outcomes = []
    for version, rows in enumerate(steps):
        for part in learner.begin(rows, version):
            learner.micro(part)
        outcomes.append(learner.end(lr))
    return outcomes


def weights(learner: Learner) -> list[dict[str, torch.Tensor]]:
    """The trained weights, as each rank puts them together from those of all."""
    return [
        {
            name: torch.tensor(values).view(learner.parameters[name].shape)
            for name, values in each.items()
        }
        for each in learner.everywhere(_weights)
    ]


def sent(learner: LedLearner, readers: int) -> tuple[list[dict[str, torch.Tensor]], list[int]]:
    """The trained weights as so many ranks of a reader get them, each its rows, by the layout that
    the trainer's ranks agree on and the plan of copies from it; and the bytes that each rank of the
    trainer has sent.
    """
    plain, held = zip(*learner.everywhere(_offered), strict=True)
    layout = Layout.from_plain(plain[0])
    assert all(each == plain[0] for each in plain), "every rank describes all of them alike"
    full = {name: (each.shape, each.dtype) for name, each in layout.tensors.items()}
    wanted = Layout.fsdp(full, readers)
    plan = reshard(layout, wanted)
    source = [
        {name: torch.tensor(values).view(shape) for name, (values, shape) in each.items()}
        for each in held
    ]
    got = [
        {name: torch.full(shape, torch.nan) for name, (shape, _) in wanted.local(rank).items()}
        for rank in range(readers)
    ]
    for copy in plan.copies():
        place = got[copy.destination_rank][copy.destination_name][copy.destination_box]
        assert place.isnan().all(), "no element comes twice"
        place.copy_(source[copy.source_rank][copy.source_name][copy.source_box])
    nbytes = [
        sum(copy.nbytes for copy in plan.copies(source_rank=rank)) for rank in range(learner.ranks)
    ]
    return got, nbytes


def _offered(learner: Learner, rank: int, ranks: int) -> tuple[Any, dict[str, Any]]:
    assert isinstance(learner.together, MeshTogether)
    tensors = placed(learner.parameters, learner.together.mesh)
    own = {name: local(tensor).detach() for name, tensor in tensors.items()}
    return layout_of(tensors, range(ranks)).to_plain(), {
        name: (tensor.flatten().tolist(), list(tensor.shape)) for name, tensor in own.items()
    }


def _weights(learner: Learner, rank: int, ranks: int) -> dict[str, list[float]]:
    return {name: _whole(weight).flatten().tolist() for name, weight in learner.parameters.items()}


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()
