"""The learner of a trainer on one rank or on several; imports torch."""

from __future__ import annotations

from dataflow.model import Model
from dataflow.runtime import Context
from operators.training.knobs import TrainerKnobs
from operators.training.learner.build import make_learner
from operators.training.learner.learner import Learner


def learner_on_ranks(
    trainer: TrainerKnobs, model: Model, context: Context
) -> tuple[Learner, Context]:
    """The learner of one rank, or of several; and the context, whose weight plane then takes what
    each rank has."""
    if context.ranks == 1:
        learner = make_learner(
            trainer,
            model,
            node=context.node,
            device=context.device,
            seed=context.seed,
            aside=context.aside,
        )
        learner.settle_s = context.limits.settle_s
        return learner, context
    from operators.training.parallel.launch import led

    return led(trainer, model, context)
