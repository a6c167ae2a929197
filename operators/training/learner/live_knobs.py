"""Knobs of a learner that change between two steps, on each of its ranks; imports torch."""

from __future__ import annotations

import functools
from typing import Any

from operators.training.knobs import TrainerKnobs
from operators.training.learner.learner import Learner
from operators.training.learner.loss_function import read_loss


def told(trainer: TrainerKnobs) -> dict[str, Any]:
    """What each rank's learner has to know of a trainer's knobs that may change; plain values."""
    return {
        "max_grad_norm": trainer.max_grad_norm,
        "weight_decay": trainer.weight_decay,
        "loss_knobs": {
            name: trainer.loss_function.knobs[name] for name in trainer.settable_of_loss()
        },
    }


def take_knobs(
    learner: Learner,
    rank: int,
    ranks: int,
    max_grad_norm: float,
    weight_decay: float,
    loss_knobs: dict[str, Any],
) -> None:
    """Go by these from the next step on."""
    learner.max_grad_norm = max_grad_norm
    for group in learner.optimizer.param_groups:
        # as `adamw` has it: vectors are not decayed
        if any(weight.ndim >= 2 for weight in group["params"]):
            group["weight_decay"] = weight_decay
    own = {name: value for name, value in loss_knobs.items() if name in learner.loss.knobs}
    if any(learner.loss.knobs[name] != value for name, value in own.items()):
        learner.take_loss(read_loss(functools.partial(learner.loss.call, **own), learner.node))
